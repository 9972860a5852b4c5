"""``kv_transfer_params``: what routers and workers tell each other about a transfer, in vLLM's words."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from lynxkv.serving.errors import Refusal
from lynxkv.serving.schema import Seed

T = TypeVar("T", bound=msgspec.Struct)

_PARAM = "kv_transfer_params"
_Id = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class ToPrefill(msgspec.Struct, frozen=True):
    """Asks a prefill worker for KV that another worker will pull. Further fields, vLLM's nulls, are ignored."""

    do_remote_decode: bool
    transfer_id: _Id | None = None
    seed: Seed | None = None

    def __post_init__(self) -> None:
        if not self.do_remote_decode:
            raise ValueError("do_remote_decode must be true")


class ToDecode(msgspec.Struct, frozen=True, kw_only=True):
    """Tells a decode worker where the KV is, or will be; what a prefill worker answers with."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    transfer_id: _Id
    remote_engine_id: str = ""
    remote_host: str
    remote_port: Annotated[int, Meta(ge=1, le=65535)]
    remote_epoch: Annotated[int, Meta(ge=0)] = 0
    seed: Seed

    def __post_init__(self) -> None:
        if not self.do_remote_prefill or self.do_remote_decode:
            raise ValueError("do_remote_prefill must be true, do_remote_decode false")

    @property
    def transfer(self) -> bytes:
        """The id's bytes."""
        return bytes.fromhex(self.transfer_id)

    @property
    def peer(self) -> tuple[str, int]:
        """Where the KV is served."""
        return self.remote_host, self.remote_port


def read_id(text: str) -> bytes:
    """A transfer id in a path."""
    try:
        return bytes.fromhex(msgspec.convert(text, _Id))
    except msgspec.ValidationError as error:
        raise Refusal(f"a transfer id of 32 hex digits expected, got {text[:64]!r}", "transfer_id") from error


def read_to_prefill(given: Mapping[str, Any] | None) -> ToPrefill:
    """Of a request to a prefill worker."""
    expected = (
        'a prefill worker answers requests that carry "kv_transfer_params": {"do_remote_decode": true}, as a router '
        "sends them; clients ask the router"
    )
    return _read(given, ToPrefill, expected)


def read_to_decode(given: Mapping[str, Any] | None) -> ToDecode:
    """Of a request to a decode worker."""
    expected = (
        'a decode worker answers requests that carry the "kv_transfer_params" a prefill worker answered with '
        '({"do_remote_prefill": true, "transfer_id", "remote_host", "remote_port", "seed", …}); clients ask the router'
    )
    return _read(given, ToDecode, expected)


def _read(given: Mapping[str, Any] | None, kind: type[T], expected: str) -> T:
    if given is None:
        raise Refusal(expected, _PARAM)
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise Refusal(f"{_PARAM}: {error}; {expected}", _PARAM) from error
