"""Every error this package raises on purpose, under one base class.

A message says what was expected, what came, and what to do next.
"""


class LynxError(Exception):
    """Base class of all errors raised by lynxkv."""


class SpecError(LynxError, ValueError):
    """A codec spec, cache shape or segment plan that cannot be used."""


class NotFinite(LynxError, ValueError):
    """A KV tensor holds NaN or Inf; names layer, head and token."""


class CorruptData(LynxError):
    """Bytes whose checksum or structure is wrong; they were not used."""


class ProtocolError(LynxError):
    """A peer sent something that is not a valid frame or event."""


class HandshakeRefused(LynxError):
    """Two peers do not fit together; names the field and both values."""


class TransferError(LynxError):
    """A transfer could not be completed."""


class PeerLost(TransferError):
    """The connection to the peer ended before the transfer did."""


class DeadlineExceeded(TransferError, TimeoutError):
    """A wait reached its deadline; names what was waited for and for how long."""


class TransferRejected(TransferError):
    """The peer refused a transfer: unknown, duplicate, cancelled, or no room."""


class Cancelled(TransferError):
    """The request was cancelled on this side; never comes over the wire."""


class StaleGeneration(TransferError):
    """Data from an earlier life of the producer; it was dropped."""


class CapacityExceeded(LynxError):
    """A memory bound would be broken by something that can never fit in it."""


class Overloaded(LynxError):
    """There is no room now; ask again after ``retry_after_s`` seconds."""

    def __init__(self, *args: object, retry_after_s: float = 1.0) -> None:
        super().__init__(*args)
        self.retry_after_s = retry_after_s


class EngineError(LynxError):
    """A model could not be loaded or run."""


class UnknownModel(EngineError):
    """No such alias, folder or hub id."""


class UnsupportedModel(EngineError):
    """The model's cache is not K and V per layer; names what it is."""


class PromptTooLong(EngineError):
    """Prompt and answer do not fit in the model's context."""


class RequestError(LynxError, ValueError):
    """A request option is out of range."""
