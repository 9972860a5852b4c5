"""One answer: what is asked, how it is followed and cancelled, and what is known of it in the end."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from numbers import Integral
from typing import Literal

from lynxkv.codec import CodecSpec
from lynxkv.errors import RequestError
from lynxkv.node.cancellation import Cancellation
from lynxkv.node.times import Times
from lynxkv.speculation import CAP, Event, SamplingParams, Verify
from lynxkv.wire import NO_TRANSFER

OnLoss = Literal["fail", "recompute"]


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to be decoded from the KV of a prefill node.

    Parameters
    ----------
    tokens : tuple of int
        The prompt.
    params : SamplingParams
        Without a seed one is drawn.
    spec : CodecSpec
        How the KV is sent; its target is the precision of the answer.
    verify, cap
        As for :class:`lynxkv.speculation.Speculator`.
    on_loss : {"fail", "recompute"}
        What happens when the KV does not come: a typed error, or a prefill here at the same target.
    deadline_s : float
        By when the KV has to be there.
    transfer : bytes or None
        16 bytes: somebody else admits, or has admitted, this id with the same prompt, spec and sampling parameters, and
        it is only pulled. The parameters then need a seed.
    epoch : int
        Of the prefill node that admitted ``transfer``: restarted since, it refuses at once. 0: not known.
    """

    tokens: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    spec: CodecSpec = field(default_factory=CodecSpec)
    verify: Verify = "batched"
    cap: int = CAP
    on_loss: OnLoss = "fail"
    deadline_s: float = 300.0
    transfer: bytes | None = None
    epoch: int = 0

    def __post_init__(self) -> None:
        if not all(isinstance(token, Integral) for token in self.tokens):
            raise RequestError("tokens must be integers; encode text with Engine.encode or Engine.chat first")
        if self.cap < 0:
            raise RequestError(f"the draft cap must be >= 0, got {self.cap}")
        if self.verify not in ("batched", "stepwise"):
            raise RequestError(f"verify must be 'batched' or 'stepwise', got {self.verify!r}")
        if self.on_loss not in ("fail", "recompute"):
            raise RequestError(f"on_loss must be 'fail' or 'recompute', got {self.on_loss!r}")
        if not 0 < self.deadline_s <= 86400:
            raise RequestError(f"deadline_s must be above 0 and at most 86400 seconds, got {self.deadline_s}")
        if self.transfer is not None and (len(self.transfer) != len(NO_TRANSFER) or self.transfer == NO_TRANSFER):
            raise RequestError(f"a transfer id is 16 bytes, not all zero; got {self.transfer.hex() or 'none'}")
        if self.transfer is not None and self.params.seed is None:
            raise RequestError("a transfer that was admitted elsewhere needs the seed it was admitted with")
        if not 0 <= self.epoch < 1 << 48:
            raise RequestError(f"an epoch is 0..2^48-1, got {self.epoch}")


@dataclass(slots=True)
class Outcome:
    """What is known of an answer once it is finished.

    ``bytes`` are payload bytes received by tier; ``wire_bytes`` all that the link received meanwhile, headers,
    events and other requests' bytes included. ``target`` is the precision the answer was verified on:
    ``residual``, or ``exact`` where the KV has the producer's own bits. ``loss`` says why the KV was recomputed.
    """

    tokens: list[int]
    text: str
    finish: str
    seed: int
    drafted: int
    accepted: int
    bytes: dict[str, int]
    wire_bytes: int
    loss: str | None
    target: str
    times: Times


class Generation(Iterator[Event]):
    """Speculation's events of one answer as they happen; ``outcome`` is there once they have ended.

    Iterate on one thread; :meth:`cancel` may come from any.
    """

    def __init__(self, steps: Generator[Event, None, Outcome], cancellation: Cancellation) -> None:
        self._steps = steps
        self._cancellation = cancellation
        self._outcome: Outcome | None = None

    def __next__(self) -> Event:
        try:
            return next(self._steps)
        except StopIteration as end:
            self._outcome = end.value or self._outcome
            raise

    def cancel(self, reason: str) -> None:
        """End it from any thread; idempotent, and without effect on an answer that has ended.

        The prefill node is told at once. A thread that iterates gets :class:`~lynxkv.errors.Cancelled` from whatever
        it waits for, or after the forward pass it is in; memory is freed then, or by :meth:`close` if nobody iterates.
        """
        self._cancellation.cancel(reason)

    def close(self) -> None:
        """End it and free what it holds, from the thread that iterates; idempotent."""
        self._steps.close()

    @property
    def outcome(self) -> Outcome:
        """What is known of the finished answer; RequestError before its end."""
        if self._outcome is None:
            raise RequestError("the outcome is known once every event was taken; this answer has not ended")
        return self._outcome
