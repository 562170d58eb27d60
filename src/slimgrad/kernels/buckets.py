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
from slimgrad.kernels.halves import above, has_pairs, words_of
from slimgrad.kernels.launch import ByLaunches, Launch
from slimgrad.kernels.tiles import LANES, ROUNDS, TILE, float32

WARPS = 4

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
    borders, how = compared(buckets, layout.dtype, device)
    packing = launch(_pack_kernel, n, *how, constants=(borders,))
    unpacking = launch(_unpack_kernel, n, buckets.bits, constants=(values,))
    return ByLaunches(layout, code_bytes(n, buckets.bits), packing, unpacking)


def launch(kernel: Any, n: int, *how: Any, constants: tuple[Tensor, ...]) -> Launch:
    """Of a kernel whose programs take a tile per warp of n elements."""
    programs = triton.cdiv(tiles_of(n), WARPS)
    return Launch(kernel, programs, n, tiles_of(n), *how, WARPS * geometry.THREADS, constants=constants, num_warps=WARPS)


def compared(buckets: Buckets, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, tuple[Any, ...]]:
    """The borders as `code_rows` wants them, and its other arguments."""
    pairs = has_pairs(dtype, device) and buckets.bits <= MOST_IN_REGISTERS.value and buckets.centre == 0.0
    borders = torch.tensor(buckets.borders, dtype=torch.float32)
    if pairs:
        low = _rounded_down(borders, dtype).view(torch.int16).to(torch.int32) & 0xFFFF
        borders = low | low << 16
    return borders.to(device), (buckets.centre, buckets.absolute, buckets.bits, pairs)


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


# --- tiles: [rounds, threads, lanes] of elements, [rounds, threads] of rows --------------------------------------------


@triton.jit
def is_whole(n, THREADS: tl.constexpr):
    """Whether all elements of the program's tiles exist. Those programs ask for no element whether it does: the asking
    took a third of their instructions.
    """
    return (tl.program_id(0) + 1).to(tl.int64) * (THREADS * ROUNDS * LANES) <= n


@triton.jit
def _cells(THREADS: tl.constexpr):
    """Where in memory the elements of a program's tiles lie."""
    thread = tl.arange(0, THREADS)[None, :, None]
    tile = tl.program_id(0).to(tl.int64) * (THREADS // 32) + thread // 32
    within = tl.arange(0, ROUNDS)[:, None, None] * (TILE // ROUNDS) + (thread % 32) * LANES
    return tile * TILE + within + tl.arange(0, LANES)[None, None, :]


@triton.jit
def load_cells(ptr, n, THREADS: tl.constexpr, WHOLE: tl.constexpr):
    cell = _cells(THREADS)
    if WHOLE:
        return tl.load(ptr + cell)
    return tl.load(ptr + cell, mask=cell < n, other=0.0)


@triton.jit
def store_cells(ptr, values, n, THREADS: tl.constexpr, WHOLE: tl.constexpr):
    cell = _cells(THREADS)
    if WHOLE:
        tl.store(ptr + cell, values)
    else:
        tl.store(ptr + cell, values, mask=cell < n)


@triton.jit
def _nibbles():
    """Where in a row's word the codes of its elements begin: those with even numbers first."""
    lane = tl.arange(0, LANES)[None, None, :]
    return (lane % 2) * 16 + (lane // 2) * 4


@triton.jit
def _rows_of_pairs(words, t_ptr, ABSOLUTE: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr):
    """The rows of two elements a word: each border adds -1 to the half that lies above it.

    A carry out of the lower half takes 1 from the upper one, once per count; times -65537 undoes that and the sign.
    """
    if ABSOLUTE:
        words = words & 0x7FFF7FFF
    counted = tl.zeros_like(words)
    for border in tl.static_range((1 << BITS) - 1):
        counted += above(words, tl.load(t_ptr + border).to(tl.uint32, bitcast=True), HALF)
    places = tl.arange(0, LANES // 2)[None, None, :] * 4
    return (tl.sum(counted << places, 2) * 0xFFFEFFFF).to(tl.int32, bitcast=True)


@triton.jit
def code_rows(x, t_ptr, centre, ABSOLUTE: tl.constexpr, BITS: tl.constexpr, PAIRS: tl.constexpr):
    """A word per row with the low four bits of its codes, and one with the others."""
    if PAIRS:
        low = _rows_of_pairs(words_of(x), t_ptr, ABSOLUTE, BITS, x.dtype)
        high = low
    else:
        at = float32(x)
        if ABSOLUTE:
            at = tl.abs(at - centre)
        codes = _code_of(at, t_ptr, BITS)
        low = tl.sum((codes & 15) << _nibbles(), 2)
        high = tl.sum((codes >> 4) << _nibbles(), 2)
    return low, high


@triton.jit
def _plane(ptr, SHIFT: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, THREADS: tl.constexpr):
    """Where the words of a plane lie, [threads, words], and in which tile; SHIFT is what comes before, in words too."""
    thread = tl.arange(0, THREADS)[:, None]
    tile = tl.program_id(0) * (THREADS // 32) + thread // 32
    place = tile.to(tl.int64) * (32 * BITS) + 32 * SHIFT + (thread % 32) * WIDTH + tl.arange(0, WIDTH)[None, :]
    return ptr.to(tl.pointer_type(tl.int32)) + place, tile


@triton.jit
def _store_plane(
    ptr,
    rows,
    tiles,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    THREADS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """WIDTH bits of every code: 4 / WIDTH rows share a word."""
    SHARE: tl.constexpr = ROUNDS // WIDTH
    if WIDTH == 4:
        words = rows
    else:
        part = (rows >> (SHIFT % 4)) & (0x11111111 * ((1 << WIDTH) - 1))
        turns = tl.arange(0, SHARE)[None, :, None] * WIDTH
        words = tl.sum(tl.reshape(part, [WIDTH, SHARE, THREADS]) << turns, 1)
    place, tile = _plane(ptr, SHIFT, WIDTH, BITS, THREADS)
    if WHOLE:
        tl.store(place, tl.trans(words))
    else:
        tl.store(place, tl.trans(words), mask=tile < tiles)


@triton.jit
def _load_plane(
    ptr,
    tiles,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    THREADS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    SHARE: tl.constexpr = ROUNDS // WIDTH
    place, tile = _plane(ptr, SHIFT, WIDTH, BITS, THREADS)
    if WHOLE:  # noqa: SIM108
        words = tl.trans(tl.load(place))
    else:
        words = tl.trans(tl.load(place, mask=tile < tiles, other=0))
    if WIDTH == 4:
        return words
    part = words[:, None, :] >> (tl.arange(0, SHARE)[None, :, None] * WIDTH)
    return (tl.reshape(part, [ROUNDS, THREADS]) & (0x11111111 * ((1 << WIDTH) - 1))) << (SHIFT % 4)


@triton.jit
def store_codes(ptr, low, high, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr):
    """The planes, as PLANES in codes.py lists them."""
    TWO: tl.constexpr = BITS & 2
    if BITS < 4:
        if TWO:
            _store_plane(ptr, low, tiles, 0, 2, BITS, THREADS, WHOLE)
        if BITS & 1:
            _store_plane(ptr, low, tiles, TWO, 1, BITS, THREADS, WHOLE)
    else:
        _store_plane(ptr, low, tiles, 0, 4, BITS, THREADS, WHOLE)
        if BITS == 8:
            _store_plane(ptr, high, tiles, 4, 4, BITS, THREADS, WHOLE)
        if TWO:
            _store_plane(ptr, high, tiles, 4, 2, BITS, THREADS, WHOLE)
        if BITS & 1:
            _store_plane(ptr, high, tiles, 4 + TWO, 1, BITS, THREADS, WHOLE)


@triton.jit
def load_codes(ptr, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr):
    """The code of each element."""
    TWO: tl.constexpr = BITS & 2
    low = tl.zeros([ROUNDS, THREADS], tl.int32)
    high = low
    if BITS < 4:
        if TWO:
            low |= _load_plane(ptr, tiles, 0, 2, BITS, THREADS, WHOLE)
        if BITS & 1:
            low |= _load_plane(ptr, tiles, TWO, 1, BITS, THREADS, WHOLE)
    else:
        low = _load_plane(ptr, tiles, 0, 4, BITS, THREADS, WHOLE)
        if BITS == 8:
            high = _load_plane(ptr, tiles, 4, 4, BITS, THREADS, WHOLE)
        if TWO:
            high |= _load_plane(ptr, tiles, 4, 2, BITS, THREADS, WHOLE)
        if BITS & 1:
            high |= _load_plane(ptr, tiles, 4 + TWO, 1, BITS, THREADS, WHOLE)
    code = (low[:, :, None] >> _nibbles()) & 15
    if BITS > 4:
        code |= ((high[:, :, None] >> _nibbles()) & 15) << 4
    return code


@triton.jit
def _pack_tiles(
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
    WHOLE: tl.constexpr,
):
    x = load_cells(x_ptr, n, THREADS, WHOLE)
    low, high = code_rows(x, t_ptr, centre, ABSOLUTE, BITS, PAIRS)
    store_codes(out_ptr, low, high, tiles, BITS, THREADS, WHOLE)


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
):
    if is_whole(n, THREADS):
        _pack_tiles(x_ptr, out_ptr, t_ptr, n, tiles, centre, ABSOLUTE, BITS, PAIRS, THREADS, True)
    else:
        _pack_tiles(x_ptr, out_ptr, t_ptr, n, tiles, centre, ABSOLUTE, BITS, PAIRS, THREADS, False)


@triton.jit
def _unpack_tiles(
    packed_ptr, out_ptr, v_ptr, n, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr
):
    values = tl.load(v_ptr + load_codes(packed_ptr, tiles, BITS, THREADS, WHOLE))
    store_cells(out_ptr, values, n, THREADS, WHOLE)


@triton.jit(do_not_specialize=["n", "tiles"])
def _unpack_kernel(packed_ptr, out_ptr, v_ptr, n, tiles, BITS: tl.constexpr, THREADS: tl.constexpr):
    if is_whole(n, THREADS):
        _unpack_tiles(packed_ptr, out_ptr, v_ptr, n, tiles, BITS, THREADS, True)
    else:
        _unpack_tiles(packed_ptr, out_ptr, v_ptr, n, tiles, BITS, THREADS, False)
