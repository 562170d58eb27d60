"""Few-bit codes in Triton: the twin of reference_codes.py. A warp treats a tile; see NOTE [Tiles of codes], codes.py."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimgrad.kernels import geometry, reference_codes
from slimgrad.kernels.codes import Buckets, check_codes, check_floating, code_bytes, tiles_of
from slimgrad.kernels.geometry import Layout, check_dense
from slimgrad.kernels.halves import HALVES, above, has_pairs
from slimgrad.kernels.launch import ByLaunches, Launch
from slimgrad.kernels.tiles import LANES, ROUNDS, TILE, float32

WARPS = 1
TURNS = 2
REGISTERS = 64
WORD_BYTES = 4

COMPARED = (torch.float32, torch.bfloat16, torch.float16)
"""What is compared in float32. Double precision: the reference."""

MOST_IN_REGISTERS = tl.constexpr(4)
"""Bits whose borders are chosen between in registers; more are looked up."""


@lru_cache(maxsize=4096)
def packer(layout: Layout, buckets: Buckets) -> ByLaunches | None:
    if layout.dtype not in COMPARED:
        return None
    n, device = math.prod(layout.shape), layout.device
    values = torch.tensor(buckets.values, dtype=torch.float64).to(layout.dtype).to(device)
    packing, wide = (
        launch(_pack_kernel, n, *how, constants=(borders_on(buckets, layout.dtype, device),), turns=TURNS)
        for how in ways(buckets, layout.dtype, device)
    )
    unpacking = launch(_unpack_kernel, n, buckets.bits, constants=(values,))
    return ByLaunches(layout, code_bytes(n, buckets.bits), packing, unpacking, wide, WORD_BYTES)


def launch(kernel: Any, n: int, *how: Any, constants: tuple[Tensor, ...], turns: int = 1) -> Launch:
    """Of a kernel whose programs take `turns` tiles per warp of n elements."""
    programs = triton.cdiv(tiles_of(n), WARPS * turns)
    args = (n, tiles_of(n), *how, WARPS * geometry.THREADS, turns)
    return Launch(kernel, programs, *args, constants=constants, num_warps=WARPS, maxnreg=REGISTERS)


def ways(buckets: Buckets, dtype: torch.dtype, device: torch.device) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What the kernels want to know: one element at a time, and two where that is possible and words are aligned."""
    pairs = has_pairs(dtype, device) and buckets.bits <= MOST_IN_REGISTERS.value and buckets.centre == 0.0
    how = (buckets.centre, buckets.absolute, buckets.bits)
    return (*how, False), (*how, pairs)


def borders_on(buckets: Buckets, dtype: torch.dtype, device: torch.device) -> Tensor:
    """The borders, in single precision and then, for 16-bit floats, as words of two of those."""
    borders = torch.tensor(buckets.borders, dtype=torch.float32)
    if dtype in HALVES:
        low = _rounded_down(borders, dtype).view(torch.int16).to(torch.int32) & 0xFFFF
        borders = torch.cat([borders, (low | low << 16).view(torch.float32)])
    return borders.to(device)


def _rounded_down(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest numbers of `dtype` that are not above: a number of that type is above both or above neither."""
    near = x.to(dtype)
    below = torch.nextafter(near, torch.full_like(near, -math.inf))
    return torch.where(near > x, below, near)


def pack_codes(x: Tensor, buckets: Buckets) -> Tensor:
    check_floating(x)
    check_dense("pack_codes", x)
    made = packer(Layout(x.shape, x.stride(), x.dtype, x.device), buckets)
    return reference_codes.pack_codes(x, buckets) if made is None else made.pack(x)


def unpack_codes(
    packed: Tensor, shape: Sequence[int], stride: Sequence[int], buckets: Buckets, dtype: torch.dtype
) -> Tensor:
    check_codes(packed, math.prod(shape), buckets.bits)
    made = packer(Layout(torch.Size(shape), tuple(stride), dtype, packed.device), buckets)
    if made is None:
        return reference_codes.unpack_codes(packed, shape, stride, buckets, dtype)
    return made.unpack(packed)


@triton.jit
def _code_1(x, t0):
    return tl.where(x <= t0, 0, 1)


@triton.jit
def _code_2(x, t0, t1, t2):
    low = x <= t1
    return tl.where(low, 0, 2) + _code_1(x, tl.where(low, t0, t2))


@triton.jit
def _code_3(x, t0, t1, t2, t3, t4, t5, t6):
    """Three comparisons and four choices, where seven comparisons would take longer than the memory does."""
    low = x <= t3
    return tl.where(low, 0, 4) + _code_2(x, tl.where(low, t0, t4), tl.where(low, t1, t5), tl.where(low, t2, t6))


@triton.jit
def _code_4(x, t_ptr):
    low = x <= tl.load(t_ptr + 7)
    return tl.where(low, 0, 8) + _code_3(
        x,
        tl.where(low, tl.load(t_ptr + 0), tl.load(t_ptr + 8)),
        tl.where(low, tl.load(t_ptr + 1), tl.load(t_ptr + 9)),
        tl.where(low, tl.load(t_ptr + 2), tl.load(t_ptr + 10)),
        tl.where(low, tl.load(t_ptr + 3), tl.load(t_ptr + 11)),
        tl.where(low, tl.load(t_ptr + 4), tl.load(t_ptr + 12)),
        tl.where(low, tl.load(t_ptr + 5), tl.load(t_ptr + 13)),
        tl.where(low, tl.load(t_ptr + 6), tl.load(t_ptr + 14)),
    )


@triton.jit
def _code_of(x, t_ptr, BITS: tl.constexpr):
    """The code of each x (float32) between the borders at t_ptr."""
    if BITS == 1:
        code = _code_1(x, tl.load(t_ptr))
    elif BITS == 2:
        code = _code_2(x, tl.load(t_ptr), tl.load(t_ptr + 1), tl.load(t_ptr + 2))
    elif BITS == 3:
        code = _code_3(
            x,
            tl.load(t_ptr),
            tl.load(t_ptr + 1),
            tl.load(t_ptr + 2),
            tl.load(t_ptr + 3),
            tl.load(t_ptr + 4),
            tl.load(t_ptr + 5),
            tl.load(t_ptr + 6),
        )
    elif BITS == MOST_IN_REGISTERS:
        code = _code_4(x, t_ptr)
    else:  # by halves, each time a look at a border that lies in the nearest cache
        code = tl.zeros_like(x).to(tl.int32)
        for level in tl.static_range(BITS):
            middle = code + ((1 << (BITS - 1 - level)) - 1)
            code = tl.where(x <= tl.load(t_ptr + middle), code, middle + 1)
    return code


# --- tiles: four rounds of [threads, lanes] elements, or [threads, lanes / 2] words of two ------------------------------
#
# Rounds are tensors of their own: of one tensor [rounds, threads, lanes], some versions of Triton spread the rounds over
# threads, and sums over lanes then cross them.


@triton.jit
def is_whole(n, THREADS: tl.constexpr, TURNS: tl.constexpr):
    """Whether all elements of the program's tiles exist. Those programs ask for no element whether it does: the asking
    took a third of their instructions.
    """
    return (tl.program_id(0) + 1).to(tl.int64) * (TURNS * THREADS * ROUNDS * LANES) <= n


@triton.jit
def _cells(block, round: tl.constexpr, THREADS: tl.constexpr):
    """Where in memory the elements of a round lie. A block is a tile for each warp."""
    thread = tl.arange(0, THREADS)[:, None]
    row = (block.to(tl.int64) * (THREADS // 32) + thread // 32) * (TILE // LANES) + round * 32 + thread % 32
    return row * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _words(block, round: tl.constexpr, THREADS: tl.constexpr):
    """The same of their words."""
    thread = tl.arange(0, THREADS)[:, None]
    row = (block.to(tl.int64) * (THREADS // 32) + thread // 32) * (TILE // LANES) + round * 32 + thread % 32
    return row * (LANES // 2) + tl.arange(0, LANES // 2)[None, :]


@triton.jit
def _load_cells(ptr, block, round: tl.constexpr, n, THREADS: tl.constexpr, WHOLE: tl.constexpr, PAIRS: tl.constexpr):
    if WHOLE and PAIRS:
        x = tl.load(ptr.to(tl.pointer_type(tl.uint32)) + _words(block, round, THREADS))
    elif WHOLE:
        x = tl.load(ptr + _cells(block, round, THREADS))
    else:
        cell = _cells(block, round, THREADS)
        x = tl.load(ptr + cell, mask=cell < n, other=0.0)
    return x


@triton.jit
def load_block(ptr, block, n, THREADS: tl.constexpr, WHOLE: tl.constexpr, PAIRS: tl.constexpr):
    """Its four rounds: words of two elements with PAIRS, if all exist; single elements else."""
    return (
        _load_cells(ptr, block, 0, n, THREADS, WHOLE, PAIRS),
        _load_cells(ptr, block, 1, n, THREADS, WHOLE, PAIRS),
        _load_cells(ptr, block, 2, n, THREADS, WHOLE, PAIRS),
        _load_cells(ptr, block, 3, n, THREADS, WHOLE, PAIRS),
    )


@triton.jit
def store_cells(
    ptr,
    values,
    block,
    round: tl.constexpr,
    n,
    THREADS: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """A round, as it was loaded."""
    if WHOLE and PAIRS:
        tl.store(ptr.to(tl.pointer_type(tl.uint32)) + _words(block, round, THREADS), values)
    elif WHOLE:
        tl.store(ptr + _cells(block, round, THREADS), values)
    else:
        cell = _cells(block, round, THREADS)
        tl.store(ptr + cell, values, mask=cell < n)


@triton.jit
def _nibbles():
    """Where in a row's word the codes of its elements begin: those with even numbers first."""
    lane = tl.arange(0, LANES)[None, :]
    return (lane % 2) * 16 + (lane // 2) * 4


@triton.jit
def _row_of_pairs(words, t_ptr, ABSOLUTE: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr):
    """The codes of two elements a word: each border adds -1 to the half that lies above it.

    A carry out of the lower half takes 1 from the upper one, once per count; times -65537 undoes that and the sign.
    """
    BORDERS: tl.constexpr = (1 << BITS) - 1
    if ABSOLUTE:
        words = words & 0x7FFF7FFF
    counted = tl.zeros_like(words)
    for border in tl.static_range(BORDERS):
        counted += above(words, tl.load(t_ptr + BORDERS + border).to(tl.uint32, bitcast=True), HALF)
    places = tl.arange(0, LANES // 2)[None, :] * 4
    return (tl.sum(counted << places, 1) * 0xFFFEFFFF).to(tl.int32, bitcast=True)


@triton.jit
def _code_row(
    x, t_ptr, centre, ABSOLUTE: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr
):
    """A word per row with the low four bits of its codes, and one with the others."""
    if PAIRS:
        low = _row_of_pairs(x, t_ptr, ABSOLUTE, BITS, HALF)
        high = low
    else:
        at = float32(x)
        if ABSOLUTE:
            at = tl.abs(at - centre)
        code = _code_of(at, t_ptr, BITS)
        low = tl.sum((code & 15) << _nibbles(), 1)
        high = tl.sum((code >> 4) << _nibbles(), 1)
    return low, high


@triton.jit
def _word(ptr, block, number: tl.constexpr, BITS: tl.constexpr, THREADS: tl.constexpr):
    """Where a word of each thread lies, and in which tile."""
    thread = tl.arange(0, THREADS)
    tile = block * (THREADS // 32) + thread // 32
    return ptr.to(tl.pointer_type(tl.int32)) + (tile.to(tl.int64) * BITS + number) * 32 + thread % 32, tile


@triton.jit
def _store_word(
    ptr, word, block, tiles, number: tl.constexpr, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr
):
    place, tile = _word(ptr, block, number, BITS, THREADS)
    if WHOLE:
        tl.store(place, word)
    else:
        tl.store(place, word, mask=tile < tiles)


@triton.jit
def _load_word(
    ptr, block, tiles, number: tl.constexpr, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr
):
    place, tile = _word(ptr, block, number, BITS, THREADS)
    if WHOLE:  # noqa: SIM108
        word = tl.load(place)
    else:
        word = tl.load(place, mask=tile < tiles, other=0)
    return word


@triton.jit
def _store_plane(
    ptr,
    rows,
    block,
    tiles,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    THREADS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """WIDTH bits of every code: 4 / WIDTH rows share a word."""
    SHARE: tl.constexpr = 4 // WIDTH
    MASK: tl.constexpr = 0x11111111 * ((1 << WIDTH) - 1) if WIDTH < 4 else -1
    for number in tl.static_range(WIDTH):
        word = (rows[number * SHARE] >> (SHIFT % 4)) & MASK
        for turn in tl.static_range(1, SHARE):
            word |= ((rows[number * SHARE + turn] >> (SHIFT % 4)) & MASK) << (turn * WIDTH)
        _store_word(ptr, word, block, tiles, SHIFT + number, BITS, THREADS, WHOLE)


@triton.jit
def _store_codes(
    ptr, low, high, block, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr
):
    """The planes of four rows of codes, as PLANES in codes.py lists them."""
    TWO: tl.constexpr = BITS & 2
    if BITS < 4:
        if TWO:
            _store_plane(ptr, low, block, tiles, 0, 2, BITS, THREADS, WHOLE)
        if BITS & 1:
            _store_plane(ptr, low, block, tiles, TWO, 1, BITS, THREADS, WHOLE)
    else:
        _store_plane(ptr, low, block, tiles, 0, 4, BITS, THREADS, WHOLE)
        if BITS == 8:
            _store_plane(ptr, high, block, tiles, 4, 4, BITS, THREADS, WHOLE)
        if TWO:
            _store_plane(ptr, high, block, tiles, 4, 2, BITS, THREADS, WHOLE)
        if BITS & 1:
            _store_plane(ptr, high, block, tiles, 4 + TWO, 1, BITS, THREADS, WHOLE)


@triton.jit
def load_words(ptr, block, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr):
    """All words of a block's codes: as many as bits, and the first one again up to eight."""
    first = _load_word(ptr, block, tiles, 0, BITS, THREADS, WHOLE)
    return (
        first,
        _load_word(ptr, block, tiles, 1, BITS, THREADS, WHOLE) if BITS > 1 else first,
        _load_word(ptr, block, tiles, 2, BITS, THREADS, WHOLE) if BITS > 2 else first,
        _load_word(ptr, block, tiles, 3, BITS, THREADS, WHOLE) if BITS > 3 else first,
        _load_word(ptr, block, tiles, 4, BITS, THREADS, WHOLE) if BITS > 4 else first,
        _load_word(ptr, block, tiles, 5, BITS, THREADS, WHOLE) if BITS > 5 else first,
        _load_word(ptr, block, tiles, 6, BITS, THREADS, WHOLE) if BITS > 6 else first,
        _load_word(ptr, block, tiles, 7, BITS, THREADS, WHOLE) if BITS > 7 else first,
    )


@triton.jit
def _row_part(words, round: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """The bits of one plane, where they belong in the nibbles of a row."""
    SHARE: tl.constexpr = 4 // WIDTH
    MASK: tl.constexpr = 0x11111111 * ((1 << WIDTH) - 1) if WIDTH < 4 else -1
    return ((words[SHIFT + round // SHARE] >> (round % SHARE * WIDTH)) & MASK) << (SHIFT % 4)


@triton.jit
def codes_of(words, round: tl.constexpr, BITS: tl.constexpr):
    """The code of each element of a round, [threads, lanes]."""
    TWO: tl.constexpr = BITS & 2
    if BITS == 3:
        row = _row_part(words, round, 0, 2) | _row_part(words, round, 2, 1)
    elif BITS < 4:
        row = _row_part(words, round, 0, BITS)
    else:
        row = _row_part(words, round, 0, 4)
    code = (row[:, None] >> _nibbles()) & 15
    if BITS > 4:
        if BITS == 8:
            row = _row_part(words, round, 4, 4)
        elif BITS == 7:
            row = _row_part(words, round, 4, 2) | _row_part(words, round, 6, 1)
        else:
            row = _row_part(words, round, 4, BITS - 4)
        code |= ((row[:, None] >> _nibbles()) & 15) << 4
    return code


@triton.jit
def code_block(
    x,
    out_ptr,
    t_ptr,
    block,
    tiles,
    centre,
    ABSOLUTE: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    THREADS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Store the codes of a block's four rounds."""
    low0, high0 = _code_row(x[0], t_ptr, centre, ABSOLUTE, BITS, HALF, PAIRS)
    low1, high1 = _code_row(x[1], t_ptr, centre, ABSOLUTE, BITS, HALF, PAIRS)
    low2, high2 = _code_row(x[2], t_ptr, centre, ABSOLUTE, BITS, HALF, PAIRS)
    low3, high3 = _code_row(x[3], t_ptr, centre, ABSOLUTE, BITS, HALF, PAIRS)
    low, high = (low0, low1, low2, low3), (high0, high1, high2, high3)
    _store_codes(out_ptr, low, high, block, tiles, BITS, THREADS, WHOLE)


@triton.jit(do_not_specialize=["n", "tiles"])
def _pack_kernel(
    x_ptr,
    out_ptr,
    t_ptr,
    n,
    tiles,
    centre,
    ABSOLUTE: tl.constexpr,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,
    THREADS: tl.constexpr,
    TURNS: tl.constexpr,
):
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    first = tl.program_id(0) * TURNS
    if is_whole(n, THREADS, TURNS):
        x = load_block(x_ptr, first, n, THREADS, True, PAIRS)
        for turn in tl.static_range(TURNS):
            ahead = x
            if turn + 1 < TURNS:
                ahead = load_block(x_ptr, first + turn + 1, n, THREADS, True, PAIRS)
            block = first + turn
            code_block(x, out_ptr, t_ptr, block, tiles, centre, ABSOLUTE, BITS, HALF, PAIRS, THREADS, True)
            x = ahead
    else:
        for turn in range(TURNS):
            block = first + turn
            x = load_block(x_ptr, block, n, THREADS, False, False)
            code_block(x, out_ptr, t_ptr, block, tiles, centre, ABSOLUTE, BITS, HALF, False, THREADS, False)


@triton.jit
def _unpack_block(
    out_ptr, packed_ptr, v_ptr, block, n, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr
):
    words = load_words(packed_ptr, block, tiles, BITS, THREADS, WHOLE)
    for round in tl.static_range(4):
        values = tl.load(v_ptr + codes_of(words, round, BITS))
        store_cells(out_ptr, values, block, round, n, THREADS, WHOLE, False)


@triton.jit(do_not_specialize=["n", "tiles"])
def _unpack_kernel(
    packed_ptr, out_ptr, v_ptr, n, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, TURNS: tl.constexpr
):
    first = tl.program_id(0) * TURNS
    if is_whole(n, THREADS, TURNS):
        for turn in tl.static_range(TURNS):
            _unpack_block(out_ptr, packed_ptr, v_ptr, first + turn, n, tiles, BITS, THREADS, True)
    else:
        for turn in range(TURNS):
            _unpack_block(out_ptr, packed_ptr, v_ptr, first + turn, n, tiles, BITS, THREADS, False)
