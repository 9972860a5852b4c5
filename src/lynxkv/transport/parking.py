"""Pulls of transfers that are not announced yet."""

import asyncio
from dataclasses import dataclass

from lynxkv.errors import DeadlineExceeded, LynxError, Overloaded, TransferRejected
from lynxkv.transport.connection import Connection
from lynxkv.wire.events import Pull, failed


@dataclass(frozen=True, slots=True)
class Parked:
    """A pull that waits for its transfer to be announced."""

    pull: Pull
    connection: Connection
    timer: asyncio.TimerHandle


class Parking:
    """Keeps pulls until their transfer is announced, fails, or their deadline passes; on the server's loop only.

    Parameters
    ----------
    most : int
        One more is refused.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._parked: dict[bytes, Parked] = {}

    def __len__(self) -> int:
        return len(self._parked)

    def __contains__(self, transfer: bytes) -> bool:
        return transfer in self._parked

    @property
    def parked(self) -> dict[bytes, Parked]:
        """All of them by transfer; not to be changed."""
        return self._parked

    def park(self, pull: Pull, connection: Connection) -> None:
        """Keep a pull; :class:`Overloaded` if as many are kept as may be."""
        if len(self._parked) >= self._most:
            raise Overloaded(f"no room: {self._most} pulls wait already; retry later")
        error = DeadlineExceeded(f"transfer {pull.transfer.hex()[:12]} was not announced within {pull.deadline_s:g} s")
        timer = asyncio.get_running_loop().call_later(pull.deadline_s, self.refuse, pull.transfer, error)
        self._parked[pull.transfer] = Parked(pull, connection, timer)

    def take(self, transfer: bytes) -> Parked | None:
        """The pull that waits for ``transfer``, no longer kept; None: nobody does."""
        parked = self._parked.pop(transfer, None)
        if parked is not None:
            parked.timer.cancel()
        return parked

    def refuse(self, transfer: bytes, error: LynxError) -> bool:
        """Tell whoever waits for ``transfer`` that it will not come; whether somebody did."""
        parked = self.take(transfer)
        if parked is None:
            return False
        parked.connection.send(failed(error), transfer)
        return True

    def refuse_all(self, why: str) -> None:
        """Tell everyone who waits that nothing will come."""
        for transfer in list(self._parked):
            self.refuse(transfer, TransferRejected(why))

    def is_others(self, transfer: bytes, connection: Connection) -> bool:
        """Whether another peer than ``connection`` waits for ``transfer``."""
        parked = self._parked.get(transfer)
        return parked is not None and parked.connection is not connection

    def lost(self, connection: Connection) -> None:
        """A peer is gone, and with it its pulls."""
        for transfer in [t for t, parked in self._parked.items() if parked.connection is connection]:
            self.take(transfer)
