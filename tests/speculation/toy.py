"""A toy language model whose KV can be coarse or exact: enough to drive the speculator without a network."""

from collections.abc import Sequence

import numpy as np

from lynxkv.speculation import Answer, Draw, Logits, Sampler, SamplingParams, Speculator

VOCAB = 50


class ToySession:
    """Logits depend on all tokens so far; ``noise`` stands for the error of coarse KV of the prompt."""

    def __init__(self, prompt: Sequence[int], noise: float) -> None:
        self.tokens = list(prompt)
        self.noise = noise
        self.passes: list[int] = []

    @property
    def length(self) -> int:
        return len(self.tokens)

    def forward(self, tokens: Sequence[int]) -> Logits:
        self.passes.append(len(tokens))
        rows = []
        for token in tokens:
            self.tokens.append(token)
            rows.append(self._row())
        return np.stack(rows)

    def truncate(self, length: int) -> None:
        assert length <= len(self.tokens)
        del self.tokens[length:]

    def _row(self) -> Logits:
        state = hash(tuple(self.tokens)) % (1 << 32)
        clean = np.random.default_rng(state).normal(size=VOCAB) * 2
        error = np.random.default_rng(state + 1).normal(size=VOCAB) * self.noise
        return (clean + error).astype(np.float32)


class ToyRefinement:
    """The target arrives after ``steps`` calls; until then the session's KV is coarse."""

    def __init__(self, session: ToySession, first: Draw, steps: int) -> None:
        self.session, self._first, self.steps = session, first, steps
        self.blocked = False

    def first(self) -> Draw:
        return self._first

    def ready(self) -> None:
        pass

    def refine(self, block: bool) -> bool:
        self.blocked |= block
        if block:
            self.steps = 0
        if self.steps == 0:
            self.session.noise = 0.0
            return True
        self.steps -= 1
        return False


def detokenize(tokens: Sequence[int]) -> str:
    """Every token is one letter: a..z, A..X."""
    return "".join(chr(ord("a") + t) if t < 26 else chr(ord("A") + t - 26) for t in tokens)


def speculate(
    params: SamplingParams,
    *,
    noise: float,
    steps: int,
    eos: tuple[int, ...] = (),
    verify: str = "batched",
    cap: int = 64,
):
    """Run the speculator on the toy model; returns (answer, events, session, refinement, speculator)."""
    prompt = [1, 2, 3, 4]
    sampler = Sampler(params, prompt, eos)
    answer = Answer(params, eos, detokenize)
    session = ToySession(prompt, noise)
    first = sampler.draw(ToySession(prompt[:-1], 0.0).forward(prompt[-1:])[0], [])
    refinement = ToyRefinement(session, first, steps)
    speculator = Speculator(session, sampler, answer, refinement, verify=verify, cap=cap)
    events = list(speculator.run())
    return answer, events, session, refinement, speculator


def plain(params: SamplingParams, eos: tuple[int, ...] = ()) -> Answer:
    """The same answer by a loop of its own: no drafts, exact KV."""
    session = ToySession([1, 2, 3], 0.0)
    sampler, answer = Sampler(params, [1, 2, 3, 4], eos), Answer(params, eos, detokenize)
    token = 4
    while answer.finish is None:
        draw = sampler.draw(session.forward([token])[0], answer.tokens)
        answer.push(draw)
        token = draw.token
    return answer
