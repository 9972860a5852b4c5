"""Both implementations write the same bytes and read the same values."""

import os
import subprocess
import sys

import numpy as np
import pytest
from cases import CASES, decode_cache, encode_cache, make_cache, part, same_bits, segments_of, spans_of

from lynxkv.codec import Segment, Tier, check, decode, encode, segment_bounds

case_of = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@case_of
def test_both_kernels_write_the_same_bytes(case):
    cache = make_cache(case)
    reference, numba = (encode_cache(case, cache, name) for name in ("reference", "numba"))
    assert reference.keys() == numba.keys()
    for segment, data in reference.items():
        assert data.tobytes() == numba[segment].tobytes()


@case_of
@pytest.mark.parametrize("tier", [Tier.ANCHOR, Tier.RESIDUAL])
def test_both_kernels_read_the_same_values(case, tier):
    data = encode_cache(case, make_cache(case), "reference")
    one, other = (decode_cache(case, data, name, tier=tier) for name in ("reference", "numba"))
    assert same_bits(one, other)


@case_of
def test_encode_makes_the_planned_segments_of_the_announced_size(case):
    data = encode_cache(case, make_cache(case), "numba")
    assert set(data) == set(segments_of(case))
    for segment, encoded in data.items():
        assert segment_bounds(case.shape, case.spec, segment)[0] == len(encoded)
        check(case.shape, case.spec, segment, encoded)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_float32_output_holds_the_value_rounded_to_the_cache_dtype(name):
    case = next(c for c in CASES if c.name == ("dim-80" if name == "bfloat16" else name))
    data = encode_cache(case, make_cache(case), "reference")
    own = decode_cache(case, data, "reference")
    for kernels in ("reference", "numba"):
        wide = decode_cache(case, data, kernels, dtype=np.float32)
        for a, b in zip(own, wide, strict=True):
            for kind in a:
                cells = a[kind]
                expected = (
                    (cells.astype(np.uint32) << 16).view(np.float32) if name == "bfloat16" else cells.astype(np.float32)
                )
                assert b[kind].tobytes() == expected.tobytes()


@pytest.mark.parametrize("kernels", ["reference", "numba"])
def test_strides_of_heads_and_rows_do_not_matter(kernels):
    case = next(c for c in CASES if c.name == "gqa-layers")
    cache = make_cache(case)
    strided = [
        {k: np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 0, 1)), 1, 0)[::-1][::-1] for k, a in layer.items()}
        for layer in cache
    ]
    data = encode_cache(case, cache, kernels)
    for segment, encoded in encode_cache(case, strided, kernels).items():
        assert encoded.tobytes() == data[segment].tobytes()
    for span in spans_of(case):
        expected = [np.zeros_like(a) for a in part(case, cache, span)]
        wide = [np.zeros((a.shape[1], a.shape[0] + 1, a.shape[2] + 8), a.dtype) for a in expected]
        views = [w[::-1, 1:, 4:-4].transpose(1, 0, 2) for w in wide]
        tiers = [data.get(Segment(tier, span)) for tier in (Tier.ANCHOR, Tier.RESIDUAL)]
        decode(case.shape, case.spec, span, *tiers, expected, kernels=kernels)
        decode(case.shape, case.spec, span, *tiers, views, kernels=kernels)
        for view, array, whole in zip(views, expected, wide, strict=True):
            assert (view == array).all()
            assert not whole[:, :1].any()
            assert not whole[:, :, :4].any()
            assert not whole[:, :, -4:].any()


@pytest.mark.parametrize("kernels", ["reference", "numba"])
@pytest.mark.parametrize("first", [0, 1, 3, 4, 63, 64, 65, 77, 130, 199, 200, 300])
def test_rows_before_first_are_left_alone(kernels, first):
    case = next(c for c in CASES if c.name == "gqa-layers")
    data = encode_cache(case, make_cache(case), "reference")
    whole = decode_cache(case, data, "reference")
    trimmed = decode_cache(case, data, kernels, first=first)
    for a, b in zip(whole, trimmed, strict=True):
        for kind in a:
            assert (b[kind][:, :first] == 0xFFFF).all()
            assert (b[kind][:, first:] == a[kind][:, first:]).all()


@pytest.mark.parametrize("shift", [1, 2, 3, 4])
def test_segments_may_lie_at_any_address(shift):
    case = next(c for c in CASES if c.name == "float32")
    data = encode_cache(case, make_cache(case), "numba")
    moved = {}
    for segment, encoded in data.items():
        room = np.zeros(len(encoded) + shift, np.uint8)
        room[shift:] = encoded
        moved[segment] = memoryview(room)[shift:]
    assert same_bits(decode_cache(case, moved, "numba"), decode_cache(case, data, "numba"))


def test_encode_writes_into_given_buffers():
    case = next(c for c in CASES if c.name == "gqa-layers")
    cache = make_cache(case)
    for span in spans_of(case):
        arrays = part(case, cache, span)
        expected = encode(case.shape, case.spec, span, arrays)
        room = {tier: np.zeros(len(data) + 100, np.uint8) for tier, data in expected.items()}
        for tier, data in encode(case.shape, case.spec, span, arrays, out=room).items():
            assert data.tobytes() == expected[tier].tobytes()
            assert data.base is room[tier] or np.shares_memory(data, room[tier])


def test_segments_may_be_bytes_or_memoryviews():
    case = next(c for c in CASES if c.name == "gqa-layers")
    data = encode_cache(case, make_cache(case), "numba")
    as_bytes = {segment: encoded.tobytes() for segment, encoded in data.items()}
    assert same_bits(decode_cache(case, as_bytes, "numba"), decode_cache(case, data, "numba"))


def test_kernels_compile_where_nothing_can_be_written():
    """A container with a read-only root: neither the package's folder nor a home."""
    code = (
        "from numba.core import caching\n"
        "(getattr(caching, 'CacheImpl', None) or caching._CacheImpl)._locator_classes = []\n"
        "import lynxkv.codec.numba_layer"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_code_made_for_any_cpu_reads_the_same_values():
    """Without the instructions that only some CPUs have, as when one folder of compiled code serves many machines."""
    tests = [f"{__file__}::test_both_kernels_read_the_same_values", "-p", "no:cacheprovider", "-q", "-n", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *tests],
        env=os.environ | {"NUMBA_CPU_NAME": "generic"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
