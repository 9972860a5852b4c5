"""What a request may ask of decoding."""

import secrets
from dataclasses import dataclass, replace

from lynxkv.errors import RequestError

MAX_LOGPROBS = 20
MAX_BIASES = 4096
LEAST_TEMPERATURE = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn and when an answer ends; names and meanings as in vLLM and the OpenAI API.

    Parameters
    ----------
    temperature : float
        0 is greedy; above, at least 1e-5.
    top_k, top_p, min_p : int, float, float
        Filters on the tempered distribution; 0, 1 and 0 switch them off.
    presence_penalty, frequency_penalty, repetition_penalty : float
        The first two count answer tokens; the last one also the prompt's.
    logit_bias : tuple of (token id, bias)
        Each token once.
    seed : int or None
        0 .. 2^64-1. ``None`` stands for one to be drawn, see :meth:`seeded`.
    sample : int
        Index of this answer among the ``n`` of one request; each has noise of its own.
    max_tokens, min_tokens : int
        Answer tokens; below ``min_tokens`` no end token is drawn and no stop string looked for.
    stop : tuple of str
        The answer's text ends before the first of these.
    ignore_eos : bool
        End tokens are tokens like others.
    logprobs : int or None
        How many of the likeliest tokens' log-probabilities come with each token (0: the token's own).

    Raises
    ------
    RequestError
        A value is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    sample: int = 0
    max_tokens: int = 128
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        def need(ok: bool, what: str, got: object) -> None:
            if not ok:
                raise RequestError(f"{what}; got {got!r}")

        need(
            self.temperature == 0 or LEAST_TEMPERATURE <= self.temperature <= 100,
            f"temperature must be 0 or {LEAST_TEMPERATURE}..100",
            self.temperature,
        )
        need(self.top_k >= 0, "top_k must be >= 0 (0: off)", self.top_k)
        need(0 < self.top_p <= 1, "top_p must be above 0 and at most 1", self.top_p)
        need(0 <= self.min_p <= 1, "min_p must be 0..1", self.min_p)
        for name in ("presence_penalty", "frequency_penalty"):
            need(-2 <= getattr(self, name) <= 2, f"{name} must be -2..2", getattr(self, name))
        need(0 < self.repetition_penalty <= 100, "repetition_penalty must be above 0", self.repetition_penalty)
        need(
            all(token >= 0 and -100 <= bias <= 100 for token, bias in self.logit_bias),
            "logit_bias must map token ids to -100..100",
            self.logit_bias,
        )
        biased = {token for token, _ in self.logit_bias}
        need(len(biased) == len(self.logit_bias), "logit_bias must name each token once", self.logit_bias)
        need(len(biased) <= MAX_BIASES, f"logit_bias must name at most {MAX_BIASES} tokens", len(biased))
        need(self.seed is None or 0 <= self.seed < 1 << 64, "seed must be 0..2^64-1", self.seed)
        need(0 <= self.sample < 1 << 31, "sample must be 0..2^31-1", self.sample)
        need(self.max_tokens >= 1, "max_tokens must be >= 1", self.max_tokens)
        need(0 <= self.min_tokens <= self.max_tokens, "min_tokens must be 0..max_tokens", self.min_tokens)
        need(all(self.stop), "stop strings must not be empty", self.stop)
        need(
            self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS,
            f"logprobs must be 0..{MAX_LOGPROBS}",
            self.logprobs,
        )

    def seeded(self) -> "SamplingParams":
        """These parameters with a seed: their own, or one drawn now."""
        return self if self.seed is not None else replace(self, seed=secrets.randbits(63))
