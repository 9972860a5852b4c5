"""Today's code writes and reads the bytes that were committed. Regenerate: ``python tests/codec/test_golden.py``.

A golden file that changes is a new version of the format (`SPEC_VERSION`).
"""

from pathlib import Path

import numpy as np
import pytest
from cases import Case, decode_cache, encode_cache, layers, make_cache, to_cells

from lynxkv.codec import Bits, CodecSpec, Kind, LayerBits, Tier

FOLDER = Path(__file__).parent / "golden"
GOLDEN = [
    Case("bfloat16-4+4", layers((1, 16, 72, 0, 163), (2, 8, 4, 70, 163))),
    Case("bfloat16-5+3-8+0", layers((1, 16, 24, 0, 130)), CodecSpec(k=Bits(5, 3), v=Bits(8, 0), recent=0)),
    Case("float16-6+6", layers((1, 16, 24, 0, 130), dtype="float16"), CodecSpec(k=Bits(6, 6), v=Bits(3, 5), recent=0)),
    Case(
        "float32-overrides",
        layers((1, 16, 24, 0, 130), (1, 16, 24, 0, 130), dtype="float32"),
        CodecSpec(recent=0, sinks=9, overrides=(LayerBits(1, Bits(4, 0), Bits(1, 1)),)),
    ),
]


def golden_cache(case):
    """Hashed values, a constant group, zeros of both signs and (but for float16) groups that cannot be quantized."""
    cache = make_cache(case, seed=11)
    for kind in Kind:
        own = cache[0][kind]
        own[0, 64:128, 2] = to_cells(np.array([-1.25]), case.shape.dtype)
        own[0, 66, :] = to_cells(np.array([-0.0]), case.shape.dtype)
        own[0, 67, ::2] = to_cells(np.array([-0.0]), case.shape.dtype)
        own[0, 67, 1::2] = to_cells(np.array([0.0]), case.shape.dtype)
        if case.shape.dtype != "float16":
            own[0, 70, 3], own[0, 71, 3] = to_cells(np.array([3.3e38, -3.3e38]), case.shape.dtype)
    return cache


def contents(case, kernels):
    """What a golden file holds: the segments, and the values decoded at both tiers, all as bytes."""
    data = encode_cache(case, golden_cache(case), kernels)
    return {"segments": b"".join(d.tobytes() for d in data.values()), **values(case, data, kernels)}


def values(case, data, kernels):
    return {
        tier.name.lower(): b"".join(layer[kind].tobytes() for layer in cache for kind in Kind)
        for tier in (Tier.ANCHOR, Tier.RESIDUAL)
        for cache in [decode_cache(case, data, kernels, tier=tier)]
    }


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.name)
def test_bytes_and_values_are_those_that_were_committed(case, kernels):
    found = contents(case, kernels)
    with np.load(FOLDER / f"{case.name}.npz") as golden:
        for name, data in found.items():
            assert data == golden[name].tobytes(), name


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: c.name)
def test_committed_bytes_decode_to_the_committed_values(case, kernels):
    sizes = {s: len(d) for s, d in encode_cache(case, golden_cache(case), "reference").items()}
    with np.load(FOLDER / f"{case.name}.npz") as golden:
        flat, data, at = golden["segments"].tobytes(), {}, 0
        for segment, size in sizes.items():
            data[segment] = flat[at : at + size]
            at += size
        for name, expected in values(case, data, kernels).items():
            assert expected == golden[name].tobytes(), name


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case in GOLDEN:
        made = contents(case, "reference")
        np.savez_compressed(FOLDER / f"{case.name}.npz", **{k: np.frombuffer(v, np.uint8) for k, v in made.items()})
        print(case.name, (FOLDER / f"{case.name}.npz").stat().st_size)
