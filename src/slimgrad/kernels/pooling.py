"""Max-pool indices as bytes, in Triton: the twins of reference.pack_window and reference.unpack_window.

An element takes three to six divisions by sizes known only at run time. As divisions they would take longer than the
memory does, so the host turns each size into a multiplier and a shift. The pool's own numbers (kernel, stride, padding,
dilation) are compiled in: a model has few of them, while sizes may change with every batch.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimgrad.kernels import geometry, reference
from slimgrad.kernels.geometry import Planes, Windows, checked, dense, divider
from slimgrad.kernels.launch import device_of

NO_POSITION = tl.constexpr(geometry.NO_POSITION)

WINDOW_BLOCK = 1024
"""Elements per program; a power of two."""
WINDOW_WARPS = 4

MAX_CELLS = 2**30
"""Planes are counted in int32, a block past their end included. Larger ones: the reference."""


def pack_window(indices: Tensor, pool: Windows) -> Tensor:
    indices, layout = dense(indices, checked(pool).rank, torch.int64)
    if _too_large(pool, layout):
        return reference.pack_window(indices, pool)
    out = torch.empty_like(indices, dtype=torch.uint8)
    _launch(indices, out, pool, layout, pack=True)
    return out


def unpack_window(codes: Tensor, pool: Windows) -> Tensor:
    codes, layout = dense(codes, checked(pool).rank, torch.uint8)
    if _too_large(pool, layout):
        return reference.unpack_window(codes, pool)
    out = torch.empty_like(codes, dtype=torch.int64)
    _launch(codes, out, pool, layout, pack=False)
    return out


def _too_large(pool: Windows, layout: Planes) -> bool:
    return max(math.prod(pool.input_size), math.prod(layout.out) * layout.inner) > MAX_CELLS


def _launch(source: Tensor, target: Tensor, pool: Windows, layout: Planes, *, pack: bool) -> None:
    n = source.numel()
    if n == 0:
        return
    lead = 3 - pool.rank  # fewer dimensions are three with ones in front
    _, out1, out2 = (1,) * lead + layout.out
    _, in1, in2 = (1,) * lead + pool.input_size
    k0, k1, k2 = (1,) * lead + pool.kernel
    steps = [*(1,) * lead, *pool.stride, *(0,) * lead, *pool.padding, *(1,) * lead, *pool.dilation]
    sizes = [layout.inner, math.prod(layout.out), out1, out2, in1, in2]
    divided = [item for size in sizes for item in (size, *divider(size))]
    flags = (pool.rank, layout.inner > 1, pack, WINDOW_BLOCK)
    with device_of(source):
        grid = (triton.cdiv(n, WINDOW_BLOCK),)
        _window_kernel[grid](source, target, n, *divided, k0, k1, k2, *steps, *flags, num_warps=WINDOW_WARPS)


@triton.jit
def _quotient(x, multiplier, shift):
    """x // size by way of `divider`: three instructions."""
    doubled = x.to(tl.uint32) * 2  # so that the upper half of the product is what is left after a shift by 31
    return (tl.umulhi(doubled, multiplier.to(tl.uint32)) >> shift.to(tl.uint32)).to(tl.int32)


@triton.jit
def _coordinates(flat, size1, mul1, shift1, size2, mul2, shift2, RANK: tl.constexpr):
    """Row-major coordinates in three dimensions, of which the last RANK count."""
    row = tl.zeros_like(flat)
    depth = tl.zeros_like(flat)
    last = flat
    if RANK >= 2:
        row = _quotient(flat, mul2, shift2)
        last = flat - row * size2
    if RANK == 3:
        depth = _quotient(row, mul1, shift1)
        row -= depth * size1
    return depth, row, last


SIZES = ["n"] + [
    part + name for name in ("inner", "plane", "out1", "out2", "in1", "in2") for part in ("size_", "mul_", "shift_")
]
"""Arguments that change with the batch: a size of 1 or of a multiple of 16 must not compile another kernel."""


@triton.jit(do_not_specialize=SIZES)
def _window_kernel(
    source_ptr, target_ptr, n,
    size_inner, mul_inner, shift_inner, size_plane, mul_plane, shift_plane,
    size_out1, mul_out1, shift_out1, size_out2, mul_out2, shift_out2,
    size_in1, mul_in1, shift_in1, size_in2, mul_in2, shift_in2,
    K0: tl.constexpr, K1: tl.constexpr, K2: tl.constexpr,
    STRIDE0: tl.constexpr, STRIDE1: tl.constexpr, STRIDE2: tl.constexpr,
    PAD0: tl.constexpr, PAD1: tl.constexpr, PAD2: tl.constexpr,
    DIL0: tl.constexpr, DIL1: tl.constexpr, DIL2: tl.constexpr,
    RANK: tl.constexpr, CHANNELS_LAST: tl.constexpr, PACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * BLOCK
    lane = tl.arange(0, BLOCK)
    source_ptr += first
    target_ptr += first
    left = n - first
    if left >= BLOCK:  # noqa: SIM108  (Triton has no ternary at run time) As in bits.py: masks only where needed.
        source = tl.load(source_ptr + lane)
    else:
        source = tl.load(source_ptr + lane, mask=lane < left, other=0)
    # Where this element's window starts. The long division is the program's, once; the elements' are in int32.
    spot = (first % (size_plane.to(tl.int64) * size_inner)).to(tl.int32) + lane
    if CHANNELS_LAST:
        spot = _quotient(spot, mul_inner, shift_inner)
    spot -= _quotient(spot, mul_plane, shift_plane) * size_plane
    o0, o1, o2 = _coordinates(spot, size_out1, mul_out1, shift_out1, size_out2, mul_out2, shift_out2, RANK)
    start0 = o0 * STRIDE0 - PAD0
    start1 = o1 * STRIDE1 - PAD1
    start2 = o2 * STRIDE2 - PAD2
    if PACK:
        c0, c1, c2 = _coordinates(source.to(tl.int32), size_in1, mul_in1, shift_in1, size_in2, mul_in2, shift_in2, RANK)
        p0, p1, p2 = c0 - start0, c1 - start1, c2 - start2
        inside = (p0 >= 0) & (p1 >= 0) & (p2 >= 0) & (p0 < K0 * DIL0) & (p1 < K1 * DIL1) & (p2 < K2 * DIL2)
        code = (p0 // DIL0 * K1 + p1 // DIL1) * K2 + p2 // DIL2
        target = tl.where(inside, code, NO_POSITION).to(tl.uint8)
    else:
        code = source.to(tl.int32)
        c0 = start0 + code // (K1 * K2) * DIL0
        c1 = start1 + code // K2 % K1 * DIL1
        c2 = start2 + code % K2 * DIL2
        target = tl.where(code == NO_POSITION, 0, (c0 * size_in1 + c1) * size_in2 + c2).to(tl.int64)
    if left >= BLOCK:
        tl.store(target_ptr + lane, target)
    else:
        tl.store(target_ptr + lane, target, mask=lane < left)
