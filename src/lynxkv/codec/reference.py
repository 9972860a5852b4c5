"""The codec in NumPy. What these functions write and read *is* the format (docs/format.md).

Every operation on float32 is IEEE binary32, rounded half to even, in the order written here; no FMA.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lynxkv.codec.cells import CELL, FLAG, bit_pattern, is_finite, narrow, widen
from lynxkv.codec.layout import Run
from lynxkv.codec.spec import BLOCK, Kind, Tier

TINY = np.float32(2.0**-126)
"""The least step of a group that is coded; a smaller one is subnormal."""


def encode_layer(
    run: Run, values: NDArray[Any], anchor: NDArray[np.uint8], residual: NDArray[np.uint8] | None
) -> tuple[bool, bool]:
    """Encode all heads of a layer.

    Parameters
    ----------
    run : Run
        Their common geometry.
    values : ndarray [heads, rows, dim]
        The cache's elements.
    anchor, residual : uint8 ndarray [heads, run.size(tier)]
        Written whole; the raw values of flagged groups are not part of it. No residual: None.

    Returns
    -------
    (finite, flagged)
        Whether every element is finite (if not, what was written is worthless), and whether any group is flagged.
    """
    finite, flagged = True, False
    for head in range(values.shape[0]):
        cells = values[head]
        if not is_finite(cells, run.dtype).all():
            finite = False
            continue
        raw = np.concatenate(
            [cells[: run.head], cells[run.head : run.head + run.sinks], cells[len(cells) - run.tail :]]
        )
        anchor[head, : run.raw_bytes] = np.frombuffer(raw.tobytes(), np.uint8)
        if run.blocks:
            flagged |= _encode_blocks(run, cells, anchor[head], None if residual is None else residual[head])
    return finite, flagged


def decode_layer(
    run: Run, anchor: NDArray[np.uint8], residual: NDArray[np.uint8] | None, out: NDArray[Any], skip: int
) -> NDArray[np.int64]:
    """Decode all heads of a layer; rows before ``skip`` are left alone, groups that are flagged come out as garbage.

    Parameters
    ----------
    run : Run
        Their common geometry.
    anchor, residual : uint8 ndarray [heads, run.size(tier)]
        Without a residual the values have anchor precision.
    out : ndarray [heads, rows, dim]
        The cache's elements, or float32.

    Returns
    -------
    int64 ndarray [heads]
        Flagged elements of each head, in all blocks.
    """
    flagged = np.zeros(out.shape[0], np.int64)
    for head in range(out.shape[0]):
        cells = np.empty(out.shape[1:], CELL[run.dtype])
        raw = np.frombuffer(anchor[head, : run.raw_bytes].tobytes(), CELL[run.dtype]).reshape(-1, run.dim)
        if run.blocks:
            flagged[head] = _decode_blocks(run, anchor[head], None if residual is None else residual[head], cells)
        cells[: run.head + run.sinks] = raw[: run.head + run.sinks]
        cells[len(cells) - run.tail :] = raw[run.head + run.sinks :]
        kept = cells[skip:]
        out[head, skip:] = kept if out.dtype == kept.dtype else widen(kept, run.dtype)
    return flagged


def pack(codes: NDArray[np.uint8], width: int) -> NDArray[np.uint8]:
    """Codes ``[blocks, 64, dim]`` of ``width`` bits as bytes ``[blocks, 8 * width * dim]``.

    4 bits: byte ``[t / 2, c]`` has the even token's code in its low half and the odd one's in its high half.
    8 bits: byte ``[t, c]``. Other widths: bit-planes ``[p, t / 8, c]``, where bit ``t % 8`` is bit ``p`` of the code.
    """
    blocks, _, dim = codes.shape
    if width == 4:
        codes = codes[:, 0::2] | (codes[:, 1::2] << np.uint8(4))
    elif width != 8:
        planes = (codes[:, None] >> np.arange(width, dtype=np.uint8)[None, :, None, None]) & np.uint8(1)
        codes = np.packbits(planes, axis=2, bitorder="little")
    return codes.reshape(blocks, 8 * width * dim)


def unpack(data: NDArray[np.uint8], width: int, dim: int) -> NDArray[np.uint8]:
    """The inverse of `pack`."""
    blocks = data.shape[0]
    if width == 8:
        return data.reshape(blocks, BLOCK, dim)
    if width == 4:
        halves = data.reshape(blocks, BLOCK // 2, 1, dim)
        return np.concatenate([halves & np.uint8(15), halves >> np.uint8(4)], axis=2).reshape(blocks, BLOCK, dim)
    planes = np.unpackbits(data.reshape(blocks, width, BLOCK // 8, dim), axis=2, bitorder="little")
    codes = planes << np.arange(width, dtype=np.uint8)[None, :, None, None]
    result: NDArray[np.uint8] = np.bitwise_or.reduce(codes, axis=1)
    return result


def _encode_blocks(
    run: Run, cells: NDArray[Any], anchor: NDArray[np.uint8], residual: NDArray[np.uint8] | None
) -> bool:
    coded = np.ascontiguousarray(cells[run.head : run.head + run.blocks * BLOCK]).reshape(-1, BLOCK, run.dim)
    least, most = _extremes(run, coded)
    low, high = widen(least, run.dtype), widen(most, run.dtype)
    steps, half = run.bits.steps, (1 << run.bits.residual) >> 1
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        step = (high - low) / np.float32(steps)
        constant = high == low
        flag = ~constant & ~((step >= TINY) & (step < np.inf))
        q = np.rint((widen(coded, run.dtype) - _spread(run, low)) / _spread(run, step))
    q = np.where(_spread(run, constant), steps, q)
    zero = _spread(run, flag) | (_sinks(run)[:, :, None])
    shifted = np.where(zero, 0, q + half).astype(np.uint16)
    codes = (shifted >> np.uint16(run.bits.residual)).astype(np.uint8)
    for edge in (least, most):
        bit_pattern(edge)[flag] = FLAG[run.dtype]
    meta = np.concatenate([least, most], axis=1).view(np.uint8)
    blocks = np.concatenate([meta, pack(codes, run.bits.anchor)], axis=1)
    anchor[run.raw_bytes :] = blocks.reshape(-1)
    if residual is not None:
        fine = (shifted & np.uint16((1 << run.bits.residual) - 1)).astype(np.uint8)
        residual[:] = pack(fine, run.bits.residual).reshape(-1)
    return bool(flag.any())


def _decode_blocks(run: Run, anchor: NDArray[np.uint8], residual: NDArray[np.uint8] | None, cells: NDArray[Any]) -> int:
    blocks = anchor[run.raw_bytes : run.size(Tier.ANCHOR)].reshape(run.blocks, run.block_bytes)
    meta = np.ascontiguousarray(blocks[:, : run.meta_bytes]).view(CELL[run.dtype])
    least, most = meta[:, : run.groups], meta[:, run.groups :]
    low, high = widen(least, run.dtype), widen(most, run.dtype)
    steps = run.bits.steps
    k = unpack(blocks[:, run.meta_bytes :], run.bits.anchor, run.dim).astype(np.int32) << run.bits.residual
    if residual is not None:
        fine = unpack(residual.reshape(run.blocks, -1), run.bits.residual, run.dim).astype(np.int32)
        k = k + fine - (1 << (run.bits.residual - 1))
    # No encoder writes codes that give less than 0 steps; if they come, they wrap as in a byte or a word.
    k &= 0xFF if run.bits.anchor + run.bits.residual <= 8 else 0xFFFF
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        step = (high - low) / np.float32(steps)
        decoded = _spread(run, low) + k.astype(np.float32) * _spread(run, step)
    decoded = np.where(k == steps, _spread(run, high), decoded)
    cells[run.head : run.head + run.blocks * BLOCK] = narrow(decoded, run.dtype).reshape(-1, run.dim)
    return int(np.count_nonzero(flagged_elements(run, bit_pattern(least) == FLAG[run.dtype])))


def flagged_elements(run: Run, flag: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which elements ``[blocks, 64, dim]`` belong to flagged groups ``[blocks, groups]``; sinks never do."""
    return np.asarray(_spread(run, flag) & ~_sinks(run)[:, :, None])


def _extremes(run: Run, coded: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Each group's min and max ``[blocks, groups]`` in the order -0 < +0; zero where a group has no element."""
    bits = bit_pattern(coded)
    signed: NDArray[Any] = bits.view(np.int16 if bits.itemsize == 2 else np.int32)
    width = 8 * bits.itemsize - 1
    # Flipping the magnitude of negatives makes integer order the order of the numbers; it is its own inverse.
    key = signed ^ ((signed >> width) & ((1 << width) - 1))
    void = np.broadcast_to(_sinks(run)[:, :, None], key.shape)
    info = np.iinfo(key.dtype)
    edges = []
    for reduce, neutral in ((np.minimum, info.max), (np.maximum, info.min)):
        masked = np.where(void, key.dtype.type(neutral), key)
        if run.kind is Kind.K:
            edge = reduce.reduce(masked, axis=1)
            absent = void.all(axis=1)
        else:
            edge = reduce.reduceat(masked, np.arange(0, run.dim, BLOCK), axis=2).reshape(len(key), -1)
            absent = void[:, :, ::BLOCK].reshape(len(key), -1)
        edge = np.where(absent, key.dtype.type(0), edge)
        edges.append((edge ^ ((edge >> width) & ((1 << width) - 1))).view(CELL[run.dtype]))
    return edges[0], edges[1]


def _spread(run: Run, per_group: NDArray[Any]) -> NDArray[Any]:
    """Per-group values ``[blocks, groups]`` for every element ``[blocks, 64 or 1, dim]``."""
    if run.kind is Kind.K:
        return per_group[:, None, :]
    return np.repeat(per_group.reshape(len(per_group), BLOCK, -1), BLOCK, axis=2)[:, :, : run.dim]


def _sinks(run: Run) -> NDArray[np.bool_]:
    """Which tokens ``[blocks, 64]`` are sinks."""
    sink = np.zeros((run.blocks, BLOCK), np.bool_)
    if run.sinks:
        sink[0, : run.sinks] = True
    return sink
