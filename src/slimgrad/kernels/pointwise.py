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
from slimgrad.kernels.formulas import FAR, logistic, normal_tail
from slimgrad.kernels.geometry import Layout, check_dense
from slimgrad.kernels.halves import exp2, high_of, inverse, is_native, low_of, paired
from slimgrad.kernels.rounds import codes_of, is_whole, load_rounds, load_words, store_cells
from slimgrad.kernels.tiles import float32, rounded

FUSED = ("gelu", "gelu_tanh", "silu", "quick_gelu", "sigmoid", "hardswish", "mish")
"""What `_value` computes. The others: torch computes f, and the codes take a pass of their own."""


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
def _gelu(x, NATIVE: tl.constexpr):
    """max(x, 0) - |x| Q(|x|): 11 instructions, which memory hides, where erf takes 25 and does not; and below zero it
    loses none of the digits that 1 + erf does.
    """
    size = tl.minimum(tl.abs(x), FAR)
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * normal_tail(size, NATIVE)


@triton.jit
def _value(x, FUNCTION: tl.constexpr, PRECISE: tl.constexpr, NATIVE: tl.constexpr):
    """f(x) in float32."""
    if FUNCTION == "gelu" and PRECISE:
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu":
        y = _gelu(x, NATIVE)
    elif FUNCTION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2u
        y = x * logistic(x * (1.5957691216057308 + 0.07135481282724548 * x * x), NATIVE)
    elif FUNCTION == "silu":
        y = x * logistic(x, NATIVE)
    elif FUNCTION == "quick_gelu":
        y = x * logistic(1.702 * x, NATIVE)
    elif FUNCTION == "sigmoid":
        y = logistic(x, NATIVE)
    elif FUNCTION == "hardswish":
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        tl.static_assert(FUNCTION == "mish", "a name in FUSED that has no formula here")
        e = exp2(tl.minimum(x, 20.0) * 1.4426950408889634, NATIVE)  # tanh(log(1 + e)) = (e^2 + 2e) / (e^2 + 2e + 2)
        e = e * (e + 2.0)
        y = x * (e * inverse(e + 2.0, NATIVE))
    return y


@triton.jit
def _values(x, OUT: tl.constexpr, PAIRS: tl.constexpr, FUNCTION: tl.constexpr, NATIVE: tl.constexpr):
    """f of a round, as it was loaded."""
    if PAIRS:
        low = _value(low_of(x, OUT), FUNCTION, False, NATIVE)
        y = paired(low, _value(high_of(x, OUT), FUNCTION, False, NATIVE), OUT, NATIVE)
    else:
        y = rounded(_value(float32(x), FUNCTION, tl.float32 == OUT, NATIVE), OUT)
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
