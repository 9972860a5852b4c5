"""How fast the codec is on one core, as a part of the speed of `memcpy`.

Method. A BF16 cache of ``--megabytes`` of K and as much V (8 KV heads, 4+4 bits, 32k tokens) is cut by `plan` and
goes through `encode` (NaN check and checksums included), `decode` of the anchor, and `decode` of anchor and residual,
segment by segment and into buffers that exist. Segments are large, so that the arithmetic counts and not the few
microseconds that Python takes for a layer; ``--segment-tokens 512`` shows those too. In every round each operation is
timed once, between two copies of the same BF16 bytes; its ratio is (time of a copy) / (its own time), the copy's time
being the mean of the two. The median over rounds counts. "combined" puts K and V together. The bars are for the least
of K, V and combined, at head_dim 64 and 128.
"""

import argparse
import json
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from lynxkv.codec import (
    CacheShape,
    CodecSpec,
    Kind,
    LayerShape,
    Segment,
    Span,
    Tier,
    decode,
    encode,
    plan,
    segment_bounds,
)

BARS = {"encode": 0.25, "decode_anchor": 0.5, "decode_both": 0.4}
HEADS = 8
TOKENS = 32768


def make_layer(dim: int, seed: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """BF16 values with outlier channels, as K caches have them."""
    rng = np.random.default_rng(seed)
    scale = np.exp(rng.standard_normal(dim)).astype(np.float32)
    x = rng.standard_normal((HEADS, TOKENS, dim), np.float32) * scale
    return (x.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def measure(kind: Kind, dim: int, megabytes: int, rounds: int, tokens: int) -> dict[str, dict[str, float]]:
    """Seconds and ratio of each operation over one tensor kind."""
    layer_bytes = HEADS * TOKENS * dim * 2
    count = -(-megabytes * 1_000_000 // layer_bytes)
    shape = CacheShape("bfloat16", (LayerShape(HEADS, dim, dim, 0, TOKENS),) * count)
    spec = CodecSpec()
    source = np.stack([make_layer(dim, 17 * i + kind) for i in range(count)])
    target = np.empty_like(source)
    target[:] = 0
    spans = [s.span for s in plan(shape, spec, segment_tokens=tokens) if s.tier is Tier.ANCHOR and s.span.kind is kind]
    room = {
        span: {
            tier: np.zeros(segment_bounds(shape, spec, Segment(tier, span))[0], np.uint8)
            for tier in (Tier.ANCHOR, Tier.RESIDUAL)
        }
        for span in spans
    }

    def part(cache: Any, span: Span) -> list[Any]:
        return [cache[i, :, span.start : span.stop] for i in range(span.first_layer, span.last_layer)]

    encoded: dict[Span, dict[Tier, Any]] = {}

    def run_encode() -> None:
        for span in spans:
            encoded[span] = encode(shape, spec, span, part(source, span), out=room[span])

    def run_decode(both: bool) -> None:
        for span in spans:
            tiers = encoded[span]
            residual = tiers.get(Tier.RESIDUAL) if both else None
            decode(shape, spec, span, tiers[Tier.ANCHOR], residual, part(target, span))

    work: dict[str, Callable[[], None]] = {
        "encode": run_encode,
        "decode_anchor": lambda: run_decode(False),
        "decode_both": lambda: run_decode(True),
    }

    def copy() -> None:
        np.copyto(target, source)

    for warm in (*work.values(), copy):
        warm()
    times: dict[str, list[float]] = {name: [] for name in work}
    ratios: dict[str, list[float]] = {name: [] for name in work}
    copies: list[float] = []
    for _ in range(rounds):
        for name, operation in work.items():
            before, own, after = timed(copy), timed(operation), timed(copy)
            copies += [before, after]
            times[name].append(own)
            ratios[name].append((before + after) / 2 / own)
    result = {
        name: {"seconds": statistics.median(times[name]), "ratio": statistics.median(ratios[name])} for name in work
    }
    result["memcpy"] = {
        "seconds": statistics.median(copies),
        "gbytes_per_s": source.nbytes / statistics.median(copies) / 1e9,
    }
    return result


def timed(operation: Callable[[], None]) -> float:
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=268, help="BF16 bytes of each tensor kind")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--segment-tokens", type=int, default=8192, help="tokens of a segment; plan()'s default is 512")
    parser.add_argument("--dims", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--json", action="store_true", help="print one object")
    options = parser.parse_args()

    figures: list[dict[str, Any]] = []
    for dim in options.dims:
        kinds = {
            kind.name: measure(kind, dim, options.megabytes, options.rounds, options.segment_tokens) for kind in Kind
        }
        copy = sum(k["memcpy"]["seconds"] for k in kinds.values())
        row: dict[str, Any] = {"head_dim": dim, **{name: kinds[name] for name in kinds}}
        row["combined"] = {name: copy / sum(k[name]["seconds"] for k in kinds.values()) for name in BARS}
        row["least"] = {name: min(row["combined"][name], *(k[name]["ratio"] for k in kinds.values())) for name in BARS}
        figures.append(row)
    ok = all(row["least"][name] >= bar for row in figures for name, bar in BARS.items())
    result = {
        "megabytes": options.megabytes,
        "rounds": options.rounds,
        "segment_tokens": options.segment_tokens,
        "bars": BARS,
        "figures": figures,
        "ok": ok,
    }
    if options.json:
        print(json.dumps(result))
        return
    print(f"{'head_dim':>8} {'':>9} {'memcpy GB/s':>12} {'encode':>8} {'anchor':>8} {'both':>8}   (ratio to memcpy)")
    for row in figures:
        for name in ("K", "V"):
            ratios = "".join(f" {row[name][op]['ratio']:8.3f}" for op in BARS)
            print(f"{row['head_dim']:>8} {name:>9} {row[name]['memcpy']['gbytes_per_s']:12.2f}{ratios}")
        for name in ("combined", "least"):
            print(f"{row['head_dim']:>8} {name:>9} {'':>12}" + "".join(f" {row[name][op]:8.3f}" for op in BARS))
    print(f"{'bar':>8} {'':>9} {'':>12}" + "".join(f" {bar:8.3f}" for bar in BARS.values()))
    print("ok" if ok else "NOT ok")


if __name__ == "__main__":
    main()
