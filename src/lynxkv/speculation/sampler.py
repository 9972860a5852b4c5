"""The coupled sampler: drafter and target draw with the same noise.

The Gumbel noise of a token is a function of (seed, sample, output position, vocabulary id) alone, so the
token drawn is a function of the logits alone: a draft is right iff the target draws that very token.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lynxkv.errors import NotFinite, RequestError
from lynxkv.speculation.params import SamplingParams
from lynxkv.speculation.session import Logits


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token, with log-probabilities under the raw logits where they were asked for."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def gumbel(seed: int, sample: int, position: int, vocab: int) -> NDArray[np.float64]:
    """Noise ``[vocab]``: word ``v`` of Philox4x64 keyed by (seed, sample), counter word 1 set to ``position``.

    A word gives ``u = (word >> 11 + 0.5) / 2^53`` and the noise is ``-log(-log u)``.
    """
    key = np.array([seed, sample], dtype=np.uint64)  # a list would pass large seeds through float64
    words = np.random.Philox(key=key, counter=[0, position, 0, 0]).random_raw(vocab)
    u = ((words >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(u)))


class Sampler:
    """Draws tokens for one answer.

    Parameters
    ----------
    params : SamplingParams
        With a seed.
    prompt : sequence of int
        Prompt tokens, for the repetition penalty.
    eos : iterable of int
        Tokens that ``min_tokens`` holds back.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], eos: Iterable[int]) -> None:
        if params.seed is None and params.temperature > 0:
            raise RequestError("sampling needs a seed; use SamplingParams.seeded()")
        self.params = params
        self._prompt = np.unique(np.asarray(prompt, dtype=np.int64))
        self._eos = np.asarray(sorted(token for token in eos if token >= 0), dtype=np.int64)  # -1: none
        self._shaped = bool(
            params.logit_bias
            or params.min_tokens
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
        )

    def draw(self, logits: Logits, history: Sequence[int]) -> Draw:
        """The token at output position ``len(history)``.

        Parameters
        ----------
        logits : float32 ``[vocab]``
        history : sequence of int
            Answer tokens before this one: verified tokens, then drafts.

        Raises
        ------
        NotFinite
            The logits hold NaN or infinity where the largest is looked for.
        """
        scores = self._shape(logits, history) if self._shaped else logits
        if self.params.temperature == 0:
            token = int(np.argmax(scores))
        else:
            kept = self._filter(scores.astype(np.float64) / self.params.temperature)
            noise = gumbel(self.params.seed or 0, self.params.sample, len(history), len(kept))
            token = int(np.argmax(kept + noise))
        if not np.isfinite(scores[token]):  # the largest of scores with a NaN in them is that NaN
            raise NotFinite(
                f"output position {len(history)}: finite logits expected, got {scores[token]}: the model overflowed, "
                "or logit_bias and min_tokens leave no token to draw"
            )
        return self._with_logprobs(token, logits)

    def _shape(self, logits: Logits, history: Sequence[int]) -> Logits:
        p = self.params
        scores = logits.copy()
        for token, bias in p.logit_bias:
            if token >= len(scores):
                raise RequestError(f"logit_bias names token {token}; this model has ids 0..{len(scores) - 1}")
            scores[token] += bias
        if len(history) < p.min_tokens:
            scores[self._eos[self._eos < len(scores)]] = -np.inf
        tokens, counts = np.unique(np.asarray(history, dtype=np.int64), return_counts=True)
        if p.repetition_penalty != 1.0:
            seen = np.union1d(self._prompt, tokens)
            at = scores[seen]
            scores[seen] = np.where(at > 0, at / p.repetition_penalty, at * p.repetition_penalty)
        scores[tokens] -= (p.frequency_penalty * counts + p.presence_penalty).astype(np.float32)
        return scores

    def _filter(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        p = self.params
        top = scores.max()
        if p.min_p > 0:
            scores = np.where(scores < top + np.log(p.min_p), -np.inf, scores)
        if 0 < p.top_k < len(scores):
            least = np.partition(scores, -p.top_k)[-p.top_k]
            scores = np.where(scores < least, -np.inf, scores)
        if p.top_p < 1:
            order = np.argsort(-scores, kind="stable")
            weights = np.exp(scores[order] - top)
            before = np.cumsum(weights) - weights
            out = order[before >= p.top_p * weights.sum()]
            scores = scores.copy()
            scores[out] = -np.inf
        return scores

    def _with_logprobs(self, token: int, logits: Logits) -> Draw:
        if self.params.logprobs is None:
            return Draw(token)
        x = logits.astype(np.float64)
        logprobs = x - (x.max() + np.log(np.exp(x - x.max()).sum()))
        n = self.params.logprobs
        best = np.argsort(-logprobs, kind="stable")[:n]
        return Draw(token, float(logprobs[token]), tuple((int(t), float(logprobs[t])) for t in best))
