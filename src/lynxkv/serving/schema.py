"""The fields of a request: what is understood, what may be ignored, and what is refused by name."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from lynxkv.serving.errors import Refusal
from lynxkv.speculation import CAP

T = TypeVar("T", bound=msgspec.Struct)

Kind = Literal["chat", "completion"]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""As JSON's readers elsewhere can hold it."""

IGNORED = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user", "parallel_tool_calls"}
)
"""Fields that do not change an answer."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
"""Fields of the API that are not supported here, with the values that ask for nothing (null always does)."""


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False


class Lynx(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``lynx`` object of a request.

    ``target`` "exact" hands the KV over as it is: no drafts, and the answer of the KV's own dtype.
    """

    emit: Literal["verified", "draft"] = "verified"
    target: Literal["residual", "exact"] = "residual"
    on_loss: Literal["fail", "recompute"] = "fail"
    verify: Literal["batched", "stepwise"] = "batched"
    cap: Annotated[int, Meta(ge=0, le=4096)] = CAP
    deadline_s: Annotated[float, Meta(gt=0, le=86400)] = 300.0


class Fields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints take. ``None`` everywhere means the default."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | Annotated[list[str], Meta(max_length=16)] | None = None
    seed: Seed | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool | None = None
    lynx: Lynx | None = None
    kv_transfer_params: dict[str, Any] | None = None


class CompletionFields(Fields, kw_only=True):
    """Of ``/v1/completions``."""

    prompt: str | list[str | TokenId | list[TokenId]]
    logprobs: int | None = None


class TextPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a message's content; only text is understood."""

    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a chat."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    def plain(self) -> dict[str, str]:
        """As a chat template takes it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatFields(Fields, kw_only=True):
    """Of ``/v1/chat/completions``."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: int | None = None


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a request's body."""
    try:
        plain = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Refusal(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(plain, dict):
        raise Refusal(f"the body must be a JSON object, got {type(plain).__name__}")
    return plain


def read_fields(kind: Kind, plain: Mapping[str, Any]) -> ChatFields | CompletionFields:
    """Typed fields; :class:`Refusal` names the first that cannot be used."""
    known = {name: value for name, value in plain.items() if value is not None and name not in IGNORED}
    for name, harmless in NEUTRAL.items():
        if name in known and known.pop(name) not in harmless:
            raise Refusal(f"{name} is not supported, and ignoring it would change the answer: leave it out", name)
    if kind == "completion":
        return _convert(known, CompletionFields)
    known["messages"] = [_without_empty(message) for message in _list(known.get("messages", []))]
    return _convert(known, ChatFields)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise Refusal(f"messages must be an array, got {type(value).__name__}", "messages")
    return value


def _without_empty(message: Any) -> Any:
    """A message that a client read from an answer has fields that say nothing; they are left out."""
    if not isinstance(message, dict):
        return message
    return {name: value for name, value in message.items() if name in ("role", "content") or value not in (None, [])}


def _convert(plain: dict[str, Any], kind: type[T]) -> T:
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".") or None
        where = f"{param}: " if param else ""
        if param is None and ("unknown field" in what or "required field" in what):
            param = what.rpartition("field ")[2].strip("`")
        raise Refusal(f"{where}{what}", param) from error
