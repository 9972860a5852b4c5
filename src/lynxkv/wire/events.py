"""Control events: what peers say to each other besides data. Msgpack maps tagged by ``event``."""

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from lynxkv import errors
from lynxkv.codec.spec import CodecSpec, Tier
from lynxkv.errors import Cancelled, LynxError, ProtocolError, TransferError
from lynxkv.wire.fingerprint import Fingerprint
from lynxkv.wire.manifest import Count, Manifest, TransferId

_Text = Annotated[str, Meta(max_length=4096)]
_Seconds = Annotated[float, Meta(ge=0, le=86400)]
_Scalar: TypeAlias = str | int | float | bool | None
_List: TypeAlias = Annotated[list[_Scalar], Meta(max_length=4096)]
_Map: TypeAlias = Annotated[dict[str | int, _Scalar], Meta(max_length=4096)]
Options: TypeAlias = Annotated[dict[str, _Scalar | _List | _Map], Meta(max_length=64)]
"""Opaque to the wire: scalars, flat lists and flat maps, so that decoding costs no more than was sent."""


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=str.lower):
    """Base of all control events. Unknown fields are ignored, so that an older peer understands a newer one."""


class Hello(Event, frozen=True, kw_only=True):
    """First event of both sides. ``fingerprint`` None: this side runs no model (a router).

    ``secret`` is shared by all nodes of one installation; no text shows it.
    """

    versions: Annotated[tuple[int, ...], Meta(min_length=1, max_length=64)] = (1,)
    role: Annotated[str, Meta(max_length=64)]
    name: Annotated[str, Meta(max_length=256)] = ""
    epoch: Count = 0
    fingerprint: Fingerprint | None = None
    secret: Annotated[str, Meta(max_length=1024)] | None = None

    def __repr__(self) -> str:
        return f"Hello(role={self.role!r}, name={self.name!r}, epoch={self.epoch})"


class Refused(Event, frozen=True):
    """The peers do not fit together; the connection ends."""

    field: _Text
    ours: _Text
    theirs: _Text


class Admit(Event, frozen=True, kw_only=True):
    """Ask a prefill node to prefill ``tokens`` (u32 little-endian ids) and to announce ``transfer``."""

    transfer: TransferId
    tokens: bytes
    spec: CodecSpec
    sampling: Options = {}
    options: Options = {}


class Admitted(Event, frozen=True):
    """The answer to an admit; ``epoch`` may go into the pull, so that a restarted node refuses it."""

    transfer: TransferId
    epoch: Count = 0


class Pull(Event, frozen=True, kw_only=True):
    """Ask for a transfer; ``stop`` None: to the end. ``deadline_s``: how long it may wait to be announced."""

    transfer: TransferId
    start: Count = 0
    stop: Count | None = None
    tiers: Annotated[tuple[Tier, ...], Meta(max_length=3)] = (Tier.ANCHOR, Tier.RESIDUAL)
    deadline_s: _Seconds = 30.0
    attempt: Annotated[int, Meta(ge=0, lt=1 << 16)] = 0
    epoch: Count = 0


class SegmentReady(Event, frozen=True):
    """Goes before a segment's first data frame; ``digest`` is xxh3-64 of all its bytes."""

    segment: Count
    size: Count
    digest: Count


class FirstToken(Event, frozen=True, kw_only=True):
    """Token 1, which the prefill node has sampled, and the seed it drew with."""

    token: Count
    logprob: float | None = None
    top_logprobs: Annotated[list[tuple[int, float]], Meta(max_length=1024)] = []
    seed: int = 0


class Working(Event, frozen=True):
    """The producer is alive and has nothing to send yet: a prefill that waits its turn, or is in a long chunk."""


class TierEnd(Event, frozen=True):
    """Every segment of ``tier`` that was pulled has been sent."""

    tier: Tier


class Failed(Event, frozen=True):
    """The transfer, or the admit, ends here; ``code`` names a class of ``lynxkv.errors``."""

    code: Annotated[str, Meta(max_length=64)]
    message: _Text


class Acknowledge(Event, frozen=True):
    """The decode node has everything; the lease ends."""


class Reject(Event, frozen=True):
    """The decode node does not take the transfer; the lease ends."""

    reason: _Text


class Cancel(Event, frozen=True):
    """The request is over; the lease ends."""

    reason: _Text


class Keep(Event, frozen=True):
    """The decode node will pull a transfer that is admitted, but has no memory for it yet: its lease starts anew."""


class Resend(Event, frozen=True):
    """A segment arrived corrupt: send it again from its first byte."""

    segment: Count


AnyEvent: TypeAlias = (
    Hello
    | Refused
    | Admit
    | Admitted
    | Pull
    | Manifest
    | SegmentReady
    | FirstToken
    | TierEnd
    | Working
    | Failed
    | Acknowledge
    | Reject
    | Cancel
    | Keep
    | Resend
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyEvent] = msgspec.msgpack.Decoder(AnyEvent)
_CODES: dict[str, type[LynxError]] = {
    name: cls
    for name, cls in vars(errors).items()
    if isinstance(cls, type) and issubclass(cls, LynxError) and cls is not Cancelled
}


def encode_event(event: AnyEvent) -> bytes:
    """Msgpack bytes of an event."""
    return _encoder.encode(event)


def decode_event(data: bytes | bytearray | memoryview) -> AnyEvent:
    """Event of msgpack bytes; :class:`ProtocolError` for anything else."""
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as e:
        raise ProtocolError(f"not a control event: {e}") from e


def failed(error: LynxError) -> Failed:
    """Event that carries an error to the peer."""
    return Failed(type(error).__name__, str(error)[:4000])


def error_of(event: Failed) -> LynxError:
    """Error a ``failed`` event stands for; an unknown code gives :class:`TransferError`."""
    return _CODES.get(event.code, TransferError)(event.message)
