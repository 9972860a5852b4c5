"""What the nodes hold right now, and what they have done so far."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeHoldings:
    """What a decode node holds; all zero when nothing is going on, but links may stay up.

    Parameters
    ----------
    running, waiting : int
        Requests that have their memory, and those that wait for it.
    kv_bytes, staged_bytes : int
        KV buffers of open sessions, and compressed bytes that are not used up yet.
    memory_bytes : int
        Reserved by running requests; at least the two above together.
    links, pulls : int
        Connections to prefill nodes, and transfers on them that have not ended.
    """

    running: int
    waiting: int
    kv_bytes: int
    staged_bytes: int
    memory_bytes: int
    links: int
    pulls: int


@dataclass(frozen=True, slots=True)
class DecodeTotals:
    """What a decode node has done since it was made; numbers only grow.

    Parameters
    ----------
    received_bytes : mapping of str to int
        Bytes of segments that arrived whole, by tier: ``anchor``, ``residual``, ``exact``.
    losses : mapping of str to int
        Requests whose KV did not come, by class of the error, recomputed ones included.
    """

    received_bytes: Mapping[str, int]
    losses: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class PrefillHoldings:
    """What a prefill node holds; idle, only entries are left, until their time to live is over.

    Parameters
    ----------
    running, queued : int
        Prompts in work, and prompts that wait for their turn or for memory.
    entries, entry_bytes : int
        Encoded KV held, and bytes of its segments so far.
    memory_bytes : int
        Reserved by entries, of the node's bound.
    readers : int
        Transfers and encoders that read entries.
    leases, deliveries, parked, admitting, queued_bytes, connections : int
        See :class:`lynxkv.transport.Counters`; ``admitting`` also counts :meth:`PrefillNode.admit`.
    """

    running: int
    queued: int
    entries: int
    entry_bytes: int
    memory_bytes: int
    readers: int
    leases: int
    deliveries: int
    parked: int
    admitting: int
    queued_bytes: int
    connections: int


@dataclass(frozen=True, slots=True)
class PrefillTotals:
    """What a prefill node has done since it was made; numbers only grow.

    Parameters
    ----------
    sent_bytes : mapping of str to int
        Bytes of segments handed to the kernel, frame headers included, by tier: ``anchor``, ``residual``, ``exact``.
    released : mapping of str to int
        Leases that ended, by the value of :class:`lynxkv.transport.Released`.
    resends : int
        Segments sent again because they arrived corrupt.
    """

    sent_bytes: Mapping[str, int]
    released: Mapping[str, int]
    resends: int
