"""One request for an answer, read and checked, before any tokenizer or model is asked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lynxkv.errors import RequestError
from lynxkv.serving.errors import Refusal
from lynxkv.serving.schema import ChatFields, CompletionFields, Fields, Kind, Lynx, read_fields, read_object
from lynxkv.speculation import SamplingParams

COMPLETION_TOKENS = 16
"""OpenAI's default of ``max_tokens`` for completions."""

CHAT_TOKENS = 1024
"""The default for chats, or as many as the context leaves room for."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What a client wants.

    ``plain`` is the request's object as it came; ``params`` has the default ``max_tokens`` if ``max_tokens`` is None.
    """

    kind: Kind
    plain: dict[str, Any]
    model: str | None
    prompt: str | tuple[int, ...] | tuple[dict[str, str], ...]
    params: SamplingParams
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    token_ids: bool
    lynx: Lynx
    transfer: dict[str, Any] | None

    @property
    def deadline_s(self) -> float:
        """By when it has to be answered, in seconds since it came."""
        return self.lynx.deadline_s

    @property
    def most_tokens(self) -> int:
        """Of all its choices together, at most."""
        return self.n * self.params.max_tokens

    @property
    def estimated_tokens(self) -> int:
        """About how long the prompt is, for those without a tokenizer."""
        if isinstance(self.prompt, str):
            return len(self.prompt) // 4 + 1
        return sum(1 if isinstance(part, int) else len(part["content"]) // 4 + 4 for part in self.prompt)


def read(kind: Kind, body: bytes) -> Ask:
    """Read a request's body.

    Raises
    ------
    Refusal
        It cannot be answered as it stands; names the field.
    """
    plain = read_object(body)
    fields = read_fields(kind, plain)
    if fields.stream_options is not None and not fields.stream:
        raise Refusal("stream_options is only allowed with stream: true", "stream_options")
    max_tokens = _max_tokens(fields)
    default = CHAT_TOKENS if kind == "chat" else COMPLETION_TOKENS
    return Ask(
        kind=kind,
        plain=plain,
        model=fields.model,
        prompt=_prompt(fields),
        params=_params(fields, default if max_tokens is None else max_tokens),
        max_tokens=max_tokens,
        n=fields.n or 1,
        stream=bool(fields.stream),
        include_usage=fields.stream_options is not None and fields.stream_options.include_usage,
        token_ids=bool(fields.return_token_ids),
        lynx=fields.lynx or Lynx(),
        transfer=fields.kv_transfer_params,
    )


def _max_tokens(fields: Fields) -> int | None:
    both = {fields.max_tokens, fields.max_completion_tokens} - {None}
    if len(both) > 1:
        raise Refusal("max_tokens and max_completion_tokens differ: give one of them", "max_tokens")
    return both.pop() if both else None


def _prompt(fields: ChatFields | CompletionFields | Fields) -> str | tuple[int, ...] | tuple[dict[str, str], ...]:
    if isinstance(fields, ChatFields):
        return tuple(message.plain() for message in fields.messages)
    assert isinstance(fields, CompletionFields)
    prompt: Any = fields.prompt
    if isinstance(prompt, list) and not all(isinstance(part, int) for part in prompt):
        if len(prompt) != 1:
            raise Refusal(f"one prompt a request, a text or token ids, got {len(prompt)}: send one by one", "prompt")
        prompt = prompt[0]
    if not prompt:
        raise Refusal("a prompt of at least 1 token expected, got none", "prompt")
    return prompt if isinstance(prompt, str) else tuple(prompt)


def _params(fields: ChatFields | CompletionFields | Fields, max_tokens: int) -> SamplingParams:
    given: dict[str, Any] = {
        name: value
        for name in (
            "seed",
            "min_tokens",
            "top_p",
            "top_k",
            "min_p",
            "presence_penalty",
            "frequency_penalty",
            "repetition_penalty",
            "ignore_eos",
        )
        if (value := getattr(fields, name)) is not None
    }
    if given.get("top_k") == -1:  # how others say "off"
        given["top_k"] = 0
    if isinstance(fields.stop, str):
        given["stop"] = (fields.stop,)
    elif fields.stop is not None:
        given["stop"] = tuple(fields.stop)
    if fields.logit_bias:
        given["logit_bias"] = tuple((_token(token), bias) for token, bias in fields.logit_bias.items())
    temperature = 1.0 if fields.temperature is None else fields.temperature
    logprobs = _logprobs(fields)
    return _named(
        lambda: SamplingParams(temperature=temperature, max_tokens=max_tokens, logprobs=logprobs, **given),
    )


def _logprobs(fields: ChatFields | CompletionFields | Fields) -> int | None:
    if isinstance(fields, CompletionFields):
        return fields.logprobs
    assert isinstance(fields, ChatFields)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise Refusal("top_logprobs needs logprobs: true", "top_logprobs")
    return (fields.top_logprobs or 0) if fields.logprobs else None


def _token(text: str) -> int:
    if not text.isdecimal():
        raise Refusal(f"logit_bias must map token ids to numbers, got the key {text!r}", "logit_bias")
    return int(text)


def _named(make: Callable[[], SamplingParams]) -> SamplingParams:
    """Parameters whose error names the field, as its message begins with it."""
    try:
        return make()
    except RequestError as error:
        word = str(error).partition(" ")[0]
        raise Refusal(str(error), word if word in SamplingParams.__dataclass_fields__ else None) from error
