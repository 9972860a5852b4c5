"""Writes frames: the best flow first, at the link's rate, no sooner than the kernel takes them."""

import asyncio
from collections.abc import Callable

from lynxkv.codec.spec import Tier
from lynxkv.errors import LynxError
from lynxkv.transport.bucket import TokenBucket
from lynxkv.transport.connection import Connection
from lynxkv.transport.delivery import Delivery
from lynxkv.transport.scheduling import Scheduler
from lynxkv.wire.frames import MAX_DATA

FRAME_S = 0.005
"""Under a rate limit a frame takes about so long: what an anchor that comes late waits for at most."""
LEAST_FRAME = 8 << 10
TURN_FRAMES = 16
"""Frames written before the loop gets to other work."""


class Pump:
    """The sending half of a server: all its deliveries over all its connections.

    Which flow goes next is decided a frame at a time, when the rate and the kernel allow one.

    Parameters
    ----------
    rate : float or None
        Bytes a second of everything that is sent, headers and events included.
    on_sent : callable
        A delivery has sent so many bytes of a tier.
    on_error : callable
        A delivery cannot go on.
    """

    def __init__(
        self,
        rate: float | None,
        on_sent: Callable[[Delivery, Tier, int], None],
        on_error: Callable[[Delivery, LynxError], None],
    ) -> None:
        self._bucket = None if rate is None else TokenBucket(rate)
        self._frame = MAX_DATA if rate is None else min(MAX_DATA, max(LEAST_FRAME, int(rate * FRAME_S)))
        self._scheduler: Scheduler[tuple[Delivery, Tier], Connection] = Scheduler(self._frame)
        self._on_sent, self._on_error = on_sent, on_error
        self._handle: asyncio.Handle | None = None

    def start(self) -> None:
        """Work on the running loop from now on."""
        self._loop = asyncio.get_running_loop()

    def __len__(self) -> int:
        return len(self._scheduler)

    def flows(self, delivery: Delivery) -> int:
        """How many tiers of ``delivery`` have bytes to send."""
        return sum((delivery, tier) in self._scheduler for tier in delivery.tiers)

    def add(self, delivery: Delivery) -> None:
        """The delivery has bytes to send."""
        self._offer(delivery)
        self._soon()

    def drop(self, delivery: Delivery) -> None:
        """Nothing of the delivery is sent any more."""
        for tier in delivery.tiers:
            self._scheduler.remove((delivery, tier))

    def charge(self, count: int) -> None:
        """Bytes that were written past the pump (events) count against the rate."""
        if self._bucket is not None and count:
            self._bucket.spend(count, self._loop.time())

    def close(self) -> None:
        """Stop."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def run(self) -> None:
        """Write frames until the rate, the kernel or this turn is used up."""
        bucket, scheduler = self._bucket, self._scheduler
        if self._handle is not None and bucket is not None:
            return
        for _ in range(TURN_FRAMES):
            if bucket is not None and scheduler:
                delay = bucket.delay(self._loop.time())
                if delay > 0:
                    self._handle = self._loop.call_later(delay, self._again)
                    return
            flow = scheduler.pick(_is_writable)
            if flow is None:
                if bucket is not None:
                    bucket.idle()
                return
            self._write(*flow)
        self._soon()

    def _soon(self) -> None:
        if self._handle is None:
            self._handle = self._loop.call_soon(self._again)

    def _again(self) -> None:
        self._handle = None
        self.run()

    def _offer(self, delivery: Delivery) -> None:
        """Of the delivery's tiers only the first that has bytes is a flow.

        Ageing is between transfers: a residual is of no use before its own anchor, and must not slow it.
        """
        first = next((tier for tier in delivery.tiers if delivery.has(tier)), None)
        for tier in delivery.tiers:
            if tier is first:
                self._scheduler.add((delivery, tier), tier, delivery.connection, delivery.left(tier))
            else:
                self._scheduler.remove((delivery, tier))

    def _write(self, delivery: Delivery, tier: Tier) -> None:
        flow = (delivery, tier)
        try:
            sent = delivery.send(tier, self._frame)
        except LynxError as e:
            self._on_error(delivery, e)
            return
        self.charge(sent)
        self._scheduler.charge(flow, sent)
        self._on_sent(delivery, tier, sent)
        self._offer(delivery)


def _is_writable(connection: Connection) -> bool:
    return connection.writable
