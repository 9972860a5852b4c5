"""What must be equal at both ends before a KV cache of one means anything to the other."""

from typing import Annotated

import msgspec
from msgspec import Meta

from lynxkv.errors import HandshakeRefused

_Name = Annotated[str, Meta(max_length=1024)]
_Counts = Annotated[tuple[int, ...], Meta(max_length=4096)]


class Fingerprint(msgspec.Struct, frozen=True):
    """Identity of a model and of the caches it makes.

    Parameters
    ----------
    architecture : str
        Class of the model, e.g. ``LlamaForCausalLM``.
    layers : int
        Number of layers with a cache.
    kv_heads, head_dims : tuple of int
        KV heads, and widths of a head (K then V, or per layer): any fixed convention, equal at both ends.
    dtype : str
        Element type of the cache handed over.
    rope : str
        RoPE parameters in a canonical text.
    weights, tokenizer : str
        Identity of the files, e.g. a hash.
    windows : tuple of int
        Sliding window of each layer, 0 for full attention.
    """

    architecture: _Name
    layers: int
    kv_heads: _Counts
    head_dims: _Counts
    dtype: _Name
    rope: _Name
    weights: _Name
    tokenizer: _Name
    windows: _Counts = ()


def difference(ours: Fingerprint, theirs: Fingerprint) -> tuple[str, str, str] | None:
    """First field that differs as ``(field, ours, theirs)``, or None."""
    for field in Fingerprint.__struct_fields__:
        mine, other = getattr(ours, field), getattr(theirs, field)
        if mine != other:
            return f"fingerprint.{field}", _text(mine), _text(other)
    return None


def compare(ours: Fingerprint, theirs: Fingerprint) -> None:
    """Raise :class:`HandshakeRefused` naming the first field that differs and both values."""
    found = difference(ours, theirs)
    if found is not None:
        raise refusal(*found)


def refusal(field: str, ours: str, theirs: str) -> HandshakeRefused:
    """Build the error for peers that do not fit together."""
    return HandshakeRefused(
        f"{field} differs: ours {ours}, theirs {theirs}; run the same model and options on both sides"
    )


def _text(value: object) -> str:
    return str(value)[:500]
