"""Few-bit codes in Triton: the twin of reference_codes.py. A program treats BLOCK elements as rows of eight."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimgrad.kernels import reference_codes
from slimgrad.kernels.codes import Buckets, check_codes, check_floating, code_bytes, rows_of
from slimgrad.kernels.geometry import Layout, check_dense
from slimgrad.kernels.launch import ByLaunches, Launch
from slimgrad.kernels.tiles import float32

BLOCK = 2048
"""Elements per program; a power of two."""
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
    programs, sizes = triton.cdiv(n, BLOCK), (n, rows_of(n))
    borders = torch.tensor(buckets.borders, dtype=torch.float32, device=device)
    values = torch.tensor(buckets.values, dtype=torch.float64).to(layout.dtype).to(device)
    how = (buckets.centre, buckets.absolute, buckets.bits, BLOCK)
    packing = Launch(_pack_kernel, programs, *sizes, *how, constants=(borders,), num_warps=WARPS)
    unpacking = Launch(_unpack_kernel, programs, *sizes, *how[2:], constants=(values,), num_warps=WARPS)
    return ByLaunches(layout, code_bytes(n, buckets.bits), packing, unpacking)


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
def code_of(x, t_ptr, BITS: tl.constexpr):
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
def store_plane(out_ptr, codes, row, exists, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH bits of each code from bit SHIFT on, a word per row."""
    lane = tl.arange(0, 8)[None, :]
    if WIDTH == 8:
        tl.store(out_ptr + row[:, None] * 8 + lane, codes.to(tl.uint8), mask=exists[:, None])
    else:
        word = tl.sum(((codes >> SHIFT) & ((1 << WIDTH) - 1)) << (lane * WIDTH), 1)
        if WIDTH == 4:
            tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + row, word, mask=exists)
        elif WIDTH == 2:
            tl.store(out_ptr.to(tl.pointer_type(tl.int16)) + row, word.to(tl.int16), mask=exists)
        else:
            tl.store(out_ptr.to(tl.pointer_type(tl.int8)) + row, word.to(tl.int8), mask=exists)


@triton.jit
def load_plane(packed_ptr, row, exists, WIDTH: tl.constexpr):
    """The bits of one plane, an element each."""
    lane = tl.arange(0, 8)[None, :]
    if WIDTH == 8:
        return tl.load(packed_ptr + row[:, None] * 8 + lane, mask=exists[:, None], other=0).to(tl.int32)
    if WIDTH == 4:
        word = tl.load(packed_ptr.to(tl.pointer_type(tl.int32)) + row, mask=exists, other=0)
    elif WIDTH == 2:
        word = tl.load(packed_ptr.to(tl.pointer_type(tl.int16)) + row, mask=exists, other=0).to(tl.int32)
    else:
        word = tl.load(packed_ptr + row, mask=exists, other=0).to(tl.int32)
    return (word[:, None] >> (lane * WIDTH)) & ((1 << WIDTH) - 1)


@triton.jit
def store_codes(out_ptr, codes, row, exists, rows, BITS: tl.constexpr):
    """All planes, as PLANES in codes.py lists them."""
    if BITS == 8:
        store_plane(out_ptr, codes, row, exists, 0, 8)
    else:
        FOUR: tl.constexpr = BITS & 4
        TWO: tl.constexpr = BITS & 2
        if FOUR:
            store_plane(out_ptr, codes, row, exists, 0, 4)
        if TWO:
            store_plane(out_ptr + rows * FOUR, codes, row, exists, FOUR, 2)
        if BITS & 1:
            store_plane(out_ptr + rows * (FOUR + TWO), codes, row, exists, FOUR + TWO, 1)


@triton.jit
def load_codes(packed_ptr, row, exists, rows, BITS: tl.constexpr):
    FOUR: tl.constexpr = BITS & 4
    TWO: tl.constexpr = BITS & 2
    codes = tl.zeros([row.shape[0], 8], tl.int32)
    if BITS == 8:
        codes = load_plane(packed_ptr, row, exists, 8)
    else:
        if FOUR:
            codes = load_plane(packed_ptr, row, exists, 4)
        if TWO:
            codes |= load_plane(packed_ptr + rows * FOUR, row, exists, 2) << FOUR
        if BITS & 1:
            codes |= load_plane(packed_ptr + rows * (FOUR + TWO), row, exists, 1) << (FOUR + TWO)
    return codes


@triton.jit(do_not_specialize=["n", "rows"])
def _pack_kernel(
    x_ptr, out_ptr, t_ptr, n, rows, centre, ABSOLUTE: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    cell = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    if (tl.program_id(0) + 1).to(tl.int64) * BLOCK <= n:
        x = float32(tl.load(x_ptr + cell))
    else:
        x = float32(tl.load(x_ptr + cell, mask=cell < n, other=0.0))
    if ABSOLUTE:
        x = tl.abs(x - centre)
    codes = tl.where(cell < n, code_of(x, t_ptr, BITS), 0)
    store_codes(out_ptr, codes, row, row < rows, rows.to(tl.int64), BITS)


@triton.jit(do_not_specialize=["n", "rows"])
def _unpack_kernel(packed_ptr, out_ptr, v_ptr, n, rows, BITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    cell = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    codes = load_codes(packed_ptr, row, row < rows, rows.to(tl.int64), BITS)
    values = tl.load(v_ptr + codes)
    if (tl.program_id(0) + 1).to(tl.int64) * BLOCK <= n:
        tl.store(out_ptr + cell, values)
    else:
        tl.store(out_ptr + cell, values, mask=cell < n)
