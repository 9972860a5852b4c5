"""Which flow sends the next frame on a link; no clock, no sockets."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from lynxkv.codec.spec import Tier

FlowT = TypeVar("FlowT", bound=Hashable)
LaneT = TypeVar("LaneT")

AGEING = 32
"""A tier that waits is owed one byte for so many of higher tiers: 3 % of the link, never starved."""


class Scheduler(Generic[FlowT, LaneT]):
    """Anchor before residual before exact over all flows; round robin within a tier; ageing across tiers.

    A flow is one tier of one transfer with bytes to send; its lane is the connection it goes out on, which may
    be closed for now (its peer does not read). Closed lanes are passed over and hold nobody up.

    Parameters
    ----------
    quantum : int
        Bytes of a frame: a waiting tier is served when it is owed so many.
    """

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._flows: tuple[OrderedDict[FlowT, LaneT], ...] = tuple(OrderedDict() for _ in Tier)
        self._tier: dict[FlowT, Tier] = {}
        self._owed = [0.0 for _ in Tier]

    def __len__(self) -> int:
        return len(self._tier)

    def __contains__(self, flow: FlowT) -> bool:
        return flow in self._tier

    def add(self, flow: FlowT, tier: Tier, lane: LaneT) -> None:
        """The flow has bytes to send; no effect if it is known already."""
        if flow not in self._tier:
            self._tier[flow] = tier
            self._flows[tier][flow] = lane

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
            for flow, lane in self._flows[tier].items():
                if is_open(lane):
                    if best is not None:
                        return flow
                    best = flow
                    break
        return best

    def charge(self, flow: FlowT, count: int) -> None:
        """The flow has sent ``count`` bytes: others of its tier go first now, lower tiers are owed more."""
        tier = self._tier.get(flow)
        if tier is None:
            return
        self._flows[tier].move_to_end(flow)
        self._owed[tier] = max(0.0, self._owed[tier] - count)
        for lower in Tier:
            if lower > tier and self._flows[lower]:
                self._owed[lower] = min(self._owed[lower] + count / AGEING, 2.0 * self._quantum)
