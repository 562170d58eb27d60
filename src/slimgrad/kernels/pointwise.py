"""Functions computed together with the codes of their derivative, in Triton: forward reads x once and writes f(x) and
codes, backward reads codes and dY. Fewer bytes than stock autograd moves, which reads x again.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimgrad.kernels import buckets, reference_codes
from slimgrad.kernels.buckets import COMPARED, WORD_BYTES, borders_on, code_rounds, launch, ways
from slimgrad.kernels.codes import Pointwise, check_codes, check_floating, code_bytes
from slimgrad.kernels.formulas import value_of
from slimgrad.kernels.geometry import Layout, check_dense
from slimgrad.kernels.halves import high_of, is_native, low_of, paired
from slimgrad.kernels.rounds import codes_of, is_whole, load_rounds, load_words, store_cells
from slimgrad.kernels.tiles import float32, rounded

FUSED = ("gelu", "gelu_tanh", "silu", "quick_gelu", "sigmoid", "hardswish", "mish")
"""What `value_of` computes. The others: torch computes f, and the codes take a pass of their own."""


def pointwise_forward(x: Tensor, unit: Pointwise, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    check_floating(x)
    check_dense("pointwise", x)
    made = packer(Layout(x.shape, x.stride(), x.dtype, x.device), unit)
    return reference_codes.pointwise_forward(x, unit, out) if made is None else made.forward(x, out)


def pointwise_backward(codes: Tensor, dy: Tensor, unit: Pointwise) -> Tensor:
    check_dense("pointwise", dy)
    check_codes(codes, dy.numel(), unit.buckets.bits)
    made = packer(Layout(dy.shape, dy.stride(), dy.dtype, dy.device), unit)
    return reference_codes.pointwise_backward(codes, dy, unit) if made is None else made.backward(codes, dy)


@lru_cache(maxsize=4096)
def packer(layout: Layout, unit: Pointwise) -> ByKernels | None:
    return ByKernels(layout, unit) if layout.dtype in COMPARED else None


class ByKernels:
    """A fusion of one kernel each way; where there is none for f, torch computes it and the codes take their own."""

    __slots__ = ("aligned", "backwards", "bare", "nbytes", "plain", "unit")

    def __init__(self, layout: Layout, unit: Pointwise) -> None:
        n, dtype, device = math.prod(layout.shape), layout.dtype, layout.device
        self.unit = unit
        self.nbytes = code_bytes(n, unit.buckets.bits)
        self.bare = None if unit.fused in FUSED else buckets.packer(layout, unit.buckets)
        constants = (borders_on(unit.buckets, dtype, device),)
        self.plain, self.aligned = (
            launch(_forward_kernel, n, dtype, *how, unit.fused, is_native(device), constants=constants)
            for how in ways(unit.buckets, dtype, device)
        )
        levels = torch.tensor(unit.buckets.values, dtype=torch.float32, device=device)
        self.backwards = launch(_backward_kernel, n, dtype, unit.buckets.bits, constants=(levels,))

    def forward(self, x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.bare is not None:
            codes, y = self.bare.pack(x), self.unit.f(x.detach())
            return (y if out is None else out.copy_(y)), codes
        y = torch.empty_like(x) if out is None else out
        codes = torch.empty(self.nbytes, dtype=torch.uint8, device=x.device)
        if self.nbytes:
            whole = (x.data_ptr() | y.data_ptr()) % WORD_BYTES == 0
            (self.aligned if whole else self.plain)(x, y, codes)
        return y, codes

    def backward(self, codes: Tensor, dy: Tensor) -> Tensor:
        dx = torch.empty_like(dy)
        if self.nbytes:
            self.backwards(dy, dx, codes)
        return dx


@triton.jit
def _values(x, OUT: tl.constexpr, PAIRS: tl.constexpr, FUNCTION: tl.constexpr, NATIVE: tl.constexpr):
    """f of a round, as it was loaded."""
    if PAIRS:
        low = value_of(low_of(x, OUT), FUNCTION, False, NATIVE)
        y = paired(low, value_of(high_of(x, OUT), FUNCTION, False, NATIVE), OUT, NATIVE)
    else:
        y = rounded(value_of(float32(x), FUNCTION, tl.float32 == OUT, NATIVE), OUT)
    return y


@triton.jit
def _forward_rounds(
    x_ptr,
    y_ptr,
    codes_ptr,
    t_ptr,
    n,
    tiles,
    centre,
    ABSOLUTE: tl.constexpr,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,
    FUNCTION: tl.constexpr,
    NATIVE: tl.constexpr,
    THREADS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    OUT: tl.constexpr = y_ptr.dtype.element_ty
    x = load_rounds(x_ptr, n, THREADS, WHOLE, PAIRS)
    code_rounds(x, codes_ptr, t_ptr, tiles, centre, ABSOLUTE, BITS, OUT, PAIRS, THREADS, WHOLE)
    for round in tl.static_range(4):
        y = _values(x[round], OUT, PAIRS, FUNCTION, NATIVE)
        store_cells(y_ptr, y, round, n, THREADS, WHOLE, PAIRS)


@triton.jit(do_not_specialize=["n", "tiles"])
def _forward_kernel(
    x_ptr,
    y_ptr,
    codes_ptr,
    t_ptr,
    n,
    tiles,
    centre,
    ABSOLUTE: tl.constexpr,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,
    FUNCTION: tl.constexpr,
    NATIVE: tl.constexpr,
    THREADS: tl.constexpr,
):
    if is_whole(n, THREADS):
        _forward_rounds(
            x_ptr, y_ptr, codes_ptr, t_ptr, n, tiles, centre, ABSOLUTE, BITS, PAIRS, FUNCTION, NATIVE, THREADS, True
        )
    else:
        _forward_rounds(
            x_ptr, y_ptr, codes_ptr, t_ptr, n, tiles, centre, ABSOLUTE, BITS, False, FUNCTION, NATIVE, THREADS, False
        )


@triton.jit
def _backward_rounds(
    dy_ptr, dx_ptr, codes_ptr, v_ptr, n, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr
):
    words = load_words(codes_ptr, tiles, BITS, THREADS, WHOLE)
    dy = load_rounds(dy_ptr, n, THREADS, WHOLE, False)
    for round in tl.static_range(4):
        levels = tl.load(v_ptr + codes_of(words, round, BITS))
        dx = rounded(float32(dy[round]) * levels, dx_ptr.dtype.element_ty)
        store_cells(dx_ptr, dx, round, n, THREADS, WHOLE, False)


@triton.jit(do_not_specialize=["n", "tiles"])
def _backward_kernel(dy_ptr, dx_ptr, codes_ptr, v_ptr, n, tiles, BITS: tl.constexpr, THREADS: tl.constexpr):
    if is_whole(n, THREADS):
        _backward_rounds(dy_ptr, dx_ptr, codes_ptr, v_ptr, n, tiles, BITS, THREADS, True)
    else:
        _backward_rounds(dy_ptr, dx_ptr, codes_ptr, v_ptr, n, tiles, BITS, THREADS, False)
