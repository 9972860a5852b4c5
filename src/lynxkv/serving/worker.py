"""What prefill and decode workers say alike."""

import hashlib
from typing import Any

import msgspec

from lynxkv.codec import CodecSpec
from lynxkv.engine.base import Engine


def spec_of(target: str) -> CodecSpec:
    """The codec spec of a request's target: as it is for "exact", else anchor and residual."""
    return CodecSpec(raw=True) if target == "exact" else CodecSpec()


def fingerprint_of(engine: Engine) -> str:
    """A short name of what two workers must have in common."""
    return hashlib.sha256(msgspec.json.encode(engine.fingerprint)).hexdigest()[:16]


def plain_holdings(holdings: Any) -> dict[str, Any]:
    """A frozen dataclass of numbers, as JSON shows it."""
    return {name: getattr(holdings, name) for name in holdings.__dataclass_fields__}
