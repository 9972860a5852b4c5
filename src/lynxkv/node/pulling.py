"""One request's transfer, as the decode node's loop sees it: admit, pull, and end it one way or the other."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import msgspec

from lynxkv.codec import Tier
from lynxkv.errors import LynxError, TransferError
from lynxkv.node.arrivals import Arrivals
from lynxkv.node.links import Links, Peer
from lynxkv.transport import Incoming, Link
from lynxkv.wire import Admit, Pull

log = logging.getLogger(__name__)

KEEP_S = 5.0
"""How often a lease is renewed while memory is waited for."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked of a prefill node.

    Parameters
    ----------
    peer
        Where it listens.
    admit : Admit or None
        Sent first; None: the transfer was admitted elsewhere.
    pull : Pull
        Its epoch is that of the admission, where there is one here.
    admit_s, stall_s : float
        Deadlines of the admission, and of the next byte.
    """

    peer: Peer
    admit: Admit | None
    pull: Pull
    admit_s: float
    stall_s: float


class Pulling:
    """Runs one order; everything it does happens on the links' loop. Whatever goes wrong reaches ``arrivals``.

    :meth:`start`, :meth:`acknowledge` and :meth:`cancel` are for the decoding thread; what the loop knows of the
    request is changed on the loop only, so that no order of these calls leaves a transfer behind.
    """

    def __init__(self, links: Links, order: Order, arrivals: Arrivals) -> None:
        self._links, self._order, self._arrivals = links, order, arrivals
        self._task: asyncio.Task[None] | None = None
        self._link: Link | None = None
        self._incoming: Incoming | None = None
        self._ended = False
        self._before = 0

    @property
    def received(self) -> list[int]:
        """Payload bytes by tier so far."""
        return list(self._incoming.received) if self._incoming is not None else [0] * len(Tier)

    @property
    def wire_bytes(self) -> int:
        """All bytes the link has received since this began, other requests' included."""
        return self._link.received_bytes - self._before if self._link is not None else 0

    def start(self) -> None:
        """Begin."""
        if not self._links.post(self._start):
            self._arrivals.ended(TransferError("this decode node was closed"))

    def acknowledge(self) -> None:
        """Every byte is used: end the lease as soon as the transfer itself has ended."""
        self._links.post(self._acknowledge)

    def cancel(self, reason: str) -> None:
        """Tell the prefill node, unless the transfer was acknowledged or has ended; idempotent."""
        self._links.post(self._cancel, reason)

    def _start(self) -> None:
        if not self._ended:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def _run(self) -> None:
        order, transfer = self._order, self._order.pull.transfer
        try:
            link = self._link = await self._links.to(order.peer)
            self._before = link.received_bytes
            pull = order.pull
            if order.admit is not None:
                admitted = await link.admit(order.admit, deadline_s=order.admit_s)
                pull = msgspec.structs.replace(pull, epoch=admitted.epoch)
            self._incoming = await link.pull(pull, self._arrivals, stall_s=order.stall_s)
        except LynxError as error:
            self._arrivals.ended(error)
        except Exception as error:  # the loop's edge: the thread that waits is told
            log.exception("transfer %s could not be pulled", transfer.hex()[:12])
            self._arrivals.ended(TransferError(f"the transfer could not be pulled: {type(error).__name__}: {error}"))

    def _acknowledge(self) -> None:
        if self._incoming is not None and not self._ended:
            self._ended = True
            self._task = asyncio.get_running_loop().create_task(_acknowledge(self._incoming))

    def _cancel(self, reason: str) -> None:
        if self._ended:
            return
        self._ended = True
        if self._task is not None:
            self._task.cancel()
        if self._incoming is not None:
            self._incoming.cancel(reason)
        else:
            _give_up(self._links, self._order.peer, self._order.pull.transfer, reason)


async def _acknowledge(incoming: Incoming) -> None:
    with suppress(LynxError):  # the bytes are all here and used: how the lease ends is the peer's affair
        await incoming.wait()
        incoming.acknowledge()


def _give_up(links: Links, peer: Peer, transfer: bytes, reason: str) -> None:
    """Tell ``peer`` that nobody here will pull ``transfer``, on the loop."""
    link = links.up(peer)
    if link is not None and not link.pulls(transfer):  # an id given twice: that pull is another request's
        link.cancel(transfer, reason)


@contextmanager
def keeping(links: Links, peer: Peer, transfer: bytes) -> Iterator[None]:
    """Keep the lease of a transfer that was admitted elsewhere while its request waits for memory.

    If that wait fails, the transfer is cancelled. What the link meets is met again by the pull, and reported then.
    """
    task: asyncio.Task[None] | None = None

    async def keep() -> None:
        with suppress(LynxError):
            while True:
                (await links.to(peer)).keep(transfer)
                await asyncio.sleep(KEEP_S)

    def start() -> None:
        nonlocal task
        task = asyncio.get_running_loop().create_task(keep())

    def stop(given_up: str | None) -> None:
        if task is not None:
            task.cancel()
        if given_up is not None:
            _give_up(links, peer, transfer, given_up)

    links.post(start)
    try:
        yield
    except BaseException as error:
        links.post(stop, str(error) or "the request is over")
        raise
    links.post(stop, None)
