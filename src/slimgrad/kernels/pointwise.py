"""Functions computed together with the codes of their derivative, in Triton: forward reads x once and writes f(x) and
codes, backward reads codes and dY. Fewer bytes than stock autograd moves, which reads x again.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimgrad.kernels import buckets as separate
from slimgrad.kernels import reference_codes
from slimgrad.kernels.buckets import COMPARED, code_of, load_codes, store_codes
from slimgrad.kernels.codes import Pointwise, check_codes, check_floating, code_bytes, rows_of
from slimgrad.kernels.geometry import check_dense
from slimgrad.kernels.launch import Launch
from slimgrad.kernels.tiles import float32, rounded

BLOCK = 2048
"""Elements per program; a power of two."""
WARPS = 4

FUSED = ("gelu", "gelu_tanh", "silu", "quick_gelu", "sigmoid", "hardswish", "mish")
"""What `_value` computes. The others: torch computes f, and the codes take a pass of their own."""


def pointwise_forward(x: Tensor, unit: Pointwise, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    check_floating(x)
    check_dense("pointwise", x)
    if unit.fused not in FUSED or x.dtype not in COMPARED:
        codes, y = separate.pack_codes(x, unit.buckets), unit.f(x.detach())
        return (y if out is None else out.copy_(y)), codes
    n = x.numel()
    y = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) if out is None else out
    codes = torch.empty(code_bytes(n, unit.buckets.bits), dtype=torch.uint8, device=x.device)
    if n:
        _forward(n, unit, x.device)(x, y, codes)
    return y, codes


def pointwise_backward(codes: Tensor, dy: Tensor, unit: Pointwise) -> Tensor:
    check_dense("pointwise", dy)
    check_codes(codes, dy.numel(), unit.buckets.bits)
    if dy.dtype not in COMPARED:
        return reference_codes.pointwise_backward(codes, dy, unit)
    dx = torch.empty_strided(dy.shape, dy.stride(), dtype=dy.dtype, device=dy.device)
    if dy.numel():
        _backward(dy.numel(), unit, dy.device)(dy, dx, codes)
    return dx


@lru_cache(maxsize=4096)
def _forward(n: int, unit: Pointwise, device: torch.device) -> Launch:
    table = unit.buckets
    borders = torch.tensor(table.borders, dtype=torch.float32, device=device)
    args = (n, rows_of(n), table.centre, table.absolute, table.bits, unit.fused, BLOCK)
    return Launch(_forward_kernel, triton.cdiv(n, BLOCK), *args, constants=(borders,), num_warps=WARPS)


@lru_cache(maxsize=4096)
def _backward(n: int, unit: Pointwise, device: torch.device) -> Launch:
    levels = torch.tensor(unit.buckets.values, dtype=torch.float32, device=device)
    args = (n, rows_of(n), unit.buckets.bits, BLOCK)
    return Launch(_backward_kernel, triton.cdiv(n, BLOCK), *args, constants=(levels,), num_warps=WARPS)


@triton.jit
def _logistic(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _value(x, FUNCTION: tl.constexpr):
    """f(x) in float32."""
    if FUNCTION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the logistic function of 2u
        y = x * _logistic(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif FUNCTION == "silu":
        y = x * _logistic(x)
    elif FUNCTION == "quick_gelu":
        y = x * _logistic(1.702 * x)
    elif FUNCTION == "sigmoid":
        y = _logistic(x)
    elif FUNCTION == "hardswish":
        y = x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) * (1.0 / 6.0)
    else:
        tl.static_assert(FUNCTION == "mish", "a name in FUSED that has no formula here")
        e = tl.exp(tl.minimum(x, 20.0))  # tanh(log(1 + e)) = (e^2 + 2e) / (e^2 + 2e + 2)
        y = x * (e * (e + 2.0) / (e * (e + 2.0) + 2.0))
    return y


@triton.jit(do_not_specialize=["n", "rows"])
def _forward_kernel(
    x_ptr,
    y_ptr,
    codes_ptr,
    t_ptr,
    n,
    rows,
    centre,
    ABSOLUTE: tl.constexpr,
    BITS: tl.constexpr,
    FUNCTION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    cell = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    whole = (tl.program_id(0) + 1).to(tl.int64) * BLOCK <= n
    if whole:  # noqa: SIM108
        x = float32(tl.load(x_ptr + cell))
    else:
        x = float32(tl.load(x_ptr + cell, mask=cell < n, other=0.0))
    at = tl.abs(x - centre) if ABSOLUTE else x
    codes = tl.where(cell < n, code_of(at, t_ptr, BITS), 0)
    y = rounded(_value(x, FUNCTION), y_ptr.dtype.element_ty)
    if whole:
        tl.store(y_ptr + cell, y)
    else:
        tl.store(y_ptr + cell, y, mask=cell < n)
    store_codes(codes_ptr, codes, row, row < rows, rows.to(tl.int64), BITS)


@triton.jit(do_not_specialize=["n", "rows"])
def _backward_kernel(dy_ptr, dx_ptr, codes_ptr, v_ptr, n, rows, BITS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    cell = row[:, None] * 8 + tl.arange(0, 8)[None, :]
    levels = tl.load(v_ptr + load_codes(codes_ptr, row, row < rows, rows.to(tl.int64), BITS))
    if (tl.program_id(0) + 1).to(tl.int64) * BLOCK <= n:
        dx = float32(tl.load(dy_ptr + cell)) * levels
        tl.store(dx_ptr + cell, rounded(dx, dx_ptr.dtype.element_ty))
    else:
        dx = float32(tl.load(dy_ptr + cell, mask=cell < n, other=0.0)) * levels
        tl.store(dx_ptr + cell, rounded(dx, dx_ptr.dtype.element_ty), mask=cell < n)
