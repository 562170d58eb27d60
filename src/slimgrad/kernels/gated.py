"""Gated units f(a) * b in Triton: the twin of reference_gated.py, to rounding.

One pass each way: forward reads a and b and writes y, backward reads a, b and dY and writes da and db. What has no gaps
is one long row. The halves of a projection are taken row by row, as they lie, without a copy.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimgrad.kernels import reference_gated
from slimgrad.kernels.formulas import value_and_slope
from slimgrad.kernels.geometry import Layout
from slimgrad.kernels.halves import is_native
from slimgrad.kernels.launch import device_of
from slimgrad.kernels.reference_gated import check_gated
from slimgrad.kernels.tiles import float32, rounded

BLOCK = 1024
"""Elements of a program, 8 for each of its threads: words of 16 bytes of every 16-bit tensor."""
WARPS = 4

COMPUTED = (torch.float32, torch.bfloat16, torch.float16)
"""What is computed in float32. Double precision: the reference."""


def gated_forward(a: Tensor, b: Tensor, function: str) -> Tensor:
    check_gated(function, a, b)
    if a.dtype not in COMPUTED:
        return reference_gated.gated_forward(a, b, function)
    layout = Layout.of(a)
    y = layout.empty()
    if y.numel():
        rows = _rows(a.detach(), b.detach(), layout)
        with device_of(a):
            _forward_kernel[(rows.programs,)](
                rows.a, rows.b, y, *rows[2:], function, is_native(a.device), BLOCK, num_warps=WARPS
            )
    return y


def gated_backward(a: Tensor, b: Tensor, dy: Tensor, function: str) -> tuple[Tensor, Tensor]:
    check_gated(function, a, b, dy)
    if a.dtype not in COMPUTED:
        return reference_gated.gated_backward(a, b, dy, function)
    layout = Layout.of(a)
    da, db = layout.empty(), layout.empty()
    if da.numel():
        rows, dy = _rows(a.detach(), b.detach(), layout), layout.dense(dy.detach())
        with device_of(a):
            _backward_kernel[(rows.programs,)](
                rows.a, rows.b, dy, da, db, *rows[2:], function, is_native(a.device), BLOCK, num_warps=WARPS
            )
    return da, db


# --- how a and b lie in memory ----------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Rows of consecutive elements, each row's beginning a pitch after that of the one before."""

    a: Tensor
    b: Tensor
    columns: int
    a_pitch: int
    b_pitch: int

    @property
    def programs(self) -> int:
        return self.a.numel() // self.columns * -(-self.columns // BLOCK)


def _rows(a: Tensor, b: Tensor, layout: Layout) -> _Rows:
    """One long row if both have the layout; rows as they lie, if those are not too short; else a row of copies."""
    n = a.numel()
    if a.stride() == b.stride() == layout.stride:
        return _Rows(a, b, n, n, n)
    columns, a_pitch, b_pitch = a.shape[-1], _pitch(a), _pitch(b)
    if a_pitch is None or b_pitch is None or 2 * columns < BLOCK or not _is_row_major(layout):
        return _Rows(layout.dense(a), layout.dense(b), n, n, n)
    return _Rows(a, b, columns, a_pitch, b_pitch)


def _pitch(t: Tensor) -> int | None:
    """Elements from each row (the last dimension) to the next; None if that is not one number, or rows have gaps."""
    if t.shape[-1] > 1 and t.stride(-1) != 1:
        return None
    outer = [(size, step) for size, step in zip(t.shape[:-1], t.stride()[:-1], strict=True) if size > 1]
    pitch = expected = outer[-1][1] if outer else t.shape[-1]
    for size, step in reversed(outer):
        if step != expected:
            return None
        expected *= size
    return pitch


def _is_row_major(layout: Layout) -> bool:
    return torch.empty_strided(layout.shape, layout.stride, device="meta").is_contiguous()


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _operands(a_ptr, b_ptr, columns, a_pitch, b_pitch, BLOCK: tl.constexpr):
    """The program's part of a and b, where it lies in what has no gaps, and which elements exist."""
    blocks = tl.cdiv(columns, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < columns
    a = float32(tl.load(a_ptr + row * a_pitch + at, mask=real, other=0.0))
    b = float32(tl.load(b_ptr + row * b_pitch + at, mask=real, other=0.0))
    return a, b, row * columns + at, real


@triton.jit
def _forward_kernel(
    a_ptr,
    b_ptr,
    y_ptr,
    columns,
    a_pitch,
    b_pitch,
    FUNCTION: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    OUT: tl.constexpr = y_ptr.dtype.element_ty
    a, b, at, real = _operands(a_ptr, b_ptr, columns, a_pitch, b_pitch, BLOCK)
    value, _ = value_and_slope(a, FUNCTION, tl.float32 == OUT, NATIVE)
    tl.store(y_ptr + at, rounded(value * b, OUT), mask=real)


@triton.jit
def _backward_kernel(
    a_ptr,
    b_ptr,
    dy_ptr,
    da_ptr,
    db_ptr,
    columns,
    a_pitch,
    b_pitch,
    FUNCTION: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    OUT: tl.constexpr = da_ptr.dtype.element_ty
    a, b, at, real = _operands(a_ptr, b_ptr, columns, a_pitch, b_pitch, BLOCK)
    dy = float32(tl.load(dy_ptr + at, mask=real, other=0.0))
    value, slope = value_and_slope(a, FUNCTION, tl.float32 == OUT, NATIVE)
    tl.store(da_ptr + at, rounded(dy * b * slope, OUT), mask=real)
    tl.store(db_ptr + at, rounded(dy * value, OUT), mask=real)
