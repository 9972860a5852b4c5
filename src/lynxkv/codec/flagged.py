"""Groups that cannot be quantized: their range overflows float32, or their step is subnormal.

Their min and max hold a NaN pattern, their codes are zero, and their raw values follow the head's run in the anchor,
group by group. They are rare, so this is plain NumPy for all kernels.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lynxkv.codec.cells import CELL, FLAG, bit_pattern, widen
from lynxkv.codec.layout import Run
from lynxkv.codec.reference import flagged_elements
from lynxkv.codec.spec import BLOCK, Kind, Tier


def flagged_cells(run: Run, anchor: NDArray[np.uint8], values: NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of all flagged groups' elements of one head.

    Parameters
    ----------
    anchor : uint8 ndarray [run.size(ANCHOR)]
        The head's run.
    values : ndarray [rows, dim]
        The cache's elements.
    """
    parts = [
        np.ascontiguousarray(_by_group(run, _block(run, values, block)))[_by_group(run, elements)]
        for block, elements in _blocks(run, anchor)
    ]
    return np.frombuffer(b"".join(p.tobytes() for p in parts), np.uint8)


def restore_flagged(run: Run, anchor: NDArray[np.uint8], out: NDArray[Any], skip: int) -> None:
    """Write the raw values of flagged groups over what the kernel left there.

    Parameters
    ----------
    anchor : uint8 ndarray
        The head's run with the raw values behind it, of the right length.
    out : ndarray [rows, dim]
        Rows before ``skip`` are left alone.
    """
    cells = np.frombuffer(anchor[run.size(Tier.ANCHOR) :].tobytes(), CELL[run.dtype])
    at = 0
    for block, elements in _blocks(run, anchor):
        count = int(np.count_nonzero(elements))
        whole = np.empty((BLOCK, run.dim), cells.dtype)
        _by_group(run, whole)[_by_group(run, elements)] = cells[at : at + count]
        at += count
        first = run.head + block * BLOCK
        keep = elements & (np.arange(first, first + BLOCK) >= skip)[:, None]
        _block(run, out, block)[keep] = whole[keep] if out.dtype == whole.dtype else widen(whole[keep], run.dtype)


def _blocks(run: Run, anchor: NDArray[np.uint8]) -> list[tuple[int, NDArray[np.bool_]]]:
    """The blocks with flagged groups, and which elements ``[64, dim]`` are theirs."""
    stored = anchor[run.raw_bytes : run.size(Tier.ANCHOR)].reshape(run.blocks, run.block_bytes)
    least = np.ascontiguousarray(stored[:, : run.groups * run.itemsize]).view(CELL[run.dtype])
    elements = flagged_elements(run, bit_pattern(least) == FLAG[run.dtype])
    return [(int(block), elements[block]) for block in np.flatnonzero(elements.any(axis=(1, 2)))]


def _block(run: Run, rows: NDArray[Any], block: int) -> NDArray[Any]:
    start = run.head + block * BLOCK
    return rows[start : start + BLOCK]


def _by_group(run: Run, block: NDArray[Any]) -> NDArray[Any]:
    """A view of ``[64, dim]`` in which a group's elements follow one another."""
    return block.T if run.kind is Kind.K else block
