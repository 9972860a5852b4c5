"""A segment's directory: written after encoding, verified before and on decoding."""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from lynxkv.codec.layout import ENTRY, LayerRuns, Run, directory, layer_runs, refuse_exact, runs_in
from lynxkv.codec.plan import Segment
from lynxkv.codec.shape import CacheShape
from lynxkv.codec.spec import CodecSpec, Tier
from lynxkv.errors import CorruptData, SpecError

_IDENTITY = struct.Struct("<BBIIQQ")


class Located(NamedTuple):
    """One run of a segment: whose it is and where its bytes lie."""

    layer: int
    head: int
    run: Run
    start: int
    stop: int
    digest: int


def as_bytes(data: Any) -> NDArray[np.uint8]:
    """Any buffer as a flat uint8 array, without a copy."""
    try:
        return np.frombuffer(data, np.uint8) if len(memoryview(data).cast("B")) else np.empty(0, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        raise SpecError(f"encoded bytes must be a contiguous buffer, got {type(data).__name__}: {error}") from error


def run_digest(tier: Tier, layer: int, head: int, run: Run, data: NDArray[np.uint8]) -> int:
    """xxh3_64 of a run, seeded by what it is, so that bytes in another run's place do not pass.

    The seed is the xxh3_64 of ``tier u8, kind u8, layer u32, head u32, first row u64, end row u64``, little-endian.
    """
    identity = _IDENTITY.pack(tier, run.kind, layer, head, run.rows.start, run.rows.stop)
    return xxhash.xxh3_64_intdigest(data.data, xxhash.xxh3_64_intdigest(identity))


def write_directory(tier: Tier, runs: list[LayerRuns], sizes: list[int], data: NDArray[np.uint8]) -> None:
    """Fill the directory of ``data``, whose runs are in place and have ``sizes``."""
    count = runs_in(runs)
    digests = []
    start = count * ENTRY.itemsize
    heads = ((layer, head, run) for layer, heads, run in runs for head in range(heads))
    for (layer, head, run), size in zip(heads, sizes, strict=True):
        digests.append(run_digest(tier, layer, head, run, data[start : start + size]))
        start += size
    entries = directory(data, count)
    entries["size"] = sizes
    entries["digest"] = digests


def locate(tier: Tier, runs: list[LayerRuns], data: NDArray[np.uint8]) -> Iterator[Located]:
    """The runs of a segment, each as soon as its size is known to be possible.

    Raises
    ------
    CorruptData
        If the directory is cut short, an entry's size cannot be, or bytes are missing or left over.
    """
    count = runs_in(runs)
    start = count * ENTRY.itemsize
    if len(data) < start:
        raise CorruptData(f"{tier.name.lower()} segment: a directory of {start} bytes expected, got {len(data)} in all")
    entries = directory(data, count)
    sizes, digests = entries["size"].tolist(), entries["digest"].tolist()
    at = 0
    for layer, heads, run in runs:
        least = run.size(tier)
        most = least + (run.flaggable_bytes if tier is Tier.ANCHOR else 0)
        for head in range(heads):
            size = sizes[at]
            if not least <= size <= most or (size - least) % run.itemsize or start + size > len(data):
                raise CorruptData(
                    f"{name(tier, run, layer, head)}: {least} to {most} bytes expected and {len(data) - start} are "
                    f"there, the directory says {size}; ask for the segment again"
                )
            yield Located(layer, head, run, start, start + size, digests[at])
            start += size
            at += 1
    if start != len(data):
        raise CorruptData(f"{tier.name.lower()} segment: {start} bytes expected, got {len(data)}; ask for it again")


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
    for layer, head, run, start, stop, digest in locate(
        segment.tier, list(layer_runs(shape, spec, segment.span)), flat
    ):
        if run_digest(segment.tier, layer, head, run, flat[start:stop]) != digest:
            raise CorruptData(f"{name(segment.tier, run, layer, head)}: wrong checksum; ask for the segment again")
