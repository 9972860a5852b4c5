"""The plan covers a cache once, in the order that serves drafting best."""

import numpy as np
import pytest
from cases import CASES, layers

from lynxkv.codec import BLOCK, Bits, CodecSpec, Kind, Tier, plan
from lynxkv.errors import SpecError

case_of = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@case_of
def test_anchor_covers_every_row_of_every_layer_once(case):
    for size in (1, 4096, 1 << 20):
        for kind in Kind:
            counts = [np.zeros(s.stop - s.start, int) for s in case.shape.layers]
            for segment in plan(case.shape, case.spec, segment_tokens=128, segment_bytes=size):
                if segment.tier is Tier.ANCHOR and segment.span.kind is kind:
                    for i in range(segment.span.first_layer, segment.span.last_layer):
                        rows, start = segment.span.rows(case.shape, case.spec, i), case.shape.layers[i].start
                        counts[i][rows.start - start : rows.stop - start] += 1
            for count, shape in zip(counts, case.shape.layers, strict=True):
                assert (count == (1 if shape.dim(kind) else 0)).all()


@case_of
def test_segments_start_and_stop_on_the_grid_or_at_the_end(case):
    for segment in plan(case.shape, case.spec, segment_tokens=128):
        assert segment.span.start % BLOCK == 0
        assert segment.span.stop % BLOCK == 0 or segment.span.stop == case.shape.stop


def test_order_is_anchor_by_token_range_then_residual_k_before_v():
    shape = layers((2, 16, 16, 0, 1000), (2, 16, 16, 0, 1000))
    segments = plan(shape, CodecSpec(), segment_tokens=256, segment_bytes=1)
    anchors = [s for s in segments if s.tier is Tier.ANCHOR]
    keys = [(s.span.start, s.span.kind, s.span.first_layer) for s in anchors]
    assert segments[: len(anchors)] == tuple(anchors)
    assert keys == sorted(keys)
    rest = [(s.tier, s.span.kind, s.span.start) for s in segments[len(anchors) :]]
    assert rest == sorted(rest)


def test_layers_without_residual_bits_have_no_residual_segment():
    shape = layers((1, 16, 16, 0, 500))
    segments = plan(shape, CodecSpec(k=Bits(4, 0), v=Bits(4, 4)))
    assert {s.span.kind for s in segments if s.tier is Tier.RESIDUAL} == {Kind.V}


def test_exact_segments_follow_when_the_spec_asks_for_them():
    segments = plan(layers((1, 16, 16, 0, 500)), CodecSpec(exact=True))
    assert [s.tier for s in segments] == sorted(s.tier for s in segments)
    assert segments[-1].tier is Tier.EXACT


@pytest.mark.parametrize("tokens", [0, 63, 100])
def test_segment_tokens_off_the_grid_are_refused(tokens):
    with pytest.raises(SpecError, match="multiple of 64"):
        plan(layers((1, 16, 16, 0, 500)), CodecSpec(), segment_tokens=tokens)
