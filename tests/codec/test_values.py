"""What decoding gives back: error bounds, and what is exact."""

import numpy as np
import pytest
from cases import (
    BY_NAME,
    CASES,
    LEAST_EXPONENT,
    MANTISSA,
    Case,
    decode_cache,
    encode_cache,
    layers,
    make_cache,
    to_cells,
    to_float,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from lynxkv.codec import BLOCK, Bits, CacheShape, CodecSpec, Kind, LayerShape, Segment, Span, Tier, decode, encode

both_kernels = pytest.mark.parametrize("kernels", ["reference", "numba"])
widths = st.tuples(st.integers(1, 8), st.integers(0, 8)).filter(lambda w: sum(w) <= 12).map(lambda w: Bits(*w))


def bits_of(cells):
    return cells.view({2: np.uint16, 4: np.uint32}[cells.itemsize])


def coded_blocks(case, layer, array):
    """The coded rows of a layer's array: ``[heads, blocks, 64, dim]``, and which of them are sinks ``[blocks, 64]``."""
    rows = case.shape.layers[layer].rows(case.spec)
    start = case.shape.layers[layer].start
    blocks = array[:, rows.coded - start : rows.tail - start].reshape(len(array), -1, BLOCK, array.shape[2])
    return blocks, (np.arange(rows.coded, rows.tail) < case.spec.sinks).reshape(-1, BLOCK)


def spread(values, sinks, kind):
    """Each element's group's min and max, of float64 values ``[heads, blocks, 64, dim]``."""
    edges = []
    for reduce, neutral in ((np.minimum, np.inf), (np.maximum, -np.inf)):
        if kind is Kind.K:
            masked = np.where(sinks[None, :, :, None], neutral, values)
            edges.append(np.broadcast_to(reduce.reduce(masked, axis=2, keepdims=True), values.shape))
        else:
            starts = np.arange(0, values.shape[3], 64)
            groups = reduce.reduceat(values, starts, axis=3)
            edges.append(np.repeat(groups, 64, axis=3)[..., : values.shape[3]])
    return edges


def half_ulp(values, dtype):
    exponent = np.maximum(np.frexp(np.abs(values))[1] - 1, LEAST_EXPONENT[dtype])
    return 2.0 ** (exponent - MANTISSA[dtype] - 1)


def assert_within_bounds(case, cache, decoded, tier):
    dtype = case.shape.dtype
    for i, (layer, got) in enumerate(zip(cache, decoded, strict=True)):
        for kind in Kind:
            if not layer[kind].size:
                continue
            bits = case.spec.bits(i, kind)
            blocks, sinks = coded_blocks(case, i, layer[kind])
            x, y = to_float(blocks, dtype), to_float(coded_blocks(case, i, got[kind])[0], dtype)
            low, high = spread(x, sinks, kind)
            with np.errstate(invalid="ignore"):
                fine = (high - low) / bits.steps
                if tier is Tier.ANCHOR and bits.residual:
                    bound = (0.5 + 2.0 ** -(bits.residual + 1)) * fine * 2**bits.residual
                else:
                    bound = 0.5 * fine
                # Six float32 roundings at the magnitude of the group, and the one to the cache's dtype.
                rounding = 6 * 2.0**-24 * (high - low + np.maximum(np.abs(low), np.abs(high)))
                wrong = np.abs(x - y) > bound + rounding + half_ulp(np.maximum(np.abs(x), np.abs(y)), dtype)
            assert not (wrong & ~sinks[None, :, :, None]).any()


@both_kernels
@pytest.mark.parametrize("tier", [Tier.ANCHOR, Tier.RESIDUAL])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_error_is_within_the_bounds_of_the_design(case, tier, kernels):
    cache = make_cache(case)
    decoded = decode_cache(case, encode_cache(case, cache, kernels), kernels, tier=tier)
    assert_within_bounds(case, cache, decoded, tier)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(), dtype=st.sampled_from(["bfloat16", "float16", "float32"]), bits=widths, tier=st.sampled_from(Tier)
)
def test_error_bounds_hold_for_any_values(data, dtype, bits, tier):
    top = {"bfloat16": 3e38, "float16": 6e4, "float32": 3e38}[dtype]
    scale = data.draw(st.sampled_from([1e-30, 1e-6, 1.0, 1e4, top / 4]))
    number = st.floats(-1, 1, width=32).map(lambda x: x * scale)
    pool = data.draw(st.lists(number, min_size=1, max_size=12))
    picks = np.array(data.draw(st.binary(min_size=64, max_size=64)), dtype="S64").tobytes()
    index = (np.frombuffer(picks, np.uint8)[np.arange(128) % 64].astype(int)[:, None] + 3 * np.arange(20)) % len(pool)
    case = Case("any", CacheShape(dtype, (LayerShape(1, 20, 20, 0, 128),)), CodecSpec(k=bits, v=bits, recent=0))
    values = to_cells(np.array(pool)[index], dtype)[None]
    cache = [dict.fromkeys(Kind, values)]
    encoded = encode_cache(case, cache, "numba")
    assert {s: d.tobytes() for s, d in encoded.items()} == {
        s: d.tobytes() for s, d in encode_cache(case, cache, "reference").items()
    }
    tier = min(tier, Tier.RESIDUAL)
    decoded = decode_cache(case, encoded, "numba", tier=tier)
    assert_within_bounds(case, cache, decoded, tier)
    for kind in Kind:
        reference = decode_cache(case, encoded, "reference", tier=tier)
        assert decoded[0][kind].tobytes() == reference[0][kind].tobytes()


@both_kernels
@pytest.mark.parametrize("tier", [Tier.ANCHOR, Tier.RESIDUAL])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_raw_rows_come_back_bit_for_bit(case, tier, kernels):
    cache = make_cache(case)
    decoded = decode_cache(case, encode_cache(case, cache, kernels), kernels, tier=tier)
    for i, shape in enumerate(case.shape.layers):
        rows = shape.rows(case.spec)
        positions = np.arange(shape.start, shape.stop)
        raw = (positions < rows.coded) | (positions >= rows.tail) | (positions < case.spec.sinks)
        for kind in Kind:
            assert (bits_of(decoded[i][kind])[:, raw] == bits_of(cache[i][kind])[:, raw]).all()


@both_kernels
@pytest.mark.parametrize("tier", [Tier.ANCHOR, Tier.RESIDUAL])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_extremes_of_every_group_come_back_exactly(case, tier, kernels):
    cache = make_cache(case)
    decoded = decode_cache(case, encode_cache(case, cache, kernels), kernels, tier=tier)
    for i in range(len(case.shape.layers)):
        for kind in Kind:
            if not cache[i][kind].size:
                continue
            blocks, sinks = coded_blocks(case, i, cache[i][kind])
            x = to_float(blocks, case.shape.dtype)
            y = to_float(coded_blocks(case, i, decoded[i][kind])[0], case.shape.dtype)
            low, high = spread(x, sinks, kind)
            extreme = ((x == low) | (x == high)) & ~sinks[None, :, :, None]
            assert (x[extreme] == y[extreme]).all()


@both_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.25, 1e-40, 6e4])
def test_constant_groups_come_back_bit_for_bit(value, dtype, kernels):
    case = Case("constant", layers((1, 16, 80, 0, 128), dtype=dtype), CodecSpec(recent=0))
    cache = [{k: to_cells(np.full((1, 128, case.shape.layers[0].dim(k)), value), dtype) for k in Kind}]
    data = encode_cache(case, cache, kernels)
    for tier in (Tier.ANCHOR, Tier.RESIDUAL):
        decoded = decode_cache(case, data, kernels, tier=tier)
        for kind in Kind:
            assert decoded[0][kind].tobytes() == cache[0][kind].tobytes()


@both_kernels
def test_zeros_of_both_signs_come_back_as_zeros(kernels):
    case = Case("zeros", layers((1, 16, 16, 0, 128)), CodecSpec(recent=0, sinks=0))
    values = np.zeros((1, 128, 16), np.uint16)
    values[:, ::3] = 0x8000
    decoded = decode_cache(case, encode_cache(case, [dict.fromkeys(Kind, values)], kernels), kernels)
    for kind in Kind:
        assert not (decoded[0][kind] & 0x7FFF).any()


def extreme_groups(dtype):
    """V of 80 channels and K of 16 in which some groups have a range that overflows, or a step that is subnormal."""
    case = Case("flagged", layers((2, 16, 80, 0, 200), dtype=dtype), CodecSpec(recent=0))
    cache = make_cache(case)
    big, tiny = to_cells(np.array([3.3e38, 1e-38]), dtype)
    minus = to_cells(np.array([-3.3e38]), dtype)[0]
    for kind in Kind:
        own = cache[0][kind]
        own[0, 70, 3], own[0, 80, 3] = big, minus
        own[0, 90, 5], own[0, 90, 6] = big, minus
        own[1, 64:128, 7] = 0
        own[1, 77, 7] = tiny
        own[1, 140, :] = 0
        own[1, 140, 9] = tiny
        own[1, 2, 1], own[1, 10, 1] = big, minus
    return case, cache


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_groups_that_cannot_be_quantized_are_raw_and_exact(dtype):
    case, cache = extreme_groups(dtype)
    encoded = {name: encode_cache(case, cache, name) for name in ("reference", "numba")}
    assert {s: d.tobytes() for s, d in encoded["reference"].items()} == {
        s: d.tobytes() for s, d in encoded["numba"].items()
    }
    for kernels in ("reference", "numba"):
        for tier in (Tier.ANCHOR, Tier.RESIDUAL):
            decoded = decode_cache(case, encoded[kernels], kernels, tier=tier)
            k, v = decoded[0][Kind.K], decoded[0][Kind.V]
            own = cache[0]
            assert k[0, 64:128, 3].tobytes() == own[Kind.K][0, 64:128, 3].tobytes()
            assert k[1, 64:128, 7].tobytes() == own[Kind.K][1, 64:128, 7].tobytes()
            assert k[1, :64, 1].tobytes() == own[Kind.K][1, :64, 1].tobytes() or case.spec.sinks
            assert v[0, 90, :64].tobytes() == own[Kind.V][0, 90, :64].tobytes()
            assert v[1, 140].tobytes() == own[Kind.V][1, 140].tobytes()
            assert np.isfinite(to_float(k, dtype)).all()
            assert np.isfinite(to_float(v, dtype)).all()
            trimmed = decode_cache(case, encoded[kernels], kernels, tier=tier, first=75)
            assert trimmed[0][Kind.K][:, 75:].tobytes() == k[:, 75:].tobytes()
            assert (
                bits_of(trimmed[0][Kind.K])[:, :75]
                == bits_of(np.array([-1]).astype({"bfloat16": np.int16, "float32": np.int32}[dtype])).astype(
                    bits_of(k).dtype
                )
            ).all()


@pytest.mark.parametrize("residual", [0, 4])
def test_the_step_of_int4_and_int8_without_residual_is_round_to_nearest(residual):
    bits = Bits(8 - residual, residual)
    shape = CacheShape("float32", (LayerShape(1, 1, 1, 0, 64),))
    spec = CodecSpec(k=bits, v=bits, sinks=0, recent=0)
    values = np.linspace(0, bits.steps, 64, dtype=np.float32).reshape(1, 64, 1)
    span = Span(Kind.K, 0, 1, 0, 64)
    tiers = encode(shape, spec, span, [values])
    out = np.zeros_like(values)
    decode(shape, spec, span, tiers[Tier.ANCHOR], tiers.get(Tier.RESIDUAL), [out])
    assert (out == np.rint(values)).all()
    assert Segment(Tier.RESIDUAL, span).tier in tiers or not residual


def test_all_cases_have_distinct_names():
    assert len(BY_NAME) == len(CASES)
