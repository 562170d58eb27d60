"""Group quantization in plain torch: what the Triton twin must equal bit for bit. See groups.py for the format."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimgrad.kernels.groups import (
    LANES,
    PLANES,
    ROUNDS,
    SPECIALS,
    TAME,
    THREADS,
    TILE,
    Groups,
    check_dense,
    check_groups,
    check_packed,
)
from slimgrad.kernels.reference import chunks

GOLDEN = 0x9E3779B9
"""2**32 over the golden ratio: multiples of it are spread evenly."""
HASH_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


def pack_groups(x: Tensor, how: Groups) -> Tensor:
    """The dense tensor `x`, in the order of its memory, as few-bit codes with an offset and a step per group."""
    check_groups(how, x.dtype)
    check_dense(x)
    n = x.numel()
    x = x.detach().as_strided((n,), (1,))
    out = torch.empty(how.nbytes(n), dtype=torch.uint8, device=x.device)
    planes, scales = _group_views(out, n, how)
    for first, last in chunks(n):
        values, exists = _tiled(x[first:last], how.group)
        span = slice(how.count(first), how.count(last))
        numbers = torch.arange(span.start, span.stop, device=x.device)
        codes, scales[span] = _encode(values.float(), exists, numbers, how, x.dtype)
        shift = 0
        for width, plane in zip(PLANES[how.bits], planes, strict=True):
            plane[span] = _woven(codes >> shift & (1 << width) - 1, width)
            shift += width
    return out


def unpack_groups(
    packed: Tensor, shape: Sequence[int], stride: Sequence[int], how: Groups, dtype: torch.dtype
) -> Tensor:
    """The inverse of `pack_groups`, each element within half a step of its group (a whole one if stochastic)."""
    n = math.prod(shape)
    check_groups(how, dtype)
    check_packed(packed, n, how.nbytes(n))
    out = torch.empty(n, dtype=dtype, device=packed.device)
    planes, scales = _group_views(packed, n, how)
    for first, last in chunks(n):
        span = slice(how.count(first), how.count(last))
        codes, shift = torch.zeros((), dtype=torch.int32, device=packed.device), 0
        for width, plane in zip(PLANES[how.bits], planes, strict=True):
            codes = codes | _unwoven(plane[span], width) << shift
            shift += width
        values = _decode(codes, scales[span, None], how, dtype)
        out[first:last] = values.view(-1, THREADS, ROUNDS, LANES).transpose(1, 2).reshape(-1)[: last - first]
    return out.as_strided(shape, stride)


def _group_views(packed: Tensor, n: int, how: Groups) -> tuple[list[Tensor], Tensor]:
    """The planes of codes, a row of bytes per group, and the offsets and steps, an int32 per group."""
    planes, start = [], 0
    for width in PLANES[how.bits]:
        size = how.count(n) * how.plane_bytes(width)
        planes.append(packed[start : start + size].view(how.count(n), how.plane_bytes(width)))
        start += size
    return planes, packed[start:].view(torch.int32)


def _tiled(x: Tensor, group: int) -> tuple[Tensor, Tensor | None]:
    """A row per group, see NOTE [Tiles] in groups.py; and where the last tile is filled up, which elements exist."""
    missing, exists = -x.numel() % TILE, None
    if missing:
        exists = torch.arange(x.numel() + missing, device=x.device) < x.numel()
        exists = _tiled(exists, group)[0]
        x = torch.cat([x, x.new_zeros(missing)])
    return x.view(-1, ROUNDS, THREADS, LANES).transpose(1, 2).reshape(-1, group), exists


def _encode(
    x: Tensor, exists: Tensor | None, numbers: Tensor, how: Groups, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes (int32) and scale words of the groups of float32, once `dtype`, in the rows of `x`."""
    wild = ~(x.abs() <= TAME[dtype])
    counted = x.abs() <= torch.finfo(torch.float32).max
    if exists is not None:
        wild, counted = wild & exists, counted & exists
    wild = wild.any(1, keepdim=True)
    none = ~counted.any(1, keepdim=True)
    low = torch.where(counted, x, math.inf).amin(1, keepdim=True).masked_fill(none, 0.0)
    high = torch.where(counted, x, -math.inf).amax(1, keepdim=True).masked_fill(none, 0.0)
    offset = torch.zeros_like(low) if how.zeros else _down_to_bf16(low + 0.0)  # -0.0 becomes 0.0: twins find either
    step = _step(offset, high, wild, how, dtype)
    offset = step * 0.5 if how.zeros else offset
    scales = _bf16_bits(offset) | _bf16_bits(step) << 16 | wild.int() << 31
    place = (x - offset) * torch.where(step > 0, 1.0 / step, 0.0)
    if how.stochastic:
        place = (place + _fractions(scales, numbers[:, None], how)).floor()
    last = torch.where(wild, how.last(wild=True), how.last(wild=False))
    codes = place.round().clamp(min=0).minimum(last).nan_to_num(0.0).int() + torch.where(wild, SPECIALS, how.first)
    for code, kind in _specials(x, how):
        codes = codes.masked_fill(kind, code)
    return codes if exists is None else codes.masked_fill(~exists, 0), scales.squeeze(1)


def _specials(x: Tensor, how: Groups) -> list[tuple[int, Tensor]]:
    """Codes that stand for no number, and where they stand."""
    infinite = [(1, x == -math.inf), (2, x == math.inf)]
    return [(0, x == 0), (1, x.isnan()), *infinite] if how.zeros else [(0, x.isnan()), *infinite]


def _step(offset: Tensor, high: Tensor, wild: Tensor, how: Groups, dtype: torch.dtype) -> Tensor:
    """The step of each group, rounded up; by halves, because the range itself may overflow."""
    step = (high * 0.5 - offset * 0.5) * torch.where(wild, how.factor(wild=True), how.factor(wild=False))
    rounded = (step.view(torch.int32) + 0xFFFF & -0x10000).clamp(max=0x7F7F0000).view(torch.float32)
    return torch.where(step > 0, rounded.clamp(min=how.least_step(dtype)), 0.0)


def _down_to_bf16(x: Tensor) -> Tensor:
    """The largest bfloat16 that is not above x, in float32; never -inf."""
    bits = x.view(torch.int32)
    towards_zero = bits & -0x10000
    away = (bits + 0xFFFF & -0x10000).clamp(max=-0x00810000)  # 0xFF7F0000, the least finite one
    return torch.where(x < 0, away, towards_zero).view(torch.float32)


def _bf16_bits(x: Tensor) -> Tensor:
    """The upper half of float32's bits, which must be all of them."""
    return x.view(torch.int32) >> 16 & 0xFFFF


def _fractions(scales: Tensor, numbers: Tensor, how: Groups) -> Tensor:
    """A number in [0, 1) for each element of the groups; see NOTE [Random numbers without a state]."""
    keys = _hash(scales.long() & 0xFFFFFFFF ^ _hash(numbers + how.seed & 0xFFFFFFFF))
    places = torch.arange(how.group, device=scales.device) * GOLDEN
    return (_hash(keys + places & 0xFFFFFFFF) >> 8).float() * 2.0**-24


def _hash(x: Tensor) -> Tensor:
    """Every bit of a 32-bit number (held in int64) mixed into every other ("lowbias32")."""
    x = x ^ x >> 16
    x = x * HASH_MULTIPLIERS[0] & 0xFFFFFFFF
    x = x ^ x >> 15
    x = x * HASH_MULTIPLIERS[1] & 0xFFFFFFFF
    return x ^ x >> 16


def _woven(codes: Tensor, width: int) -> Tensor:
    """Rows of codes of `width` bits as rows of bytes, the first code in the low bits."""
    per_byte = 8 // width
    if per_byte == 1:
        return codes.to(torch.uint8)
    lanes = torch.arange(per_byte, device=codes.device, dtype=torch.int32) * width
    return (codes.view(len(codes), -1, per_byte) << lanes).sum(2).to(torch.uint8)


def _unwoven(rows: Tensor, width: int) -> Tensor:
    """The inverse of `_woven`, as int32."""
    per_byte = 8 // width
    lanes = torch.arange(per_byte, device=rows.device, dtype=torch.int32) * width
    return (rows.int()[:, :, None] >> lanes & (1 << width) - 1).flatten(1)


def _decode(codes: Tensor, scales: Tensor, how: Groups, dtype: torch.dtype) -> Tensor:
    """The values, in float32, that the rows of codes stand for."""
    offset = (scales << 16).view(torch.float32)
    step = (scales & 0x7FFF0000).view(torch.float32)
    wild = scales < 0
    base = torch.where(wild, SPECIALS, how.first)
    largest = torch.finfo(dtype).max
    values = (offset + (codes - base) * step).clamp(-largest, largest)
    if how.zeros:
        values = values.masked_fill(codes == 0, 0.0)
    for code, special in enumerate((math.nan, -math.inf, math.inf) if not how.zeros else (0.0, math.nan, math.inf)):
        values = values.masked_fill(wild & (codes == code), special)
    return values
