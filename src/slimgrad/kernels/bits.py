"""One bit per element in Triton: the twins of reference.pack_bits and reference.unpack_bits.

A program treats BLOCK consecutive elements as a tile of [BLOCK / 8, 8], a row per byte. Only the last program may be
ragged, so only it has masks: a mask against an n that is not a multiple of 16 would break up the vector loads of all.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimgrad.kernels import reference
from slimgrad.kernels.geometry import PATTERNS, Layout
from slimgrad.kernels.launch import ByLaunches, Launch
from slimgrad.kernels.predicate import Interval, byte_count, check_bits, check_flat
from slimgrad.kernels.tiles import float32

PACK_BLOCK = 4096
"""Elements per program; a power of two."""
PACK_WARPS = 4
UNPACK_BLOCK = 4096
UNPACK_WARPS = 4

COMPARED = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.bool)
"""What float32 holds exactly, so that comparing there is comparing in x's own precision. Others: the reference."""

GATHER = tl.constexpr(reference.GATHER)


@lru_cache(maxsize=4096)
def packer(layout: Layout, rule: Interval, on: float, off: float) -> ByLaunches | None:
    n, dtype = math.prod(layout.shape), layout.dtype
    if dtype not in COMPARED:
        return None
    by_words = _packing(n, rule, dtype, words=True) if dtype == torch.bool else None
    packing = _packing(n, rule, dtype, words=False)
    return ByLaunches(layout, byte_count(n), packing, _unpacking(n, on, off, dtype), by_words, alignment=8)


def pack_bits(x: Tensor, rule: Interval) -> Tensor:
    check_flat(x)
    made = packer(Layout(x.shape, x.stride(), x.dtype, x.device), rule, 1.0, 0.0)
    return reference.pack_bits(x, rule) if made is None else made.pack(x)


def unpack_bits(bits: Tensor, n: int, on: float, off: float, dtype: torch.dtype) -> Tensor:
    check_bits(bits, n)
    out = torch.empty(n, dtype=dtype, device=bits.device)
    if n:
        _unpacking(n, on, off, dtype)(bits, out)
    return out


@lru_cache(maxsize=4096)
def _packing(n: int, rule: Interval, dtype: torch.dtype, *, words: bool) -> Launch:
    args = (n, rule.lo, rule.hi, rule.closed, rule.outside, rule.nan, words, PACK_BLOCK)
    reads = torch.uint8 if dtype == torch.bool else None
    return Launch(_pack_kernel, triton.cdiv(n, PACK_BLOCK), *args, reads=reads, num_warps=PACK_WARPS)


@lru_cache(maxsize=4096)
def _unpacking(n: int, on: float, off: float, dtype: torch.dtype) -> Launch:
    """Writes bit patterns, not numbers: torch rounds `on` and `off`, and one kernel serves every dtype."""
    pattern = PATTERNS[dtype.itemsize]
    args = (n, *torch.tensor([on, off], dtype=dtype, device="cpu").view(pattern).tolist(), UNPACK_BLOCK)
    return Launch(_unpack_kernel, triton.cdiv(n, UNPACK_BLOCK), *args, writes=pattern, num_warps=UNPACK_WARPS)


@triton.jit
def _bit(x, lo, hi, CLOSED: tl.constexpr, OUTSIDE: tl.constexpr, NAN: tl.constexpr):
    """The predicate as 0 or 1 (int32)."""
    x = float32(x)
    inside = ((x >= lo) & (x <= hi)) if CLOSED else ((x > lo) & (x < hi))
    bit = tl.where(inside, 0, 1) if OUTSIDE else tl.where(inside, 1, 0)
    if NAN != OUTSIDE:  # a NaN is never inside, so its bit so far is OUTSIDE
        bit = tl.where(x == x, bit, 1 - bit)
    return bit


@triton.jit
def _bytes_of_bools(x_ptr, row, lo, hi, CLOSED: tl.constexpr, OUTSIDE: tl.constexpr, NAN: tl.constexpr):
    """Whole bytes from eight bools at a time; one by one, arithmetic would take longer than the memory does."""
    word = tl.load(x_ptr.to(tl.pointer_type(tl.uint64)) + row)
    byte = ((word * GATHER) >> 56).to(tl.int32)
    one = _bit(tl.full([1], 1, tl.uint8), lo, hi, CLOSED, OUTSIDE, NAN)
    zero = _bit(tl.full([1], 0, tl.uint8), lo, hi, CLOSED, OUTSIDE, NAN)
    return (byte * one + (255 - byte) * zero).to(tl.uint8)


@triton.jit(do_not_specialize=["n"])
def _pack_kernel(
    x_ptr,
    out_ptr,
    n,
    lo,
    hi,
    CLOSED: tl.constexpr,
    OUTSIDE: tl.constexpr,
    NAN: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    row = tl.arange(0, BLOCK // 8)
    lane = tl.arange(0, 8)[None, :]
    cell = row[:, None] * 8 + lane
    x_ptr += first
    out_ptr += first // 8
    left = n - first
    if left >= BLOCK:
        if WORDS:
            byte = _bytes_of_bools(x_ptr, row, lo, hi, CLOSED, OUTSIDE, NAN)
        else:
            byte = tl.sum(_bit(tl.load(x_ptr + cell), lo, hi, CLOSED, OUTSIDE, NAN) << lane, 1).to(tl.uint8)
        tl.store(out_ptr + row, byte)
    else:
        exists = cell < left
        bit = _bit(tl.load(x_ptr + cell, mask=exists, other=0), lo, hi, CLOSED, OUTSIDE, NAN)
        bit = tl.where(exists, bit, 0)
        tl.store(out_ptr + row, tl.sum(bit << lane, 1).to(tl.uint8), mask=row * 8 < left)


@triton.jit
def _values(byte, lane, on, off):
    """The eight values of each byte; the byte is loaded once and broadcast, not loaded once per element."""
    return tl.where(((byte.to(tl.int32)[:, None] >> lane) & 1) != 0, on, off)


@triton.jit(do_not_specialize=["n", "on", "off"])
def _unpack_kernel(bits_ptr, out_ptr, n, on, off, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    row = tl.arange(0, BLOCK // 8)
    lane = tl.arange(0, 8)[None, :]
    cell = row[:, None] * 8 + lane
    bits_ptr += first // 8
    out_ptr += first
    on = on.to(out_ptr.dtype.element_ty)
    off = off.to(out_ptr.dtype.element_ty)
    left = n - first
    if left >= BLOCK:
        tl.store(out_ptr + cell, _values(tl.load(bits_ptr + row), lane, on, off))
    else:
        byte = tl.load(bits_ptr + row, mask=row * 8 < left, other=0)
        tl.store(out_ptr + cell, _values(byte, lane, on, off), mask=cell < left)
