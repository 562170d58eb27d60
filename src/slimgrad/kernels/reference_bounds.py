"""Values within a bound in plain torch: the reference for kernels/bounding.py. See bounds.py."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels.bounds import (
    BLOCK,
    BLOCKS,
    LEAST_MIDDLE,
    LIMIT,
    MANTISSA,
    MASK_UNITS,
    MASKED,
    MOST_WIDTH,
    NOISE_BITS,
    PREDICTED,
    RAW,
    SIGNED,
    SIZE_SHIFT,
    TILE,
    UNIT_BITS,
    UNIT_SHIFT,
    Coding,
    Extent,
)
from slimgrad.kernels.geometry import Layout, check_dense
from slimgrad.kernels.reference_groups import GOLDEN, mixed

CHUNK = 128 * TILE
"""Elements that are treated at once, so that what is needed meanwhile stays small."""


class BoundedParts(NamedTuple):
    """What is kept; see bounds.py."""

    units: Tensor
    heads: Tensor
    places: Tensor
    bound: Tensor


def pack_bounded(x: Tensor, bound: Tensor, how: Coding, capacity: int | None = None) -> BoundedParts:
    """A dense tensor, in the order of its memory, within a bound of one float32. With a capacity, `units` has so many:
    what does not fit is missing, and the number of units that are used says so.
    """
    check_dense("pack_bounded", x)
    flat = x.detach().as_strided((x.numel(),), (1,))
    firsts = range(0, max(1, len(flat)), CHUNK)
    parts = [_pack_some(flat[first : first + CHUNK], first, bound, how) for first in firsts]
    units, heads = torch.cat([part.units for part in parts]), torch.cat([part.heads for part in parts])
    used = torch.cat([part.places[-1:] for part in parts]).cumsum(0, dtype=torch.int32)
    before = torch.nn.functional.pad(used, (1, 0))[:-1]
    places = [part.places[:-1] + first for part, first in zip(parts, before, strict=True)]
    if capacity is not None:
        units = torch.nn.functional.pad(units, (0, max(0, capacity - len(units))))[:capacity]
    return BoundedParts(units, heads, torch.cat([*places, used[-1:]]), bound)


def _pack_some(x: Tensor, first: int, bound: Tensor, how: Coding) -> BoundedParts:
    tiles = _tiles(x)
    extent = Extent(x.numel(), x.element_size())
    exponent = tiles.float().abs().nan_to_num(0, 0, 0).amax((1, 2)).view(torch.int32) >> 23
    step = step_of(bound, exponent, x.dtype)[:, None, None]
    at = torch.arange(tiles.numel(), device=x.device).view(tiles.shape)
    codes, fits = _codes(tiles, step, bound, how, shifts(at + first, how))
    outside = at >= x.numel()
    heads = _measured(codes, fits, extent.raw_units)
    predicted = torch.zeros(extent.tiles, dtype=torch.bool, device=x.device)
    if how.tries[1]:
        before = torch.nn.functional.pad(codes.flatten(1), (1, 0))[:, :-1].view(codes.shape)
        differences = (codes - before).masked_fill(outside, 0)
        ahead = _measured(differences, fits, extent.raw_units)
        predicted = ~(ahead & RAW != 0).any(1)
        if how.tries[0]:
            predicted &= (ahead >> SIZE_SHIFT).sum(1) < (heads >> SIZE_SHIFT).sum(1)
        heads = torch.where(predicted[:, None], ahead, heads)
        codes = torch.where(predicted[:, None, None], differences, codes)
    units, places = _written(codes, heads, tiles)
    heads = torch.cat([heads, (exponent | predicted * PREDICTED)[:, None]], 1)
    return BoundedParts(units, _int16(heads.flatten()), places, bound)


def unpack_bounded(kept: BoundedParts, layout: Layout, how: Coding) -> Tensor:
    """What was packed, as a tensor of that dense layout."""
    n = math.prod(layout.shape)
    check_bounded(kept, n, layout.dtype)
    out = layout.empty()
    flat = out.as_strided((n,), (1,))
    stream = torch.nn.functional.pad(kept.units, (0, 2))
    for first in range(0, n, CHUNK):
        target = flat[first : first + CHUNK]
        tiles = slice(first // TILE, first // TILE + math.ceil(len(target) / TILE))
        heads = kept.heads.view(-1, BLOCKS + 1)[tiles]
        found = _unpack_some(stream, heads, kept.places[tiles], kept.bound, first, layout.dtype, how)
        target.copy_(found[: len(target)])
    return out


def _unpack_some(
    units: Tensor, heads: Tensor, places: Tensor, bound: Tensor, number: int, dtype: torch.dtype, how: Coding
) -> Tensor:
    """Of some tiles, from this element on."""
    heads = heads.int() & 0xFFFF
    exponent, predicted = heads[:, -1] & 0xFF, heads[:, -1] & PREDICTED != 0
    heads = heads[:, :-1]
    sizes = heads >> SIZE_SHIFT
    begin = sizes.cumsum(1) - sizes
    # On a GPU tiles lie in any order; here each is read from where it begins, as if all lay one behind the other.
    first, last = int(places.min()), int((places + sizes.sum(1)).max())
    begin = begin + (places - first)[:, None].long()
    stream = units[first : last + 2].long() & 0xFFFF
    codes = _read(heads, begin, stream)
    ahead = codes.flatten(1).cumsum(1).view(codes.shape)
    codes = torch.where(predicted[:, None, None], ahead, codes)
    step = step_of(bound, exponent.int(), dtype)[:, None, None]
    at = torch.arange(codes.numel(), device=units.device).view(codes.shape) + number
    values = values_of(codes.int(), step, how, shifts(at, how)).to(dtype)
    raw = heads & RAW != 0
    if bool(raw.any()):
        values[raw] = _raw_values(begin[raw], stream, dtype)
    return values.flatten()


def step_of(bound: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """The step of codes, by the exponent of the largest magnitude: see NOTE [A bound that holds]."""
    slack = _power(exponent - (MANTISSA[dtype] + 1)) + _power(exponent - NOISE_BITS)
    return torch.maximum(bound - slack, bound * 0.5) * 2


def values_of(codes: Tensor, step: Tensor, how: Coding, shift: Tensor | float) -> Tensor:
    """What codes stand for, in float32: the middle of an interval."""
    if not how.between:
        return codes.float() * step
    middle = codes.abs().float() - 0.5 - shift
    if how.zeros:
        middle = middle.clamp(min=LEAST_MIDDLE)
    return (codes.sign().float() * (middle * step)).masked_fill(codes == 0, 0)


def shifts(at: Tensor, how: Coding) -> Tensor | float:
    """Of each element's intervals, by where it is; as a part of a step."""
    return (mixed(at * GOLDEN & 0xFFFFFFFF) >> 16).float() * 2.0**-16 if how.dither else 0.0


def inverse(step: Tensor) -> Tensor:
    """Of a step; 0 of none, so that nothing but zeros has a code."""
    return torch.where(step > 0, 1 / step, 0)


def _codes(tiles: Tensor, step: Tensor, bound: Tensor, how: Coding, shift: Tensor | float) -> tuple[Tensor, Tensor]:
    """Codes, and of each block whether they are within the bound."""
    x = tiles.float()
    scaled = (x.nan_to_num(0, 0, 0) * inverse(step)).clamp(-2.0 * LIMIT, 2.0 * LIMIT)
    codes = (scaled + 0.5).floor()
    if how.between:
        codes = x.sign().nan_to_num(0) * ((scaled.abs() + shift).floor() + 1)
    codes = codes.int()
    back = values_of(codes, step, how, shift).to(tiles.dtype).float()
    good = ((x - back).abs() <= bound) & (codes.abs() <= LIMIT)
    if how.zeros:
        good &= x.sign() == back.sign()
    return codes, good.all(2)


def _measured(codes: Tensor, fits: Tensor, raw_units: int) -> Tensor:
    """The heads of blocks: how each is told in the fewest units."""
    size, count = codes.abs(), (codes != 0).sum(2)
    signed = (codes < 0).any(2)
    largest = torch.where(signed[:, :, None], 2 * size - (codes < 0).int(), size).amax(2)  # of a plain block
    masked_largest = torch.where(signed[:, :, None], 2 * (size - 1) + (codes < 0).int(), size - 1).amax(2)
    width, masked_width = _bit_length(largest), _bit_length(masked_largest.clamp(min=0))
    units, masked_units = width * MASK_UNITS, MASK_UNITS + -(-count * masked_width // UNIT_BITS)
    masked = masked_units < units
    width, units = torch.where(masked, masked_width, width), torch.where(masked, masked_units, units)
    raw = ~fits | (width > MOST_WIDTH) | (units >= raw_units)
    heads = width | masked * MASKED | signed * SIGNED
    units = torch.where(raw, raw_units, units)
    return torch.where(raw, RAW, heads) | units << SIZE_SHIFT


def _written(codes: Tensor, heads: Tensor, tiles: Tensor) -> tuple[Tensor, Tensor]:
    """All units, and the places of tiles."""
    heads, codes = heads.flatten(), codes.view(-1, BLOCK)
    sizes = (heads >> SIZE_SHIFT).long()
    begin = sizes.cumsum(0) - sizes
    total = int(sizes.sum())
    out = torch.zeros(total + 2, dtype=torch.int64, device=tiles.device)
    raw = heads & RAW != 0
    masked = (heads & MASKED != 0) & ~raw
    some = codes != 0
    _write_masks(out, begin[masked], some[masked])
    _write_codes(out, begin + masked * MASK_UNITS, heads, codes, some, masked, raw)
    if bool(raw.any()):
        _write_raw(out, begin[raw], tiles.view(-1, BLOCK)[raw])
    first = begin[::BLOCKS].to(torch.int32)
    return _int16(out[:total]), torch.cat([first, torch.tensor([total], dtype=torch.int32, device=first.device)])


def _write_masks(out: Tensor, begin: Tensor, some: Tensor) -> None:
    places = torch.arange(UNIT_BITS, device=out.device)
    units = (some.view(-1, MASK_UNITS, UNIT_BITS).int() << places).sum(2)
    out[begin[:, None] + places[:MASK_UNITS]] = units


def _write_codes(
    out: Tensor, begin: Tensor, heads: Tensor, codes: Tensor, some: Tensor, masked: Tensor, raw: Tensor
) -> None:
    width = heads & MOST_WIDTH
    lanes = torch.arange(BLOCK, device=out.device)
    rank = torch.where(masked[:, None], some.cumsum(1) - 1, lanes)
    told = ((some | ~masked[:, None]) & (~raw & (width > 0))[:, None]).flatten().nonzero().squeeze(1)
    block = told // BLOCK
    code, width = codes.flatten()[told], width[block]
    size, minus = code.abs() - masked[block].int(), (code < 0).int()
    signed = torch.where(masked[block], 2 * size + minus, 2 * size - minus)
    word = torch.where((heads & SIGNED != 0)[block], signed, size).long()
    at = (begin[block] << UNIT_SHIFT) + rank.flatten()[told] * width
    word <<= at & UNIT_BITS - 1
    at >>= UNIT_SHIFT
    out.index_add_(0, at, word & 0xFFFF)
    out.index_add_(0, at + 1, word >> UNIT_BITS)


def _write_raw(out: Tensor, begin: Tensor, blocks: Tensor) -> None:
    """In the order in which the device has the bytes of a number: the lower half first."""
    units = blocks.contiguous().view(torch.int16)
    out[begin[:, None] + torch.arange(units.shape[1], device=out.device)] = units.long() & 0xFFFF


def _read(heads: Tensor, begin: Tensor, stream: Tensor) -> Tensor:
    """The codes of all blocks that are not raw."""
    heads, begin = heads[:, :, None].long(), begin[:, :, None]
    raw = heads & RAW != 0
    width, masked = (heads & MOST_WIDTH).masked_fill(raw, 0), (heads & MASKED != 0) & ~raw
    signed = heads & SIGNED != 0
    lanes = torch.arange(BLOCK, device=stream.device).expand(*heads.shape[:2], BLOCK)
    last = len(stream) - 2
    some = torch.ones_like(lanes)
    if bool(masked.any()):
        mask = stream[(begin + (lanes >> UNIT_SHIFT)).clamp(max=last)] >> (lanes & UNIT_BITS - 1) & 1
        some = torch.where(masked, mask, 1)
    rank = torch.where(masked, some.cumsum(2) - 1, lanes).clamp(min=0)
    at = (begin + torch.where(masked, MASK_UNITS, 0) << UNIT_SHIFT) + rank * width
    first = (at >> UNIT_SHIFT).clamp(max=last)
    word = (stream[first] | stream[first + 1] << UNIT_BITS) >> (at & UNIT_BITS - 1) & (1 << width) - 1
    plain = torch.where(signed, (word + 1 >> 1) * (1 - 2 * (word & 1)), word)
    beyond = torch.where(signed, ((word >> 1) + 1) * (1 - 2 * (word & 1)), word + 1) * some
    return torch.where(masked, beyond, plain)


def _raw_values(begin: Tensor, stream: Tensor, dtype: torch.dtype) -> Tensor:
    """What `_write_raw` wrote."""
    at = begin[:, None] + torch.arange(Extent(0, dtype.itemsize).raw_units, device=stream.device)
    return _int16(stream[at]).view(dtype)


def _tiles(x: Tensor) -> Tensor:
    """[tiles, BLOCKS, BLOCK], filled up with zeros."""
    return torch.nn.functional.pad(x.detach(), (0, -x.numel() % TILE)).view(-1, BLOCKS, BLOCK)


def _bit_length(x: Tensor) -> Tensor:
    """Of integers below 2^24."""
    return ((x.float().view(torch.int32) >> 23) - 126).clamp(min=0)


def _power(exponent: Tensor) -> Tensor:
    """2^(exponent - 127); 0 where that is no normal number."""
    return (exponent.clamp(min=0) << 23).view(torch.float32)


def _int16(x: Tensor) -> Tensor:
    """The low 16 bits."""
    return (x - ((x >> 15 & 1) << 16)).to(torch.int16)


def check_bounded(kept: BoundedParts, n: int, dtype: torch.dtype) -> None:
    extent = Extent(n, dtype.itemsize)
    found = (kept.heads.numel(), kept.places.numel(), kept.bound.numel())
    if found != (extent.heads, extent.places, 1):
        raise SpecError(
            f"expected {extent.heads} heads, {extent.places} places and one bound for {n} elements, found {found}"
        )
