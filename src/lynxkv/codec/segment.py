"""A segment's directory: written after encoding, verified before and on decoding."""

from itertools import accumulate
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from lynxkv.codec.layout import ENTRY, Geometry, LayerRuns, Run, directory, geometry, refuse_exact
from lynxkv.codec.plan import Segment
from lynxkv.codec.shape import CacheShape
from lynxkv.codec.spec import CodecSpec, Tier
from lynxkv.errors import CorruptData, SpecError

_WORD = (1 << 64) - 1


def as_bytes(data: Any) -> NDArray[np.uint8]:
    """Any buffer as a flat uint8 array, without a copy."""
    try:
        return np.frombuffer(data, np.uint8) if len(memoryview(data).cast("B")) else np.empty(0, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise SpecError(f"encoded bytes must be a contiguous buffer, got {type(data).__name__}: {error}") from error


def run_seed(tier: Tier, layer: int, run: Run) -> int:
    """The seed of the first head's checksum; head h's is more by ``8 * h``. All modulo 2^64.

    ``first row * 2^32 + layer * 2^16 + head * 2^3 + kind * 2^2 + tier``: bytes in another run's place do not pass.
    """
    return (run.rows.start << 32) + (layer << 16) + (run.kind << 2) + tier


def run_digests(tier: Tier, layer_run: LayerRuns, data: NDArray[np.uint8], edges: list[int], at: int) -> list[int]:
    """The xxh3_64 of each head's run; the first lies between ``edges[at]`` and the next edge."""
    layer, heads, run = layer_run
    seed, view = run_seed(tier, layer, run), data.data
    return [
        xxhash.xxh3_64_intdigest(view[edges[at + head] : edges[at + head + 1]], (seed + 8 * head) & _WORD)
        for head in range(heads)
    ]


def write_directory(tier: Tier, laid: Geometry, data: NDArray[np.uint8], sizes: list[int] | None = None) -> None:
    """Fill the directory of ``data``, whose runs are in place; ``sizes`` are given if a group is flagged."""
    edges = laid.edges[tier] if sizes is None else list(accumulate(sizes, initial=laid.total * ENTRY.itemsize))
    digests: list[int] = []
    for layer_run in laid.runs:
        digests += run_digests(tier, layer_run, data, edges, len(digests))
    entries = directory(data, laid.total)
    entries["size"] = laid.sizes[tier] if sizes is None else sizes
    entries["digest"] = digests


def locate(tier: Tier, laid: Geometry, data: NDArray[np.uint8]) -> list[int]:
    """Where each run of a segment starts, and the end of the last.

    Raises
    ------
    CorruptData
        If the directory is cut short, an entry's size cannot be, or bytes are missing or left over.
    """
    start = laid.total * ENTRY.itemsize
    if len(data) < start:
        raise CorruptData(f"{tier.name.lower()} segment: a directory of {start} bytes expected, got {len(data)} in all")
    stored = directory(data, laid.total)["size"]
    if len(data) == laid.edges[tier][-1] and (stored == laid.sizes[tier]).all():
        return laid.edges[tier]
    sizes: list[int] = stored.tolist()
    edges = [start]
    for layer, heads, run in laid.runs:
        least = run.size(tier)
        for head in range(heads):
            size = sizes[len(edges) - 1]
            if size != least:
                _check_longer(tier, run, layer, head, size)
            start += size
            if start > len(data):
                raise CorruptData(
                    f"{name(tier, run, layer, head)}: {size} bytes expected, {len(data) - edges[-1]} are there; "
                    "ask for the segment again"
                )
            edges.append(start)
    if start != len(data):
        raise CorruptData(f"{tier.name.lower()} segment: {start} bytes expected, got {len(data)}; ask for it again")
    return edges


def _check_longer(tier: Tier, run: Run, layer: int, head: int, size: int) -> None:
    """Raise CorruptData unless a run's size can be that of one with flagged groups."""
    least = run.size(tier)
    most = least + (run.flaggable_bytes if tier is Tier.ANCHOR else 0)
    if not least < size <= most or (size - least) % run.itemsize:
        raise CorruptData(
            f"{name(tier, run, layer, head)}: {least} to {most} bytes expected, the directory says {size}; ask for the "
            "segment again"
        )


def name(tier: Tier, run: Run, layer: int, head: int) -> str:
    """How messages call a run."""
    return f"{tier.name.lower()} of {run.kind.name} layer {layer} head {head}"


def check(shape: CacheShape, spec: CodecSpec, segment: Segment, data: Any) -> None:
    """Verify a segment's directory and every run's checksum.

    Parameters
    ----------
    data : buffer
        The segment's bytes.

    Raises
    ------
    CorruptData
        Naming tier, kind, layer and head of the first run that is not what the producer wrote.
    """
    refuse_exact(segment.tier)
    flat = as_bytes(data)
    laid = geometry(shape, spec, segment.span)
    edges = locate(segment.tier, laid, flat)
    stored: list[int] = directory(flat, laid.total)["digest"].tolist()
    at = 0
    for layer_run in laid.runs:
        layer, heads, run = layer_run
        for head, found in enumerate(run_digests(segment.tier, layer_run, flat, edges, at)):
            if found != stored[at + head]:
                raise CorruptData(f"{name(segment.tier, run, layer, head)}: wrong checksum; ask for the segment again")
        at += heads
