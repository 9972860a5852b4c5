"""Answers in OpenAI's shapes: whole, and as the chunks of a stream."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lynxkv.serving.ask import Ask
from lynxkv.speculation import Drafted, Draw, Verified

Spell = Callable[[int], str]
"""A token's own text."""


@dataclass(slots=True)
class Choice:
    """One answer as far as it is verified."""

    index: int
    text: str = ""
    draws: list[Draw] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish: str | None = None

    def add(self, event: Verified) -> None:
        """Take a verified token."""
        self.offsets.append(len(self.text))
        self.text += event.text
        self.draws.append(event.draw)
        self.finish = event.finish


class Rendering:
    """Writes one request's answers.

    Parameters
    ----------
    ask : Ask
    answer_id : str
        The request's id; prefixed as OpenAI does.
    model : str
    spell : callable
        For logprobs.
    """

    def __init__(self, ask: Ask, answer_id: str, model: str, spell: Spell) -> None:
        self._chat = ask.kind == "chat"
        self._ask = ask
        self._spell = spell
        self._logprobs = ask.params.logprobs is not None
        self._base = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{answer_id}",
            "object": "chat.completion" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._chunk = dict(self._base)
        if self._chat:
            self._chunk["object"] = "chat.completion.chunk"

    def whole(self, choices: Sequence[Choice], usage: dict[str, int], **more: Any) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        return self._base | {"choices": [self._final(choice) for choice in choices], "usage": usage, **more}

    def piece(self, choice: Choice, event: Verified) -> dict[str, Any] | None:
        """The chunk of a verified token that ``choice`` has taken; None where it shows nothing."""
        first = len(choice.draws) == 1
        if not (event.text or first or event.finish or self._logprobs or self._ask.token_ids):
            return None
        at = choice.offsets[-1]
        shown: dict[str, Any] = {"index": choice.index, "finish_reason": event.finish}
        if self._chat:
            shown["delta"] = ({"role": "assistant"} if first else {}) | {"content": event.text}
        else:
            shown["text"] = event.text
        shown["logprobs"] = self._spelled([event.draw], [at])
        if self._ask.token_ids:
            shown["token_ids"] = [event.draw.token]
        return self._with_usage({"choices": [shown]})

    def draft(self, index: int, at: int, text: str) -> dict[str, Any]:
        """The chunk of a draft: no content, so that clients that know nothing of drafts are never wrong."""
        return self._beside(index, {"event": "draft", "choice": index, "index": at, "text": text})

    def retract(self, index: int, at: int) -> dict[str, Any]:
        """The chunk that withdraws drafts: text from character ``at`` on."""
        return self._beside(index, {"event": "retract", "choice": index, "index": at})

    def usage(self, usage: dict[str, int], **more: Any) -> dict[str, Any]:
        """The last chunk of a stream that was asked for its usage."""
        return self._chunk | {"choices": [], "usage": usage, **more}

    def _beside(self, index: int, lynx: dict[str, Any]) -> dict[str, Any]:
        shown: dict[str, Any] = {"index": index, "finish_reason": None}
        if self._chat:
            shown["delta"] = {}
        else:
            shown["text"] = ""
        return self._with_usage({"choices": [shown], "lynx": lynx})

    def _with_usage(self, chunk: dict[str, Any]) -> dict[str, Any]:
        return self._chunk | chunk | ({"usage": None} if self._ask.include_usage else {})

    def _final(self, choice: Choice) -> dict[str, Any]:
        shown: dict[str, Any] = {"index": choice.index, "finish_reason": choice.finish}
        if self._chat:
            shown["message"] = {"role": "assistant", "content": choice.text}
        else:
            shown["text"] = choice.text
        shown["logprobs"] = self._spelled(choice.draws, choice.offsets)
        if self._ask.token_ids:
            shown["token_ids"] = [draw.token for draw in choice.draws]
        return shown

    def _spelled(self, draws: Sequence[Draw], offsets: Sequence[int]) -> dict[str, Any] | None:
        if not self._logprobs:
            return None
        if self._chat:
            return {
                "content": [
                    self._entry(draw.token, draw.logprob or 0.0)
                    | {"top_logprobs": [self._entry(token, logprob) for token, logprob in draw.top]}
                    for draw in draws
                ]
            }
        return {
            "tokens": [self._spell(draw.token) for draw in draws],
            "token_logprobs": [draw.logprob for draw in draws],
            "top_logprobs": [{self._spell(token): logprob for token, logprob in draw.top} for draw in draws],
            "text_offset": list(offsets),
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


class Drafts:
    """Where the drafts of one choice stand in its text: characters from the answer's beginning."""

    def __init__(self, choice: Choice) -> None:
        self._choice = choice
        self._starts: dict[int, int] = {}
        self._end = 0

    def add(self, event: Drafted) -> int:
        """Take a draft; the index of its first character."""
        if not self._starts:
            self._end = len(self._choice.text)
        self._starts[event.position] = self._end
        self._end += len(event.text)
        return self._starts[event.position]

    def start(self, position: int) -> int:
        """The index at which the draft of ``position`` stands."""
        return self._starts[position]


def model_entry(model: str, created: int, context: int | None) -> dict[str, Any]:
    """One of ``/v1/models``."""
    return {"id": model, "object": "model", "created": created, "owned_by": "lynxkv", "max_model_len": context}


def usage(prompt_tokens: int, choices: Sequence[Choice]) -> dict[str, int]:
    """OpenAI's ``usage``."""
    answered = sum(len(choice.draws) for choice in choices)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": answered,
        "total_tokens": prompt_tokens + answered,
    }
