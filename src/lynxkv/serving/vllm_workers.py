"""Requests on vLLM's OpenAI servers: the prefill worker first, then the decode worker with what the first one answered.

Nothing of a request is understood but what the two steps need; every other field reaches the workers as it came.
"""

import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from msgspec import Raw

from lynxkv.serving.ask import CHAT_TOKENS, COMPLETION_TOKENS
from lynxkv.serving.errors import HttpError, Refusal, told_by
from lynxkv.serving.exchange import Reply
from lynxkv.serving.relay import ELSEWHERE, WorkerFailed, lower, pass_on, post, unless_dead, unreachable
from lynxkv.serving.schema import Kind, Lynx, read_object
from lynxkv.serving.upstream import Worker

_PARAMS = "kv_transfer_params"
_CONNECTORS = frozenset({"emit", "codec"})
"""Fields of ``lynx`` that a connector takes; the others are of lynxkv's own workers."""

_WHERE = ("do_remote_", "remote_", "transfer_id")
"""How names in ``kv_transfer_params`` begin that only a router and its workers may give."""

_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "n")


@dataclass(frozen=True, slots=True)
class VllmAsk:
    """What a client wants of vLLM's workers.

    ``plain`` is the request's fields as they came, ``params`` those for the connector. A request of ``several`` prompts
    cannot be one transfer: the decode worker computes it alone.
    """

    kind: Kind
    plain: Mapping[str, Raw]
    params: Mapping[str, Raw]
    model: str | None
    n: int
    several: bool
    estimated_tokens: int
    most_tokens: int
    deadline_s: float = math.inf


def raw_fields(body: bytes) -> dict[str, Raw]:
    """The fields of a request's body, each as it came; :class:`Refusal` when it is not a JSON object."""
    try:
        return msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        read_object(body)  # says what it is instead
        raise


def model_of(fields: Mapping[str, Raw]) -> str | None:
    """The model that is asked for, if any."""
    model: str | None = _read(fields, "model", str)
    return model


def read_for_vllm(kind: Kind, fields: Mapping[str, Raw]) -> VllmAsk:
    """Read a request as far as a router has to.

    Raises
    ------
    Refusal
        It has a field that only lynxkv's own workers understand, or says where KV is.
    """
    prompt = fields.get("prompt" if kind == "completion" else "messages", Raw(b""))
    most = _read(fields, "max_completion_tokens", int) or _read(fields, "max_tokens", int)
    n = max(1, _read(fields, "n", int) or 1)
    return VllmAsk(
        kind=kind,
        plain=fields,
        params=_of_lynx(fields) | _of_client(fields),
        model=model_of(fields),
        n=n,
        several=kind == "completion" and len(_read(fields, "prompt", list[str | list[int]]) or ()) > 1,
        estimated_tokens=len(memoryview(prompt)) // 4 + 1,
        most_tokens=n * max(1, most or (CHAT_TOKENS if kind == "chat" else COMPLETION_TOKENS)),
    )


class VllmAttempt:
    """Runs a request on two workers under a transfer id drawn for it.

    Parameters
    ----------
    client : aiohttp.ClientSession
    ask : VllmAsk
    path : str
        Of the endpoint.
    headers : mapping
        What both requests carry.
    prefill, decode : Worker
    """

    def __init__(
        self, client: aiohttp.ClientSession, ask: VllmAsk, path: str, headers: Mapping[str, str],
        prefill: Worker, decode: Worker,
    ) -> None:  # fmt: skip
        self._client, self._ask, self._path = client, ask, path
        self._headers = {**headers, "accept-encoding": "identity"}  # bytes are passed on, their encoding is not
        self._prefill, self._decode = prefill, decode
        self.transfer = secrets.token_bytes(16).hex()

    async def run(self, reply: Reply) -> bool:
        """Answer; whether the answer came to its regular end, and not to a refusal that was passed on.

        Raises
        ------
        WorkerFailed
            One of them failed; ``reply`` says whether the client has been told anything.
        """
        where: Mapping[str, Any] | None = None
        if not self._ask.several:
            status, kind, content = await unless_dead(self._prefill, self._ask_prefill())
            if status != 200:
                await reply.json(content, status=status, headers={"content-type": kind})
                return False
            where = self._where(content)
        return await unless_dead(self._decode, self._ask_decode(where, reply))

    async def give_up(self, client: aiohttp.ClientSession) -> None:
        """Nobody can be told: the KV's lease at the prefill worker ends by itself."""

    async def _ask_prefill(self) -> tuple[int, str, bytes]:
        """The prefill worker's status, content type and body."""
        plain = self._ask.plain
        body: dict[str, Any] = {name: value for name, value in plain.items() if name not in _NOT_FOR_PREFILL}
        body |= {"stream": False, "max_tokens": 1}
        if "max_completion_tokens" in plain:
            body["max_completion_tokens"] = 1
        body[_PARAMS] = {
            **self._ask.params,
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": self.transfer,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
        try:
            async with post(self._client, self._prefill, self._path, body, self._headers) as response:
                return await _whole(response, self._prefill)
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self._prefill, error) from error

    def _where(self, content: bytes) -> dict[str, Raw] | None:
        """What the decode worker is told of the KV: all that the prefill worker said, and the client's own words."""
        try:
            told = msgspec.json.decode(content, type=_Prefilled).kv_transfer_params
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"{self._prefill!r} answered no JSON with {_PARAMS}, an object or null: {error}"
            raise WorkerFailed(self._prefill, HttpError(502, "protocol_error", message)) from error
        return None if told is None else {**self._ask.params, **told}

    async def _ask_decode(self, where: Mapping[str, Any] | None, reply: Reply) -> bool:
        body: dict[str, Any] = {name: value for name, value in self._ask.plain.items() if name != _PARAMS}
        if where is not None:
            body[_PARAMS] = where
        try:
            async with post(self._client, self._decode, self._path, body, self._headers) as response:
                if response.status == 200 and response.content_type == "text/event-stream":
                    return await pass_on(response, self._decode, reply)
                status, kind, content = await _whole(response, self._decode)
        except (aiohttp.ClientError, OSError) as error:
            raise unreachable(self._decode, error) from error
        await reply.json(content, status=status, headers={"content-type": kind})
        return status < 400


class _Prefilled(msgspec.Struct):
    """Of a prefill worker's answer."""

    kv_transfer_params: dict[str, Raw] | None = None


async def _whole(response: aiohttp.ClientResponse, worker: Worker) -> tuple[int, str, bytes]:
    """A response that may be passed on as it is; WorkerFailed for one that another worker might not have given."""
    content = await response.read()
    if response.status in ELSEWHERE:
        raise WorkerFailed(worker, told_by(response.status, content, lower(response.headers)))
    return response.status, response.headers.get("content-type", "application/json"), content


def _of_lynx(fields: Mapping[str, Raw]) -> dict[str, Raw]:
    given = _read(fields, "lynx", dict[str, Raw]) or {}
    for name, value in given.items():
        if name not in _CONNECTORS and msgspec.json.decode(value) not in (None, getattr(Lynx(), name, None)):
            raise Refusal(f"lynx.{name} does not apply to vLLM's workers: leave it out", "lynx")
    return {name: value for name, value in given.items() if name in _CONNECTORS}


def _of_client(fields: Mapping[str, Raw]) -> dict[str, Raw]:
    given = _read(fields, _PARAMS, dict[str, Raw]) or {}
    for name in given:
        if name.startswith(_WHERE):
            raise Refusal(f"{_PARAMS}.{name} is between the router and its workers: leave it out", _PARAMS)
    return given


def _read(fields: Mapping[str, Raw], name: str, kind: Any) -> Any:
    """A field's value; None where it is missing or of another kind, which the workers refuse better."""
    try:
        return msgspec.json.decode(fields[name], type=kind) if name in fields else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
