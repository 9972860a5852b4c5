"""Compiled kernels that are kept on disk."""

from numba import types

from lynxkv.codec import numba_rows
from lynxkv.codec.numba_decode import decode_heads


def kept_under():
    """What names decode_heads' compiled code on disk, for a signature without arguments."""
    return decode_heads._cache._index_key(types.void(), decode_heads.targetctx.codegen())


def test_kernels_on_disk_are_used_for_the_same_sources_only(monkeypatch):
    ours = kept_under()
    monkeypatch.setattr(numba_rows, "_sources", lambda: "the digest of other sources")

    theirs = kept_under()

    assert ours != theirs
    assert ours[:-1] == theirs[:-1]
