"""Runs one request under several schemes over one link, and times what a user waits for."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lynxkv.bench.oracle import plain_answer
from lynxkv.bench.schemes import SCHEMES, Scheme
from lynxkv.engine.transformers import TransformersEngine
from lynxkv.node.arrivals import Moment
from lynxkv.node.decode import DecodeNode, Outcome, Request
from lynxkv.speculation import Event, SamplingParams, Verified, Verify

KTH = 32
"""The token whose time is reported, counting token 1."""


@dataclass(frozen=True, slots=True)
class Row:
    """One scheme's figures; times in seconds from the request of a KV that is ready.

    The first three are those of :class:`lynxkv.node.times.Times`. ``equal``: the output is what plain decoding on the
    scheme's target gives (None: not checked).
    """

    scheme: str
    bytes: int
    anchor_bytes: int
    residual_bytes: int
    ttft_prefill_s: float | None
    ttft_draft_s: float | None
    ttft_verified_s: float | None
    ttkt32_s: float | None
    drafted: int
    accepted: int
    equal: bool | None
    tokens: int
    finish: str

    def plain(self) -> dict[str, Any]:
        """A dict for JSON."""
        return asdict(self)


Watch = Callable[[str, float, Moment | Event], None]
"""Hears ``(scheme, seconds since the request, what happened)``, from several threads."""


def _unwatched(scheme: str, at: float, what: Moment | Event) -> None:
    """Nobody looks."""


def prepare(node: DecodeNode, peer: tuple[str, int], tokens: Sequence[int], schemes: Sequence[Scheme]) -> float:
    """Prefill once, and encode for every scheme from that KV, before anything is timed; seconds of the prefill."""
    begun = time.monotonic()
    node.prepare(peer, tokens, SCHEMES["bf16"].spec, deadline_s=3600)
    prefill_s = time.monotonic() - begun
    for scheme in schemes:
        node.prepare(peer, tokens, scheme.spec, deadline_s=600)
    return prefill_s


def run_scheme(
    node: DecodeNode,
    peer: tuple[str, int],
    tokens: Sequence[int],
    scheme: Scheme,
    params: SamplingParams,
    *,
    verify: Verify = "batched",
    watch: Watch = _unwatched,
) -> tuple[Row, Outcome]:
    """One timed request; the row's ``equal`` is not filled in."""
    kth: float | None = None
    request = Request(tuple(tokens), params, spec=scheme.spec, verify=verify, deadline_s=3600)
    begun = time.monotonic()

    def hear(moment: Moment) -> None:
        watch(scheme.name, moment.at - begun, moment)

    generation = node.generate(peer, request, hear)
    for event in generation:
        at = time.monotonic() - begun
        watch(scheme.name, at, event)
        if isinstance(event, Verified) and event.position == KTH - 1:
            kth = at
    outcome = generation.outcome
    row = Row(
        scheme=scheme.name,
        bytes=outcome.wire_bytes,
        anchor_bytes=outcome.bytes["anchor"],
        residual_bytes=outcome.bytes["residual"],
        ttft_prefill_s=outcome.times.ttft_prefill_s,
        ttft_draft_s=outcome.times.ttft_draft_s,
        ttft_verified_s=outcome.times.ttft_verified_s,
        ttkt32_s=kth,
        drafted=outcome.drafted,
        accepted=outcome.accepted,
        equal=None,
        tokens=len(outcome.tokens),
        finish=outcome.finish,
    )
    return row, outcome


def equals_plain(
    engine: TransformersEngine,
    peer: tuple[str, int],
    tokens: Sequence[int],
    scheme: Scheme,
    params: SamplingParams,
    outcome: Outcome,
) -> bool:
    """Whether ``outcome`` is what plain decoding on the scheme's target gives, finish reason included."""
    return plain_answer(engine, peer, tokens, scheme.spec, params) == (outcome.tokens, outcome.finish)
