"""What a server holds right now, and what it has done so far."""

from collections import Counter
from dataclasses import dataclass

from lynxkv.codec.spec import Tier
from lynxkv.transport.outgoing import Released


@dataclass(frozen=True, slots=True)
class Counters:
    """What a server holds right now; all zero when nothing is going on."""

    leases: int
    deliveries: int
    parked: int
    admitting: int
    queued_bytes: int
    flows: int
    connections: int


class Totals:
    """What a server has done since it was made; numbers only grow.

    Attributes
    ----------
    sent : Counter of Tier
        Bytes of data frames, headers included.
    released : Counter of Released
        Leases that ended.
    resends : int
        Segments sent again.
    """

    def __init__(self) -> None:
        self.sent: Counter[Tier] = Counter()
        self.released: Counter[Released] = Counter()
        self.resends = 0
