"""Announced transfers: each under a lease that progress renews, some of them being delivered."""

from collections.abc import Iterator
from dataclasses import dataclass

from lynxkv.transport.connection import Connection
from lynxkv.transport.delivery import Delivery
from lynxkv.transport.outgoing import Outgoing


@dataclass(slots=True, eq=False)
class Lease:
    """One announced transfer; ``delivery`` is there while a peer pulls it."""

    outgoing: Outgoing
    progress: float
    delivery: Delivery | None = None

    @property
    def waits_for(self) -> str:
        """What it needs to make progress."""
        if self.delivery is None:
            return "a pull"
        if all(self.delivery.ended(tier) for tier in self.delivery.tiers):
            return "an acknowledge"
        return "its receiver" if self.delivery.queued else "its producer"


class Leases:
    """All leases by transfer; used on the server's loop only.

    Parameters
    ----------
    lease_s : float
        One without progress for so long is over.
    """

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._leases: dict[bytes, Lease] = {}

    def __len__(self) -> int:
        return len(self._leases)

    def __contains__(self, transfer: bytes) -> bool:
        return transfer in self._leases

    def __iter__(self) -> Iterator[Lease]:
        """All of them, in a copy."""
        return iter(list(self._leases.values()))

    def add(self, outgoing: Outgoing, now: float) -> Lease:
        """The lease of a transfer that is announced."""
        lease = self._leases[outgoing.transfer] = Lease(outgoing, now)
        return lease

    def get(self, transfer: bytes) -> Lease | None:
        """The lease of ``transfer``, or None."""
        return self._leases.get(transfer)

    def pop(self, transfer: bytes) -> Lease | None:
        """The same, and it is over."""
        return self._leases.pop(transfer, None)

    def delivery(self, transfer: bytes) -> Delivery | None:
        """How ``transfer`` is being delivered; None: it is not."""
        lease = self._leases.get(transfer)
        return None if lease is None else lease.delivery

    def touch(self, transfer: bytes, now: float) -> None:
        """There is progress; no effect on one that is over."""
        lease = self._leases.get(transfer)
        if lease is not None:
            lease.progress = now

    @property
    def deliveries(self) -> list[Delivery]:
        """All that are being delivered."""
        return [lease.delivery for lease in self._leases.values() if lease.delivery is not None]

    def of(self, connection: Connection) -> list[Lease]:
        """What ``connection`` pulls."""
        return [lease for lease in self if lease.delivery is not None and lease.delivery.connection is connection]

    def expired(self, now: float) -> list[Lease]:
        """Those whose time is over."""
        return [lease for lease in self if now - lease.progress > self.lease_s]
