"""Which flow sends the next frame on a link; no clock, no sockets."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from lynxkv.codec.spec import Tier

FlowT = TypeVar("FlowT", bound=Hashable)
LaneT = TypeVar("LaneT")

AGEING = 32
"""A tier that waits is owed one byte for so many of higher tiers: 3 % of the link, never starved."""
EVERY = 4
"""Of so many frames of a tier one goes to the flow that has waited longest: a quarter of the tier, never starved."""


@dataclass(slots=True)
class _Flow(Generic[LaneT]):
    lane: LaneT
    left: int


class Scheduler(Generic[FlowT, LaneT]):
    """Anchor before residual before exact over all flows; shortest first within a tier; ageing in both.

    A flow is one tier of one transfer with bytes to send; its lane is the connection it goes out on, which may
    be closed for now (its peer does not read). Closed lanes are passed over and hold nobody up.

    Within a tier the flow with the fewest bytes left goes first, so that a short prompt does not wait for long ones
    (taking turns, 16 transfers share the link evenly and the shortest ends last but for its size); every fourth frame
    goes to the flow that was served longest ago.

    Parameters
    ----------
    quantum : int
        Bytes of a frame: a waiting tier is served when it is owed so many.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._flows: tuple[OrderedDict[FlowT, _Flow[LaneT]], ...] = tuple(OrderedDict() for _ in Tier)
        self._tier: dict[FlowT, Tier] = {}
        self._owed = [0.0 for _ in Tier]
        self._frames = [0 for _ in Tier]

    def __len__(self) -> int:
        return len(self._tier)

    def __contains__(self, flow: FlowT) -> bool:
        return flow in self._tier

    def add(self, flow: FlowT, tier: Tier, lane: LaneT, left: int) -> None:
        """The flow has bytes to send, and ``left`` in all until its tier ends, not yet encoded ones included."""
        known = self._tier.setdefault(flow, tier)
        held = self._flows[known].get(flow)
        if held is None:
            self._flows[known][flow] = _Flow(lane, left)
        else:
            held.left = left

    def remove(self, flow: FlowT) -> None:
        """The flow has nothing to send for now; no effect if it is not known."""
        tier = self._tier.pop(flow, None)
        if tier is not None:
            del self._flows[tier][flow]
            if not self._flows[tier]:
                self._owed[tier] = 0.0

    def pick(self, is_open: Callable[[LaneT], bool]) -> FlowT | None:
        """Flow that sends the next frame, or None if none can. Follow it by :meth:`charge`."""
        best: FlowT | None = None
        for tier in Tier:
            if best is not None and self._owed[tier] < self._quantum:
                continue
            found = self._first(tier, is_open)
            if found is not None and best is not None:
                return found
            best = best if found is None else found
        return best

    def _first(self, tier: Tier, is_open: Callable[[LaneT], bool]) -> FlowT | None:
        ready = (item for item in self._flows[tier].items() if is_open(item[1].lane))  # longest waiting first
        if self._frames[tier] % EVERY == EVERY - 1:
            item = next(ready, None)
        else:
            item = min(ready, key=lambda item: item[1].left, default=None)
        return None if item is None else item[0]

    def charge(self, flow: FlowT, count: int) -> None:
        """The flow has sent ``count`` bytes: it has waited least now, lower tiers are owed more."""
        tier = self._tier.get(flow)
        if tier is None:
            return
        self._flows[tier].move_to_end(flow)
        self._frames[tier] += 1
        self._owed[tier] = max(0.0, self._owed[tier] - count)
        for lower in Tier:
            if lower > tier and self._flows[lower]:
                self._owed[lower] = min(self._owed[lower] + count / AGEING, 2.0 * self._quantum)
