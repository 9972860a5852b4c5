"""An answer as it grows: its tokens, its text, and when it ends."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lynxkv.errors import RequestError
from lynxkv.speculation.params import SamplingParams
from lynxkv.speculation.sampler import Draw

Detokenize = Callable[[Sequence[int]], str]

_UNFINISHED = "\ufffd"  # what a detokenizer shows for the first bytes of a longer character


@dataclass(frozen=True, slots=True)
class Step:
    """What one more token brought: text that is now certain, and why the answer ended, if it did."""

    text: str
    finish: str | None


class Answer:
    """Collects tokens one at a time; ends on an end token, a stop string or the length.

    Text that could be the beginning of a stop string is held back until it is certain.

    Parameters
    ----------
    params : SamplingParams
    eos : iterable of int
        End tokens of the model.
    detokenize : callable or None
        Token ids to text; ``None``: no text.

    Raises
    ------
    RequestError
        Stop strings without a detokenizer.
    """

    def __init__(self, params: SamplingParams, eos: Iterable[int], detokenize: Detokenize | None) -> None:
        if params.stop and detokenize is None:
            raise RequestError("stop strings need text, and this model has no tokenizer; use token ids and max_tokens")
        self._params = params
        self._eos = frozenset() if params.ignore_eos else frozenset(eos)
        self._detokenize = detokenize
        self._context, self._read = 0, 0  # tokens that give context to the next text; tokens already turned to text
        self._given = 0  # characters of ``_text`` already handed out
        self._text = ""
        self.draws: list[Draw] = []
        self.finish: str | None = None

    @property
    def tokens(self) -> list[int]:
        """Token ids so far, an end token included."""
        return [draw.token for draw in self.draws]

    @property
    def text(self) -> str:
        """Text handed out so far."""
        return self._text[: self._given]

    def copy(self) -> "Answer":
        """A copy that can be pushed to without changing this one."""
        twin = copy.copy(self)
        twin.draws = list(self.draws)
        return twin

    def push(self, draw: Draw) -> Step:
        """Add one token."""
        self.draws.append(draw)
        long_enough = len(self.draws) >= self._params.min_tokens
        ended = draw.token in self._eos
        if not ended:
            self._extend(last=len(self.draws) >= self._params.max_tokens)
        cut = self._stop_at() if long_enough and not ended else None
        if cut is not None:
            self._text, self.finish = self._text[:cut], "stop"
        elif ended:
            self.finish = "stop"
        elif len(self.draws) >= self._params.max_tokens:
            self.finish = "length"
        return Step(self._take(), self.finish)

    def _extend(self, last: bool) -> None:
        """Turn tokens to text once their last character is whole."""
        if self._detokenize is None:
            return
        tokens = self.tokens
        known = self._detokenize(tokens[self._context : self._read])
        text = self._detokenize(tokens[self._context :])
        if len(text) > len(known) and (last or not text.endswith(_UNFINISHED)):
            self._text += text[len(known) :]
            self._context, self._read = self._read, len(tokens)

    def _stop_at(self) -> int | None:
        found = [at for stop in self._params.stop if (at := self._text.find(stop, self._given)) >= 0]
        return min(found, default=None)

    def _take(self) -> str:
        """Text that no stop string can take back."""
        safe = len(self._text)
        if self.finish is None:
            for stop in self._params.stop:
                for size in range(min(len(stop) - 1, safe), 0, -1):
                    if self._text.endswith(stop[:size]):
                        safe = min(safe, len(self._text) - size)
                        break
        new = self._text[self._given : max(safe, self._given)]
        self._given += len(new)
        return new
