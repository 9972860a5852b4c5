"""What encode and decode refuse, and that corrupt bytes end in CorruptData and nothing else."""

import contextlib

import numpy as np
import pytest
from cases import BY_NAME, CELL, Case, decode_cache, encode_cache, layers, make_cache, part, spans_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lynxkv.codec import CodecSpec, Kind, Segment, Span, Tier, check, decode, encode, segment_bounds
from lynxkv.errors import CorruptData, NotFinite, SpecError

both_kernels = pytest.mark.parametrize("kernels", ["reference", "numba"])
NOT_FINITE = {
    "bfloat16": [0x7F80, 0xFF80, 0x7FC0, 0xFFC0, 0x7F81, 0xFFFF],
    "float16": [np.inf, -np.inf, np.nan],
    "float32": [np.inf, -np.inf, np.nan],
}


@both_kernels
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("token", [70, 72, 130, 191, 192, 199])
def test_nan_and_infinity_are_named_by_layer_kind_head_and_token(token, dtype, kind, kernels):
    case = Case("x", layers((3, 16, 80, 70, 200), (3, 16, 80, 70, 200), dtype=dtype), segment_tokens=512)
    for value in NOT_FINITE[dtype]:
        cache = make_cache(case)
        cache[1][kind][2, token - 70, 11] = value
        with pytest.raises(NotFinite, match=rf"{kind.name} of layer 1 head 2 token {token}\b"):
            encode_cache(case, cache, kernels)


@both_kernels
@pytest.mark.parametrize("token", [0, 3, 4, 63])
def test_nan_among_sinks_and_after_is_found(token, kernels):
    case = Case("x", layers((1, 16, 16, 0, 128)))
    cache = make_cache(case)
    cache[0][Kind.V][0, token, 0] = 0x7FC0
    with pytest.raises(NotFinite, match=rf"token {token}\b"):
        encode_cache(case, cache, kernels)


def test_the_exact_tier_is_refused_by_name():
    case = BY_NAME["gqa-layers"]
    spec = CodecSpec(exact=True)
    span = spans_of(case)[0]
    with pytest.raises(SpecError, match="exact tier is not built yet"):
        encode(case.shape, spec, span, part(case, make_cache(case), span))
    with pytest.raises(SpecError, match="exact tier is not built yet"):
        segment_bounds(case.shape, spec, Segment(Tier.EXACT, span))


def test_unknown_kernels_are_refused():
    case = BY_NAME["gqa-layers"]
    with pytest.raises(SpecError, match="'numba' or 'reference'"):
        encode_cache(case, make_cache(case), "triton")


def test_arrays_that_do_not_fit_are_refused():
    case = BY_NAME["gqa-layers"]
    span = Span(Kind.K, 0, 1, 0, 128)
    good = np.zeros((1, 128, 16), np.uint16)
    for arrays in (
        [],
        [good, good],
        [good[:, :100]],
        [good.astype(np.float16)],
        [good.astype(np.float64)],
        [np.zeros((1, 16, 128), np.uint16).transpose(0, 2, 1)],
        [np.zeros((1, 128, 32), np.uint16)[:, :, ::2]],
    ):
        with pytest.raises(SpecError):
            encode(case.shape, case.spec, span, arrays)
    tiers = encode(case.shape, case.spec, span, [good])
    good.flags.writeable = False
    with pytest.raises(SpecError, match="read-only"):
        decode(case.shape, case.spec, span, tiers[Tier.ANCHOR], None, [good])


@pytest.mark.parametrize(
    "span",
    [Span(Kind.K, 0, 9, 0, 64), Span(Kind.K, 2, 2, 0, 64), Span(Kind.K, 0, 1, 64, 0), Span(Kind.K, 0, 1, 30, 150)],
)
def test_spans_that_do_not_fit_are_refused(span):
    case = BY_NAME["gqa-layers"]
    with pytest.raises(SpecError):
        segment_bounds(case.shape, case.spec, Segment(Tier.ANCHOR, span))


def test_small_or_read_only_out_buffers_are_refused():
    case = BY_NAME["gqa-layers"]
    span = spans_of(case)[0]
    arrays = part(case, make_cache(case), span)
    for room in (np.zeros(10, np.uint8), bytes(1 << 20), np.zeros(1 << 20, np.uint8)[1:]):
        with pytest.raises(SpecError, match="out for the anchor"):
            encode(case.shape, case.spec, span, arrays, out={Tier.ANCHOR: room})


@pytest.mark.parametrize("name", ["gqa-layers", "windows", "bits-per-kind-and-layer", "raw"])
def test_check_finds_any_flipped_bit_and_names_the_run(name):
    case = BY_NAME[name]
    for segment, data in encode_cache(case, make_cache(case), "numba").items():
        for at in range(0, len(data), max(1, len(data) // 40)):
            damaged = data.copy()
            damaged[at] ^= 1 << (at % 8)
            with pytest.raises(CorruptData, match=rf"{segment.tier.name.lower()}.*(layer \d+ head \d+|bytes expected)"):
                check(case.shape, case.spec, segment, damaged)


def test_check_names_the_layer_and_head_that_is_wrong():
    case = Case("x", layers(*[(2, 8, 8, 0, 128)] * 4), CodecSpec(recent=0), segment_tokens=512)
    for segment, data in encode_cache(case, make_cache(case), "numba").items():
        runs = 2 * (segment.span.last_layer - segment.span.first_layer)
        size = (len(data) - runs * 16) // runs
        for run in range(runs):
            damaged = data.copy()
            damaged[runs * 16 + run * size + 5] ^= 4
            where = f"{segment.span.kind.name} layer {segment.span.first_layer + run // 2} head {run % 2}"
            with pytest.raises(CorruptData, match=f"{where}: wrong checksum"):
                check(case.shape, case.spec, segment, damaged)


def test_swapped_runs_do_not_pass_the_check():
    case = Case("x", layers((2, 16, 16, 0, 128)), CodecSpec(recent=0), segment_tokens=512)
    for segment, data in encode_cache(case, make_cache(case), "numba").items():
        size = (len(data) - 32) // 2
        swapped = data.copy()
        swapped[:16], swapped[16:32] = data[16:32], data[:16]
        swapped[32 : 32 + size], swapped[32 + size :] = data[32 + size :], data[32 : 32 + size]
        with pytest.raises(CorruptData, match="head 0: wrong checksum"):
            check(case.shape, case.spec, segment, swapped)


def corrupt_target():
    case = Case("x", layers((2, 5, 70, 3, 203), (1, 5, 70, 64, 203), dtype="float32"), segment_tokens=512)
    return case, encode_cache(case, make_cache(case), "numba")


TARGET, ENCODED = corrupt_target()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_corrupt_bytes_end_in_corrupt_data_or_in_some_values(data):
    segment = data.draw(st.sampled_from(sorted(ENCODED, key=lambda s: (s.tier, s.span.kind))))
    bad = bytearray(ENCODED[segment].tobytes())
    how = data.draw(st.sampled_from(["flip", "cut", "grow", "noise", "directory"]))
    if how == "flip":
        for at in data.draw(st.lists(st.integers(0, len(bad) - 1), min_size=1, max_size=8)):
            bad[at] ^= data.draw(st.integers(1, 255))
    elif how == "cut":
        bad = bad[: data.draw(st.integers(0, len(bad) - 1))]
    elif how == "grow":
        bad += data.draw(st.binary(min_size=1, max_size=100))
    elif how == "noise":
        bad = bytearray(data.draw(st.binary(max_size=300)))
    else:
        at = 16 * data.draw(st.integers(0, 2))
        bad[at : at + 8] = data.draw(st.integers(0, 2**64 - 1)).to_bytes(8, "little")
    corrupt = {**ENCODED, segment: bytes(bad)}
    assume(bytes(bad) != ENCODED[segment].tobytes())
    with pytest.raises(CorruptData):
        check(TARGET.shape, TARGET.spec, segment, bytes(bad))
    for kernels in ("reference", "numba"):
        with contextlib.suppress(CorruptData):
            decode_cache(TARGET, corrupt, kernels)


def test_a_group_flagged_by_corruption_is_corrupt_data():
    case = Case("x", layers((1, 16, 16, 0, 64)), CodecSpec(recent=0, sinks=0))
    cache = make_cache(case)
    for kernels in ("reference", "numba"):
        data = encode_cache(case, cache, kernels)
        for segment in data:
            if segment.tier is Tier.ANCHOR:
                data[segment][16:18] = (0xC0, 0x7F)
        with pytest.raises(CorruptData, match="flagged"):
            decode_cache(case, data, kernels)


def test_flagged_values_are_within_the_segment_bounds():
    case = Case("x", layers((1, 16, 16, 0, 128), dtype="float32"), CodecSpec(recent=0, sinks=0), segment_tokens=512)
    values = np.full((1, 128, 16), 3e38, np.float32)
    values[:, ::2, ::2] = -3e38
    values[:, 1::2, 1::2] = -3e38
    cache = [dict.fromkeys(Kind, values.astype(CELL["float32"]))]
    data = encode_cache(case, cache, "numba")
    for segment, encoded in data.items():
        least, most = segment_bounds(case.shape, case.spec, segment)
        assert len(encoded) == (most if segment.tier is Tier.ANCHOR else least)
    decoded = decode_cache(case, data, "numba")
    assert all(decoded[0][kind].tobytes() == values.tobytes() for kind in Kind)
