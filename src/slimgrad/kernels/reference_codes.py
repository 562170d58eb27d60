"""Few-bit codes in plain torch: what the Triton twin must equal bit for bit. See codes.py for the format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimgrad.kernels.codes import ROW, Buckets, Pointwise, check_codes, check_floating, code_bytes, rows_of
from slimgrad.kernels.geometry import check_dense
from slimgrad.kernels.reference import chunks, unwoven, woven

FEW = 15
"""Borders that are compared one by one: on a CPU it takes a quarter of the time that searching among 7 does."""


def pack_codes(x: Tensor, buckets: Buckets) -> Tensor:
    """The codes of a dense tensor, in the order of its memory."""
    check_floating(x)
    check_dense("pack_codes", x)
    n = x.numel()
    x = x.detach().as_strided((n,), (1,))
    out = torch.empty(code_bytes(n, buckets.bits), dtype=torch.uint8, device=x.device)
    planes = _planes(out, n, buckets)
    precision = torch.promote_types(x.dtype, torch.float32)
    borders = torch.tensor(buckets.borders, dtype=precision, device=x.device)
    for first, last in chunks(n):
        at = x[first:last].to(precision)
        at = (at - buckets.centre).abs_() if buckets.absolute else at
        codes = _codes(at, borders)
        codes = torch.nn.functional.pad(codes, (0, -codes.numel() % ROW)).view(-1, ROW)
        shift = 0
        for width, plane in zip(buckets.planes, planes, strict=True):
            plane[first // ROW : rows_of(last)] = woven(codes, shift, width)
            shift += width
    return out


def _codes(at: Tensor, borders: Tensor) -> Tensor:
    """How many borders are not at or above each element, as uint8."""
    if len(borders) > FEW:
        return torch.bucketize(at, borders, out_int32=True).to(torch.uint8)
    codes = torch.full(at.shape, len(borders), dtype=torch.uint8, device=at.device)
    for border in borders:
        codes -= (at <= border).view(torch.uint8)
    return codes


def unpack_codes(
    packed: Tensor, shape: Sequence[int], stride: Sequence[int], buckets: Buckets, dtype: torch.dtype
) -> Tensor:
    """The value of each code, as a tensor of that dense layout."""
    n = math.prod(shape)
    check_codes(packed, n, buckets.bits)
    out = torch.empty(n, dtype=dtype, device=packed.device)
    planes = _planes(packed, n, buckets)
    values = torch.tensor(buckets.values, dtype=torch.float64, device=packed.device).to(dtype)
    for first, last in chunks(n):
        span, shift = slice(first // ROW, rows_of(last)), 0
        codes = torch.zeros(span.stop - span.start, ROW, dtype=torch.uint8, device=packed.device)
        for width, plane in zip(buckets.planes, planes, strict=True):
            codes |= unwoven(plane[span], width) << shift
            shift += width
        out[first:last] = values.index_select(0, codes.view(-1)[: last - first].int())
    return out.as_strided(shape, stride)


def pointwise_forward(x: Tensor, unit: Pointwise, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """f(x), and the codes of a dense x. With `out=x` in the place of x."""
    codes = pack_codes(x, unit.buckets)
    y = unit.f(x.detach())
    return (y if out is None else out.copy_(y)), codes


def pointwise_backward(codes: Tensor, dy: Tensor, unit: Pointwise) -> Tensor:
    """level * dY, for a dY that lies in memory as x did."""
    levels = unpack_codes(codes, dy.shape, dy.stride(), unit.buckets, torch.promote_types(dy.dtype, torch.float32))
    return levels.mul_(dy).to(dy.dtype)


def _planes(packed: Tensor, n: int, buckets: Buckets) -> list[Tensor]:
    """Each plane as a row of bytes per row of elements."""
    sizes = [width * rows_of(n) for width in buckets.planes]
    parts = packed.split(sizes)
    return [part.view(rows_of(n), width) for part, width in zip(parts, buckets.planes, strict=True)]
