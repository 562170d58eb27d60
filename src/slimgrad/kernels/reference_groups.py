"""Group quantization in plain torch: what the Triton twin must equal bit for bit. See groups.py for the format."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slimgrad.kernels.geometry import LANES, ROUNDS, THREADS, TILE, Layout, check_dense
from slimgrad.kernels.groups import PLANES, SPECIALS, TAME, WILD_PART, Groups, check_groups, check_packed
from slimgrad.kernels.reference import chunks, unwoven, woven
from slimgrad.kernels.reference_gated import FUNCTIONS

GOLDEN = 0x9E3779B9
"""2**32 over the golden ratio: multiples of it are spread evenly."""
RAISE = 128.0
"""Added to a fraction, so that its 16 bits are the last ones of a float32."""
HASH_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


def pack_groups(x: Tensor, how: Groups) -> Tensor:
    """The dense tensor `x`, in the order of its memory, as few-bit codes with an offset and a step per group."""
    check_groups(how, x.dtype)
    check_dense("pack_groups", x)
    n = x.numel()
    x = x.detach().as_strided((n,), (1,))
    out = torch.empty(how.nbytes(n), dtype=torch.uint8, device=x.device)
    planes, scales = _group_views(out, n, how)
    for first, last in chunks(n):
        values, exists = _tiled(x[first:last], how.group)
        span = slice(how.count(first), how.count(last))
        numbers = torch.arange(span.start, span.stop, device=x.device)
        codes, scales[span] = _encode(values.float(), exists, numbers, how, x.dtype)  # `values` are a copy
        shift = 0
        for width, plane in zip(PLANES[how.bits], planes, strict=True):
            plane[span] = woven(codes, shift, width)
            shift += width
    return out


def grouping(layout: Layout, how: Groups, function: str) -> Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]:
    """f(x) and x in groups, for one layout."""

    def together(x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        packed, y = pack_groups(x, how), FUNCTIONS[function].value(x.detach())
        return (y if out is None else out.copy_(y)), packed

    return together


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
        codes = unwoven(planes[0][span], PLANES[how.bits][0])
        for width, plane in zip(PLANES[how.bits][1:], planes[1:], strict=True):
            codes |= unwoven(plane[span], width) << how.bits - width
        values = _decode(codes, scales[span, None], how, dtype).view(-1, THREADS, ROUNDS, LANES).transpose(1, 2)
        if last - first == values.numel():
            out[first:last].view(values.shape).copy_(values)
        else:
            out[first:last] = values.reshape(-1)[: last - first]
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
    """Codes (uint8) and scale words of the groups of float32, once `dtype`, in the rows of `x`; may overwrite `x`."""
    if exists is None and not x.is_cuda:  # on a CPU a look costs no wait, and saves half the passes
        low, high = x.aminmax(dim=1, keepdim=True)
        if low.min() >= -TAME[dtype] and high.max() <= TAME[dtype]:
            return _encode_tame(x, low, high, numbers, how, dtype)
    wild = ~(x.abs() <= TAME[dtype])
    counted = x.abs() <= torch.finfo(torch.float32).max
    if exists is not None:
        wild, counted = wild & exists, counted & exists
    wild = wild.any(1, keepdim=True)
    none = ~counted.any(1, keepdim=True)
    low = torch.where(counted, x, math.inf).amin(1, keepdim=True).masked_fill(none, 0.0)
    high = torch.where(counted, x, -math.inf).amax(1, keepdim=True).masked_fill(none, 0.0)
    offset, step = _scale(low, high, torch.where(wild, how.factor(wild=True), how.factor(wild=False)), how, dtype)
    scales = _scale_words(offset, step) | wild.int() << 31
    part = torch.where(wild, WILD_PART, 1.0)
    place = (x * part - offset * part) * torch.where(step > 0, 1.0 / step, 0.0) / part
    if how.stochastic:
        place = _drawn_down(place, scales, numbers[:, None], how)
    last = torch.where(wild, how.last(wild=True), how.last(wild=False))
    codes = place.round().clamp(min=0).minimum(last).nan_to_num(0.0) + torch.where(wild, SPECIALS, how.first)
    for code, kind in _specials(x, how):
        codes = codes.masked_fill(kind, code)
    codes = codes.to(torch.uint8)
    return codes if exists is None else codes.masked_fill(~exists, 0), scales.squeeze(1)


def _encode_tame(
    x: Tensor, low: Tensor, high: Tensor, numbers: Tensor, how: Groups, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The same where no number is infinite or huge, so that rounding cannot leave the range."""
    offset, step = _scale(low, high, how.factor(wild=False), how, dtype)
    scales = _scale_words(offset, step)
    zero = x == 0 if how.zeros else None
    place = x.sub_(offset).mul_(torch.where(step > 0, 1.0 / step, 0.0))
    if how.stochastic:
        place = _drawn_down(place, scales, numbers[:, None], how).clamp_(max=how.last(wild=False))
    if zero is None:
        return place.round_().to(torch.uint8), scales.squeeze(1)
    return place.clamp_(min=0).round_().to(torch.uint8).add_(1).masked_fill_(zero, 0), scales.squeeze(1)


def _specials(x: Tensor, how: Groups) -> list[tuple[int, Tensor]]:
    """Codes that stand for no number, and where they stand."""
    infinite = [(1, x == -math.inf), (2, x == math.inf)]
    return [(0, x == 0), (1, x.isnan()), *infinite] if how.zeros else [(0, x.isnan()), *infinite]


def _scale(low: Tensor, high: Tensor, factor: Tensor | float, how: Groups, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Offset and step of each group; the step is found by halves, because the range itself may overflow."""
    offset = torch.zeros_like(low) if how.zeros else _down_to_bf16(low + 0.0)  # -0.0 becomes 0.0: twins find either
    step = (high * 0.5 - offset * 0.5) * factor
    rounded = (step.view(torch.int32) + 0xFFFF & -0x10000).clamp(max=0x7F7F0000).view(torch.float32)
    step = torch.where(step > 0, rounded.clamp(min=how.least_step(dtype)), 0.0)
    return step * 0.5 if how.zeros else offset, step


def _scale_words(offset: Tensor, step: Tensor) -> Tensor:
    return _bf16_bits(offset) | _bf16_bits(step) << 16


def _down_to_bf16(x: Tensor) -> Tensor:
    """The largest bfloat16 that is not above x, in float32; never -inf."""
    bits = x.view(torch.int32)
    towards_zero = bits & -0x10000
    away = (bits + 0xFFFF & -0x10000).clamp(max=-0x00810000)  # 0xFF7F0000, the least finite one
    return torch.where(x < 0, away, towards_zero).view(torch.float32)


def _bf16_bits(x: Tensor) -> Tensor:
    """The upper half of float32's bits, which must be all of them."""
    return x.view(torch.int32) >> 16 & 0xFFFF


def _drawn_down(place: Tensor, scales: Tensor, numbers: Tensor, how: Groups) -> Tensor:
    """`place` plus a fraction, rounded down; see NOTE [Random numbers without a state]."""
    keys = hashed(scales.long() & 0xFFFFFFFF ^ hashed(numbers + how.seed & 0xFFFFFFFF))
    pairs = torch.arange(how.group // 2, device=scales.device) * GOLDEN
    drawn = mixed(keys + pairs & 0xFFFFFFFF)
    fractions = torch.stack([drawn & 0xFFFF, drawn >> 16], dim=2).flatten(1).float() * 2.0**-16
    return (place + (fractions + RAISE)).floor() - RAISE


def mixed(x: Tensor) -> Tensor:
    """Half of `hashed`."""
    x = x ^ x >> 16
    x = x * HASH_MULTIPLIERS[0] & 0xFFFFFFFF
    return x ^ x >> 15


def hashed(x: Tensor) -> Tensor:
    """Every bit of a 32-bit number (held in int64) mixed into every other ("lowbias32")."""
    x = mixed(x) * HASH_MULTIPLIERS[1] & 0xFFFFFFFF
    return x ^ x >> 16


def _decode(codes: Tensor, scales: Tensor, how: Groups, dtype: torch.dtype) -> Tensor:
    """The values, in float32, that the rows of codes stand for."""
    offset = (scales << 16).view(torch.float32)
    step = (scales & 0x7FFF0000).view(torch.float32)
    wild = scales < 0
    if not scales.is_cuda and not wild.any():
        values = codes.float().sub_(how.first).mul_(step).add_(offset)
        return values.masked_fill_(codes == 0, 0.0) if how.zeros else values
    part = torch.where(wild, WILD_PART, 1.0)
    largest = torch.finfo(dtype).max * part
    base = torch.where(wild, SPECIALS, how.first)
    values = (offset * part + (codes - base) * (step * part)).clamp(-largest, largest) / part
    if how.zeros:
        values = values.masked_fill(codes == 0, 0.0)
    for code, special in enumerate((math.nan, -math.inf, math.inf) if not how.zeros else (0.0, math.nan, math.inf)):
        values = values.masked_fill(wild & (codes == code), special)
    return values
