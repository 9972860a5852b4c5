"""Manifests: sane ones pass, nothing else does, and checking never costs more than it may."""

import contextlib
import dataclasses

import msgspec
import pytest
from hypothesis import given
from wire_cases import FINGERPRINT, make_manifest, manifests

from lynxkv.codec.plan import plan
from lynxkv.codec.shape import CacheShape, LayerShape
from lynxkv.codec.spec import Bits, CodecSpec, LayerBits, Tier
from lynxkv.errors import HandshakeRefused, LynxError, ProtocolError
from lynxkv.wire import Hello, Refused, check_manifest, compare, decode_event, encode_event, negotiate

replace = msgspec.structs.replace


@pytest.mark.parametrize("tokens", [0, 1, 15, 63, 64, 65, 95, 96, 200, 1001])
@pytest.mark.parametrize(
    "spec",
    [
        CodecSpec(),
        CodecSpec(raw=True),
        CodecSpec(Bits(8, 0), Bits(8, 0)),
        CodecSpec(exact=True),
        CodecSpec(Bits(4, 0), Bits(4, 4), overrides=(LayerBits(1, Bits(5, 3), Bits(4, 0)),)),
    ],
    ids=["4+4", "raw", "int8", "exact", "mixed"],
)
def test_every_plan_passes(tokens, spec):
    check_manifest(make_manifest(tokens, spec=spec))


def test_a_plan_with_sliding_windows_and_a_latent_layer_passes():
    shape = CacheShape("bfloat16", (LayerShape(2, 64, 0, 0, 700), LayerShape(1, 64, 64, 300, 700)))
    segments = plan(shape, CodecSpec())
    check_manifest(replace(make_manifest(700), shape=shape, segments=segments))


def test_the_order_of_segments_is_free():
    m = make_manifest()
    check_manifest(replace(m, segments=m.segments[::-1]))


def test_a_missing_segment_is_refused_by_tier_kind_and_layer():
    m = make_manifest()
    for i in range(len(m.segments)):
        with pytest.raises(ProtocolError, match=f"no segment holds some rows of {m.segments[i].tier.name.lower()}"):
            check_manifest(replace(m, segments=m.segments[:i] + m.segments[i + 1 :]))


def test_segments_that_overlap_are_refused():
    m = make_manifest()
    with pytest.raises(ProtocolError, match="same rows"):
        check_manifest(replace(m, segments=(*m.segments, m.segments[0])))


@pytest.mark.parametrize(
    "change",
    [{"last_layer": 3}, {"first_layer": -1}, {"start": 1}, {"stop": 1 << 40}, {"stop": 65}, {"first_layer": 2}],
)
def test_a_segment_that_does_not_fit_the_cache_is_refused(change):
    m = make_manifest()
    wrong = dataclasses.replace(m.segments[0], span=dataclasses.replace(m.segments[0].span, **change))
    with pytest.raises(ProtocolError, match=r"segment 0 .* does not fit"):
        check_manifest(replace(m, segments=(wrong, *m.segments[1:])))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": 1 << 40}, "tokens"),
        ({"tokens": 5}, "positions in the cache"),
        ({"stop": 1 << 60}, "stop"),
        ({"start": 9, "stop": 5}, "stop"),
        ({"generation": 1 << 64}, "generation"),
        ({"shape": CacheShape("bfloat16", (LayerShape(1 << 40, 64, 64, 0, 5),)), "stop": 0}, "kv_heads"),
        ({"shape": CacheShape("bfloat16", (LayerShape(1, 1 << 40, 64, 0, 5),)), "stop": 0}, "head_dim"),
        ({"shape": CacheShape("bfloat16", (LayerShape(1, 1, 1, 0, 5),) * 5000)}, "layers"),
        ({"spec": CodecSpec(overrides=(LayerBits(1 << 40, Bits(), Bits()),))}, "overrides"),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_name(change, message):
    with pytest.raises(ProtocolError, match=message):
        check_manifest(replace(make_manifest(), **change))


@given(manifest=manifests)
def test_any_manifest_passes_or_is_refused_and_its_sizes_are_known(manifest):
    try:
        check_manifest(manifest)
        for i in range(len(manifest.segments)):
            least, most = manifest.bounds(i)
            assert 0 <= least <= most
    except LynxError:
        pass


@given(manifest=manifests)
def test_any_manifest_survives_the_wire_or_is_refused(manifest):
    try:
        data = encode_event(manifest)
    except OverflowError:
        return
    with contextlib.suppress(ProtocolError):
        assert decode_event(data) == manifest


def test_more_segments_than_a_manifest_may_have_are_refused():
    m = make_manifest()
    with pytest.raises(ProtocolError, match="length"):
        decode_event(encode_event(replace(m, segments=m.segments[:1] * 70000)))


def test_a_producer_is_told_of_too_many_segments_before_its_peer_refuses_to_read_them():
    m = make_manifest()
    with pytest.raises(ProtocolError, match=r"at most 32768 segments \(use a larger chunk\) expected"):
        check_manifest(replace(m, segments=m.segments[:1] * (1 << 15) + m.segments))


def test_a_range_that_starts_inside_a_block_selects_the_segments_that_touch_it():
    m = make_manifest()
    selected = m.select(130, 131, (Tier.ANCHOR, Tier.RESIDUAL))
    assert {m.segments[i].span.start for i in selected} == {128}
    assert m.select(5, 5, (Tier.ANCHOR,)) == ()
    assert m.select(0, None, tuple(Tier)) == tuple(range(len(m.segments)))


@pytest.mark.parametrize("field", FINGERPRINT.__struct_fields__)
def test_a_fingerprint_that_differs_is_refused_by_field_and_both_values(field):
    """Field reports 7 and 9."""
    value = getattr(FINGERPRINT, field)
    other = {str: "other", int: 77, tuple: (77,)}[type(value)]
    theirs = replace(FINGERPRINT, **{field: other})
    with pytest.raises(HandshakeRefused) as e:
        compare(FINGERPRINT, theirs)
    for part in (f"fingerprint.{field}", f"ours {value}", f"theirs {other}"):
        assert part in str(e.value)


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [((1,), (1,), 1), ((1, 2), (1,), 1), ((2, 1), (3, 2), 2), ((1, 2), (2, 3), 2), ((1, 2), (1, 2), 2)],
)
def test_a_version_talks_to_the_one_before_it(ours, theirs, outcome):
    assert negotiate(Hello(role="a", versions=ours), Hello(role="b", versions=theirs)) == outcome


def test_versions_without_one_in_common_are_refused_with_both_lists():
    outcome = negotiate(Hello(role="a", versions=(3, 4)), Hello(role="b", versions=(1, 2)))
    assert outcome == Refused("versions", "[3, 4]", "[1, 2]")


def test_a_peer_without_a_model_fits_any():
    assert negotiate(Hello(role="router"), Hello(role="prefill", fingerprint=FINGERPRINT)) == 1


def test_a_field_of_a_newer_version_is_ignored():
    data = msgspec.msgpack.encode({"event": "cancel", "reason": "x", "later": [1, 2]})
    assert decode_event(data).reason == "x"
