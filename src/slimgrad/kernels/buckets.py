"""Few-bit codes in Triton: the twin of reference_codes.py."""
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
from slimgrad.kernels.rounds import codes_of, is_whole, load_rounds, load_words, nibbles, store_cells, store_codes
from slimgrad.kernels.tiles import LANES, float32

WARPS = 2
REGISTERS = {4: 64, 2: 48}
"""Per thread, by the bytes of an element. Left to itself, the compiler takes 108 for what only the last tile needs, and
the few warps that then fit do not keep the memory busy: GELU took 0.84x of stock PyTorch's time, and takes 0.73x.
"""
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
    borders = borders_on(buckets, layout.dtype, device)
    packing, wide = (
        launch(_pack_kernel, n, layout.dtype, *how, constants=(borders,)) for how in ways(buckets, layout.dtype, device)
    )
    unpacking = launch(_unpack_kernel, n, layout.dtype, buckets.bits, constants=(values,))
    return ByLaunches(layout, code_bytes(n, buckets.bits), packing, unpacking, wide, WORD_BYTES)


def launch(kernel: Any, n: int, dtype: torch.dtype, *how: Any, constants: tuple[Tensor, ...]) -> Launch:
    """Of a kernel each of whose warps takes a tile of the n elements."""
    args = (n, tiles_of(n), *how, WARPS * geometry.THREADS)
    options: dict[str, Any] = {"num_warps": WARPS, "maxnreg": REGISTERS[dtype.itemsize], "enable_fp_fusion": True}
    return Launch(kernel, triton.cdiv(tiles_of(n), WARPS), *args, constants=constants, **options)


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
def _code_row(x, t_ptr, centre, ABSOLUTE: tl.constexpr, BITS: tl.constexpr, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """A word per row with the low four bits of its codes, and one with the others."""
    if PAIRS:
        low = _row_of_pairs(x, t_ptr, ABSOLUTE, BITS, HALF)
        high = low
    else:
        at = float32(x)
        if ABSOLUTE:
            at = tl.abs(at - centre)
        code = _code_of(at, t_ptr, BITS)
        low = tl.sum((code & 15) << nibbles(), 1)
        high = tl.sum((code >> 4) << nibbles(), 1)
    return low, high


@triton.jit
def code_rounds(
    x,
    out_ptr,
    t_ptr,
    tiles,
    centre,
    ABSOLUTE: tl.constexpr,
    BITS: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    THREADS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Store the codes of the four rounds."""
    low0, high0 = _code_row(x[0], t_ptr, centre, ABSOLUTE, BITS, HALF, PAIRS)
    low1, high1 = _code_row(x[1], t_ptr, centre, ABSOLUTE, BITS, HALF, PAIRS)
    low2, high2 = _code_row(x[2], t_ptr, centre, ABSOLUTE, BITS, HALF, PAIRS)
    low3, high3 = _code_row(x[3], t_ptr, centre, ABSOLUTE, BITS, HALF, PAIRS)
    low, high = (low0, low1, low2, low3), (high0, high1, high2, high3)
    store_codes(out_ptr, low, high, tiles, BITS, THREADS, WHOLE)


@triton.jit
def _pack_rounds(
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
    HALF: tl.constexpr = x_ptr.dtype.element_ty
    x = load_rounds(x_ptr, n, THREADS, WHOLE, PAIRS)
    code_rounds(x, out_ptr, t_ptr, tiles, centre, ABSOLUTE, BITS, HALF, PAIRS, THREADS, WHOLE)


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
        _pack_rounds(x_ptr, out_ptr, t_ptr, n, tiles, centre, ABSOLUTE, BITS, PAIRS, THREADS, True)
    else:
        _pack_rounds(x_ptr, out_ptr, t_ptr, n, tiles, centre, ABSOLUTE, BITS, False, THREADS, False)


@triton.jit
def _unpack_rounds(
    packed_ptr, out_ptr, v_ptr, n, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr
):
    words = load_words(packed_ptr, tiles, BITS, THREADS, WHOLE)
    for round in tl.static_range(4):
        store_cells(out_ptr, tl.load(v_ptr + codes_of(words, round, BITS)), round, n, THREADS, WHOLE, False)


@triton.jit(do_not_specialize=["n", "tiles"])
def _unpack_kernel(packed_ptr, out_ptr, v_ptr, n, tiles, BITS: tl.constexpr, THREADS: tl.constexpr):
    if is_whole(n, THREADS):
        _unpack_rounds(packed_ptr, out_ptr, v_ptr, n, tiles, BITS, THREADS, True)
    else:
        _unpack_rounds(packed_ptr, out_ptr, v_ptr, n, tiles, BITS, THREADS, False)
