"""Errors as HTTP tells them: OpenAI's shape, one status and code for every class of ``lynxkv.errors``."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lynxkv import errors
from lynxkv.errors import LynxError

_STATUS: tuple[tuple[type[LynxError], int, str], ...] = (  # the first that fits counts
    (errors.PromptTooLong, 400, "context_length_exceeded"),
    (errors.UnknownModel, 404, "model_not_found"),
    (errors.RequestError, 400, "invalid_request"),
    (errors.SpecError, 400, "invalid_request"),
    (errors.Overloaded, 429, "overloaded"),
    (errors.CapacityExceeded, 503, "capacity_exceeded"),
    (errors.DeadlineExceeded, 504, "deadline_exceeded"),
    (errors.PeerLost, 502, "peer_lost"),
    (errors.StaleGeneration, 502, "stale_generation"),
    (errors.HandshakeRefused, 502, "handshake_refused"),
    (errors.CorruptData, 502, "corrupt_data"),
    (errors.ProtocolError, 502, "protocol_error"),
    (errors.Cancelled, 502, "cancelled"),
    (errors.TransferRejected, 502, "transfer_rejected"),
    (errors.TransferError, 502, "transfer_failed"),
    (LynxError, 500, "internal_error"),
)

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class HttpError(LynxError):
    """An error that already knows how HTTP tells it.

    Parameters
    ----------
    status : int
    code : str
        Stable, for programs.
    message : str
    param : str, optional
        The request's field that is wrong.
    retry_after_s : float, optional
        When it may be worth another try.
    """

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s


class Refusal(HttpError):
    """400 that names the request's field."""

    def __init__(self, message: str, param: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(400, code, message, param=param)


class Draining(HttpError):
    """This process takes no new requests any more."""

    def __init__(self, retry_after_s: float = 5.0) -> None:
        super().__init__(
            503, "draining", "this process is shutting down: send the request again", retry_after_s=retry_after_s
        )


@dataclass(frozen=True, slots=True)
class Told:
    """An error as a response: ``{"error": {"message", "type", "param", "code"}}``."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def code(self) -> str:
        """The error's stable name."""
        return str(self.body["error"]["code"])

    @property
    def message(self) -> str:
        """What happened."""
        return str(self.body["error"]["message"])

    def encoded(self) -> bytes:
        """The body's bytes."""
        return msgspec.json.encode(self.body)


def tell(error: LynxError) -> Told:
    """The response for ``error``."""
    retry_after_s: float | None = getattr(error, "retry_after_s", None)
    param: str | None = None
    if isinstance(error, HttpError):
        status, code, param = error.status, error.code, error.param
    else:
        status, code = next((status, code) for kind, status, code in _STATUS if isinstance(error, kind))
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    headers = {} if retry_after_s is None else {"retry-after": str(max(1, math.ceil(retry_after_s)))}
    return Told(status, {"error": {"message": str(error), "type": kind, "param": param, "code": code}}, headers)


def told_by(status: int, body: bytes, headers: dict[str, str]) -> HttpError:
    """The error that another process answered with; a body of some other shape is quoted shortly."""
    retry_after = headers.get("retry-after", "")
    retry_after_s = float(retry_after) if re.fullmatch(r"\d{1,6}", retry_after) else None
    try:
        told = msgspec.json.decode(body)["error"]
        message, code, param = str(told["message"]), str(told["code"]), told.get("param")
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
        quoted = body[:200].decode(errors="replace")
        message, code, param = f"a worker answered {status}: {quoted}", "worker_error", None
    return HttpError(status, code, message, param=param, retry_after_s=retry_after_s)
