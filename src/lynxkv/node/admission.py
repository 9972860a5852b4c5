"""What an admit carries of a request: token ids and sampling, as plain values the wire can hold."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from lynxkv.errors import RequestError
from lynxkv.speculation import SamplingParams


def tokens_to_bytes(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian u32."""
    try:
        return np.asarray(tokens, dtype=np.int64).astype("<u4", casting="unsafe").tobytes()
    except (OverflowError, TypeError, ValueError) as error:
        raise RequestError(f"token ids must be integers, got {error}") from error


def tokens_from_bytes(data: bytes) -> list[int]:
    """Inverse of :func:`tokens_to_bytes`."""
    if len(data) % 4:
        raise RequestError(f"token ids of 4 bytes each expected, got {len(data)} bytes")
    return [int(token) for token in np.frombuffer(data, dtype="<u4")]


def sampling_to_wire(params: SamplingParams) -> dict[str, Any]:
    """Parameters as scalars, flat lists and a flat map."""
    plain: dict[str, Any] = msgspec.to_builtins(params)
    plain["logit_bias"] = dict(params.logit_bias)
    plain["stop"] = []  # stop strings end an answer; they do not change how a token is drawn
    return plain


def sampling_from_wire(plain: Mapping[str, Any]) -> SamplingParams:
    """Inverse of :func:`sampling_to_wire`; RequestError for anything out of range."""
    fields = dict(plain)
    if isinstance(fields.get("logit_bias"), dict):
        fields["logit_bias"] = list(fields["logit_bias"].items())
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        raise RequestError(f"sampling parameters: {error}") from error
