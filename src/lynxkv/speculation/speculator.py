"""Draft on the anchor, refine, verify once on the target, decode on (docs/how-it-works.md; arXiv 2607.01831)."""

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from lynxkv.errors import RequestError
from lynxkv.speculation.answer import Answer
from lynxkv.speculation.sampler import Draw, Sampler
from lynxkv.speculation.session import Session

Verify = Literal["batched", "stepwise"]

CAP = 64


class State(Enum):
    """Where an answer stands."""

    WAITING = "waiting"
    DRAFTING = "drafting"
    VERIFYING = "verifying"
    DECODING = "decoding"
    FINISHED = "finished"
    FAILED = "failed"


class Refinement(Protocol):
    """What the speculator asks of whoever writes KV into the session; each call may raise a LynxError."""

    def first(self) -> Draw:
        """Wait for token 1, which the prefill node drew."""
        ...

    def ready(self) -> None:
        """Wait until the anchor is in the session."""
        ...

    def refine(self, block: bool) -> bool:
        """Write what has landed; whether the target is complete. With ``block``, wait until it is."""
        ...


@dataclass(frozen=True, slots=True)
class Drafted:
    """A token decoded on less than the target, at output position ``position``.

    ``text`` is what would be certain with it if this draft and those before it were right.
    """

    position: int
    token: int
    text: str


@dataclass(frozen=True, slots=True)
class Verified:
    """A token of the answer; ``text`` is what became certain with it."""

    position: int
    draw: Draw
    text: str
    finish: str | None


@dataclass(frozen=True, slots=True)
class Retracted:
    """Drafts from ``position`` on were wrong."""

    position: int


@dataclass(frozen=True, slots=True)
class Window:
    """A window was verified: how many were drafted, and how many of them kept."""

    drafted: int
    accepted: int


Event = Drafted | Verified | Retracted | Window


class Speculator:
    """Decodes one answer.

    Parameters
    ----------
    session : Session
        Holding the prompt's KV once ``refinement.ready()`` returned.
    sampler : Sampler
    answer : Answer
        Empty.
    refinement : Refinement
    verify : {"batched", "stepwise"}
        One forward pass over the window, or a token at a time: the latter is bit for bit plain decoding.
    cap : int
        Most drafts in a window; 0 waits for the target instead of drafting.
    """

    def __init__(
        self,
        session: Session,
        sampler: Sampler,
        answer: Answer,
        refinement: Refinement,
        *,
        verify: Verify = "batched",
        cap: int = CAP,
    ) -> None:
        if verify not in ("batched", "stepwise"):
            raise RequestError(f"verify must be 'batched' or 'stepwise', got {verify!r}")
        if cap < 0:
            raise RequestError(f"the draft cap must be >= 0, got {cap}")
        self.state = State.WAITING
        self._session = session
        self._sampler = sampler
        self._answer = answer
        self._refinement = refinement
        self._verify = verify
        self._cap = cap

    def run(self) -> Iterator[Event]:
        """Events until the answer is finished; a LynxError from the refinement ends it in ``FAILED``."""
        try:
            yield self._push(self._refinement.first())
            if self._answer.finish is None:
                self._refinement.ready()
                drafts = yield from self._draft()
                if drafts:
                    yield from self._check(drafts)
                yield from self._decode()
            self.state = State.FINISHED
        finally:
            if self.state is not State.FINISHED:
                self.state = State.FAILED

    def _draft(self) -> Generator[Event, None, list[int]]:
        """Draft until the target is complete, the cap is reached or a draft would end the answer."""
        self.state = State.DRAFTING
        ahead = self._answer.copy()
        drafts: list[int] = []
        while not self._refinement.refine(block=len(drafts) >= self._cap or ahead.finish is not None):
            row = self._session.forward([ahead.draws[-1].token])[0]
            draw = self._sampler.draw(row, ahead.tokens)
            drafts.append(draw.token)
            position = len(ahead.draws)
            yield Drafted(position, draw.token, ahead.push(draw).text)
        return drafts

    def _check(self, drafts: list[int]) -> Iterator[Event]:
        """Verify the window: keep the longest agreeing prefix, then the target's own token."""
        self.state = State.VERIFYING
        window = [self._answer.draws[-1].token, *drafts]
        base = self._session.length - len(drafts)
        first = len(self._answer.draws)
        self._session.truncate(base)
        rows = self._session.forward(window) if self._verify == "batched" else None
        accepted = 0
        for j, token in enumerate(window):
            row = self._session.forward([token])[0] if rows is None else rows[j]
            verified = self._push(self._sampler.draw(row, self._answer.tokens))
            agrees = j < len(drafts) and verified.draw.token == drafts[j]
            accepted += agrees
            if j < len(drafts) and not agrees:
                yield Retracted(first + j)
            yield verified
            if not agrees or verified.finish is not None:
                self._session.truncate(base + j + 1)
                break
        yield Window(len(drafts), accepted)

    def _decode(self) -> Iterator[Event]:
        self.state = State.DECODING
        while self._answer.finish is None:
            row = self._session.forward([self._answer.draws[-1].token])[0]
            yield self._push(self._sampler.draw(row, self._answer.tokens))

    def _push(self, draw: Draw) -> Verified:
        position = len(self._answer.draws)
        step = self._answer.push(draw)
        return Verified(position, draw, step.text, step.finish)
