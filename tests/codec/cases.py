"""The caches that codec tests walk, and how to make, encode and decode one.

Values come from an integer hash, so that they do not depend on the version of NumPy.
"""

from dataclasses import dataclass

import numpy as np

from lynxkv.codec import (
    Bits,
    CacheShape,
    CodecSpec,
    Kind,
    LayerBits,
    LayerShape,
    Segment,
    Tier,
    decode,
    encode,
    plan,
)

CELL = {"bfloat16": np.uint16, "float16": np.float16, "float32": np.float32}
MANTISSA = {"bfloat16": 7, "float16": 10, "float32": 23}
LEAST_EXPONENT = {"bfloat16": -126, "float16": -14, "float32": -126}


DEFAULT = CodecSpec()


@dataclass(frozen=True)
class Case:
    """A cache and how it is coded."""

    name: str
    shape: CacheShape
    spec: CodecSpec = DEFAULT
    segment_tokens: int = 128


def layers(*shapes, dtype="bfloat16"):
    return CacheShape(dtype, tuple(LayerShape(*s) for s in shapes))


TOKENS = (0, 1, 15, 63, 64, 65, 95, 96, 1001)
DIMS = (64, 80, 96, 128, 256)
WIDTHS = [Bits(4, 4), Bits(5, 3), Bits(4, 0), Bits(8, 0), Bits(8, 4), Bits(1, 8), Bits(3, 2), Bits(2, 1), Bits(7, 5)]

CASES = [
    *(Case(f"{n}-tokens", layers((2, 16, 16, 0, n)), segment_tokens=512) for n in TOKENS),
    *(Case(f"dim-{d}", layers((1, d, d, 0, 230))) for d in DIMS),
    *(Case(f"odd-dim-{d}", layers((1, d, d, 0, 230))) for d in (1, 7, 17, 40, 72)),
    *(Case(f"bits-{b.anchor}+{b.residual}", layers((1, 32, 80, 0, 230)), CodecSpec(k=b, v=b)) for b in WIDTHS),
    Case("gqa-layers", layers((1, 16, 16, 0, 200), (3, 16, 16, 0, 200), (2, 32, 16, 0, 200))),
    Case("k192-v128", layers((2, 192, 128, 0, 200))),
    Case("latent-without-v", layers((1, 96, 0, 0, 200), (1, 96, 0, 0, 200))),
    Case("windows", layers((2, 16, 16, 0, 411), (2, 16, 16, 300, 411), (2, 16, 16, 128, 411), (2, 16, 16, 411, 411))),
    Case("off-grid-start", layers((2, 16, 16, 2, 300), (1, 16, 16, 70, 201))),
    Case("no-raw-rows", layers((2, 16, 16, 0, 256)), CodecSpec(sinks=0, recent=0)),
    Case("block-of-sinks", layers((2, 16, 80, 0, 256)), CodecSpec(sinks=64)),
    Case("odd-sinks", layers((1, 16, 80, 0, 256)), CodecSpec(sinks=13)),
    Case("raw", layers((2, 16, 16, 0, 200)), CodecSpec(raw=True)),
    Case(
        "bits-per-kind-and-layer",
        layers((2, 16, 16, 0, 200), (2, 16, 16, 0, 200), (2, 16, 16, 0, 200)),
        CodecSpec(k=Bits(5, 3), v=Bits(4, 4), overrides=(LayerBits(1, Bits(8, 0), Bits(4, 0)),)),
    ),
    *(Case(dtype, layers((2, 16, 80, 0, 230), dtype=dtype)) for dtype in ("float16", "float32")),
    *(
        Case(f"{dtype}-wide", layers((1, 16, 80, 0, 230), dtype=dtype), CodecSpec(k=Bits(6, 4), v=Bits(8, 1)))
        for dtype in ("float16", "float32")
    ),
]
BY_NAME = {case.name: case for case in CASES}


def hashed(count, seed):
    """``count`` uint64, the splitmix64 of their index."""
    with np.errstate(over="ignore"):
        z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def to_cells(values, dtype):
    """float32 to elements of a cache, bfloat16 by truncation."""
    values = np.ascontiguousarray(values, np.float32)
    return (
        (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        if dtype == "bfloat16"
        else values.astype(CELL[dtype])
    )


def to_float(cells, dtype):
    """Elements of a cache as float64."""
    if dtype == "bfloat16" and cells.dtype == np.uint16:
        return (cells.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return cells.astype(np.float64)


def make_values(heads, rows, dim, dtype, seed):
    """``[heads, rows, dim]``: sums of four uniform numbers, some channels much larger than others."""
    parts = hashed(4 * heads * rows * dim, seed).reshape(heads, rows, dim, 4)
    total = (parts >> np.uint64(48)).astype(np.int64).sum(axis=-1) - 2 * 65536
    scale = 2.0 ** (hashed(dim, seed + 1) % np.uint64(7)).astype(np.float64) / 65536
    return to_cells(total * scale, dtype)


def make_cache(case, seed=1):
    """For each layer its K and V, ``[heads, rows, dim]``."""
    return [
        {
            kind: make_values(s.kv_heads, s.stop - s.start, s.dim(kind), case.shape.dtype, seed + 2 * i + kind)
            for kind in Kind
        }
        for i, s in enumerate(case.shape.layers)
    ]


def part(case, cache, span):
    """What `encode` takes and `decode` fills for a span."""
    parts = []
    for i in range(span.first_layer, span.last_layer):
        rows = span.rows(case.shape, case.spec, i)
        start = case.shape.layers[i].start
        parts.append(cache[i][span.kind][:, rows.start - start : rows.stop - start])
    return parts


def segments_of(case):
    return plan(case.shape, case.spec, segment_tokens=case.segment_tokens, segment_bytes=2048)


def spans_of(case):
    return [s.span for s in segments_of(case) if s.tier is Tier.ANCHOR]


def encode_cache(case, cache, kernels):
    """All segments of a cache."""
    data = {}
    for span in spans_of(case):
        for tier, encoded in encode(case.shape, case.spec, span, part(case, cache, span), kernels=kernels).items():
            data[Segment(tier, span)] = encoded
    return data


def decode_cache(case, data, kernels, *, tier=Tier.RESIDUAL, dtype=None, first=0):
    """The cache from its segments; elements that were not written are all ones in binary."""
    cell = np.dtype(dtype or CELL[case.shape.dtype])
    cache = [
        {
            kind: np.full((s.kv_heads, s.stop - s.start, s.dim(kind) * cell.itemsize), 0xFF, np.uint8).view(cell)
            for kind in Kind
        }
        for s in case.shape.layers
    ]
    for span in spans_of(case):
        fine = data.get(Segment(Tier.RESIDUAL, span)) if tier is Tier.RESIDUAL else None
        anchor = data[Segment(Tier.ANCHOR, span)]
        decode(case.shape, case.spec, span, anchor, fine, part(case, cache, span), first=first, kernels=kernels)
    return cache


def same_bits(one, other):
    """Whether two caches are the same, bit for bit."""
    return all(
        a[kind].dtype == b[kind].dtype and a[kind].tobytes() == b[kind].tobytes()
        for a, b in zip(one, other, strict=True)
        for kind in Kind
    )
