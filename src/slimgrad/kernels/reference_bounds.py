"""Values within a bound in plain torch: the reference for kernels/bounding.py. See bounds.py."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from slimgrad.errors import SpecError
from slimgrad.kernels.bounds import (
    AHEAD_SPARE,
    CHUNK,
    COVERED_LEVELS,
    HAS_ZEROS,
    LANES,
    LEAST_BOUND,
    LEAST_MIDDLE,
    LEAST_SLACK,
    LEVEL_SHIFT,
    LIMIT,
    MANTISSA,
    MEAN_OFFSET,
    MOST_BITS,
    MOST_K,
    MOST_LEVEL,
    MULTIPLIER,
    ONE_BITS,
    PLAIN_SPARE,
    PREDICTED,
    SIGNED,
    STATE_MASK,
    STEP_OF_BOUND,
    STEP_OF_LEVEL,
    TILE,
    WORD_BITS,
    Coding,
    Extent,
)
from slimgrad.kernels.geometry import Layout, check_dense
from slimgrad.kernels.reference_groups import GOLDEN, hashed

BATCH = 64 * TILE
"""Elements that are treated at once, so that what is needed meanwhile stays small."""


class BoundedParts(NamedTuple):
    """What is kept; see bounds.py."""

    words: Tensor
    heads: Tensor
    places: Tensor
    bound: Tensor


class Look(NamedTuple):
    """What one look at some chunks tells, as float32 or bool."""

    largest: Tensor
    total: Tensor
    some: Tensor
    """How many are not told as zeros, at least."""
    minus: Tensor


class Plan(NamedTuple):
    """How each chunk is told."""

    usable: Tensor
    empty: Tensor
    level: Tensor
    step: Tensor
    k: Tensor
    signed: Tensor
    zeros: Tensor
    predicted: Tensor


def pack_bounded(x: Tensor, bound: Tensor, how: Coding, capacity: int | None = None) -> BoundedParts:
    """A dense tensor, in the order of its memory, within a bound of one float32. With a capacity, `words` has so many:
    what does not fit is missing, and the number of words that are used says so.
    """
    check_dense("pack_bounded", x)
    flat = x.detach().as_strided((x.numel(),), (1,))
    parts = [_pack_some(flat[i : i + BATCH], i, bound, how) for i in range(0, max(1, len(flat)), BATCH)]
    words = torch.cat([words for words, _, _ in parts])
    heads, lengths = torch.cat([heads for _, heads, _ in parts]), torch.cat([lengths for _, _, lengths in parts])
    ends = pad(lengths.cumsum(0), (1, 0))
    places = torch.cat([ends[:-1][::LANES], ends[-1:]])
    if capacity is not None:
        words = pad(words, (0, max(0, capacity - len(words))))[:capacity]
    return BoundedParts(words, heads, places.to(torch.int32), bound)


def _pack_some(flat: Tensor, first: int, bound: Tensor, how: Coding) -> tuple[Tensor, Tensor, Tensor]:
    """Words, heads, and how many words each chunk has."""
    extent = Extent(flat.numel(), flat.element_size())
    chunks = pad(flat, (0, -flat.numel() % CHUNK)).view(-1, CHUNK)
    x = chunks.float()
    plan = _planned(x, bound, how, chunks.dtype)
    numbers = _numbers(x, plan.step, offsets(first, len(x), how, x.device), how)
    symbols, bits = _symbols(numbers, plan)
    bits = bits.masked_fill((plan.empty | ~plan.usable)[:, None], 0)
    ends = bits.cumsum(1)
    lengths = (ends[:, -1] + WORD_BITS - 1) // WORD_BITS
    raw = ~plan.usable | (lengths >= min(extent.raw_words, extent.raw_length))
    lengths = lengths.masked_fill(raw, extent.raw_words)
    begin = lengths.cumsum(0) - lengths
    out = torch.zeros(int(lengths.sum()) + 1, dtype=torch.int64, device=x.device)
    told = ((bits > 0) & ~raw[:, None]).flatten().nonzero().squeeze(1)
    at = (begin[:, None] * WORD_BITS + ends - bits).flatten()[told]
    word = symbols.flatten()[told] << (at & WORD_BITS - 1)
    out.index_add_(0, at // WORD_BITS, word & 0xFFFFFFFF)
    out.index_add_(0, at // WORD_BITS + 1, word >> WORD_BITS)
    words = _int32(out[:-1])
    if bool(raw.any()):
        words[begin[raw][:, None] + torch.arange(extent.raw_words, device=x.device)] = _raw_words(chunks[raw])
    return words, _heads(plan, lengths, raw, extent), lengths


def _heads(plan: Plan, lengths: Tensor, raw: Tensor, extent: Extent) -> Tensor:
    flags = plan.signed * SIGNED | plan.zeros * HAS_ZEROS | plan.predicted * PREDICTED
    heads = plan.k | flags | plan.level << LEVEL_SHIFT | lengths << extent.length_shift
    heads = heads.masked_fill(plan.empty, 0).masked_fill(raw, extent.raw_length << extent.length_shift)
    return (heads - ((heads >> 15 & 1) << 16)).to(torch.int16)


def _planned(x: Tensor, bound: Tensor, how: Coding, dtype: torch.dtype) -> Plan:
    """Every step of this is a step of the kernel's, with the same rounding."""
    plain = _look(x, 0.0 if how.between else 2.0 * bound)
    level = _level(plain.largest, bound, dtype)
    step = step_of(bound, level)
    inverse = torch.where(step > 0, 1 / step, 0)
    most = torch.finfo(dtype).max
    usable = (bound >= LEAST_BOUND[dtype]) & (plain.largest + bound * 2.0 <= most) & (level <= MOST_LEVEL)
    usable &= plain.largest * inverse < LIMIT
    empty = plain.largest == 0 if how.between else plain.largest * inverse + 0.5 < 1
    empty &= usable | (plain.largest == 0)
    signed, zeros = plain.minus, plain.some < CHUNK
    k = rice(plain, inverse, signed, PLAIN_SPARE)
    predicted = torch.zeros_like(signed)
    if how.tries[1]:
        ahead = _look(x - pad(x, (1, 0))[:, :-1], 0.0)
        ahead_k = rice(ahead, inverse, torch.ones_like(signed), AHEAD_SPARE)
        predicted = torch.ones_like(signed)
        if how.tries[0]:
            yes = torch.ones_like(signed)
            predicted = _cost(ahead, inverse, ahead_k, yes, yes) < _cost(plain, inverse, k, signed, zeros)
        k = torch.where(predicted, ahead_k, k)
    return Plan(
        usable | empty, empty, level.clamp(max=MOST_LEVEL), step, k, signed | predicted, zeros | predicted, predicted
    )


def _look(x: Tensor, threshold: Tensor | float) -> Look:
    size, total = x.abs(), torch.zeros(len(x), device=x.device)
    for column in size.unbind(1):
        total = total + column
    return Look(size.amax(1), total, (size > threshold).sum(1), x.signbit().any(1))


def _level(largest: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
    """By how many 16ths of the bound the step is smaller than it could be: see NOTE [A bound that holds]."""
    if dtype == torch.float32:
        return torch.zeros_like(largest, dtype=torch.int64)
    exponent = ((largest + bound).view(torch.int32) >> 23) - (MANTISSA[dtype] + 1)
    slack = (exponent.clamp(min=0) << 23).view(torch.float32).clamp(min=LEAST_SLACK[dtype])
    levels = slack * (torch.where(bound > 0, 1 / bound, 0) * 16)
    return (levels + COVERED_LEVELS).nan_to_num(99).clamp(max=99).long()


def step_of(bound: Tensor, level: Tensor) -> Tensor:
    return bound * (STEP_OF_BOUND - level.float() * STEP_OF_LEVEL)


def rice(look: Look, inverse: Tensor, signed: Tensor, offset: float) -> Tensor:
    """The k of chunks, of which no symbol is longer than it may be."""
    twice = torch.where(signed, 2.0, 1.0)
    mean = look.total * inverse / look.some.clamp(min=1).float() * twice
    k = (((mean + MEAN_OFFSET).view(torch.int32) >> 23) - 127).clamp(0, MOST_K).long()
    largest = (look.largest * inverse + offset).nan_to_num(0).clamp(max=2.0**13) * twice
    k = torch.maximum(k, (largest.view(torch.int32) >> 23).long() - 130)  # below, more than 15 zeros would be told
    for _ in range(3):
        k = k + ((largest.long() >> k) + k > MOST_BITS - 2)
    return k


def _cost(look: Look, inverse: Tensor, k: Tensor, signed: Tensor, zeros: Tensor) -> Tensor:
    """The bits that symbols are likely to take."""
    steps = look.total * inverse
    some = torch.minimum(look.some.float(), steps)
    power = (127 - k.int() << 23).view(torch.float32)
    return some * (k + 1).float() + steps * power * torch.where(signed, 2.0, 1.0) + zeros.float() * CHUNK


def _numbers(x: Tensor, step: Tensor, offset: Tensor | float, how: Coding) -> Tensor:
    """With their signs."""
    inverse = torch.where(step > 0, 1 / step, 0)[:, None].double()
    sizes = (x.abs().double() * inverse + offset).float()  # as if rounded once
    sizes = sizes.nan_to_num(0).clamp(max=2 * LIMIT).int()
    if how.between:
        sizes = sizes.masked_fill(x == 0, 0)
    return torch.where(x < 0, -sizes, sizes)


def _symbols(numbers: Tensor, plan: Plan) -> tuple[Tensor, Tensor]:
    """Each and how many bits it has."""
    differences = numbers - pad(numbers, (1, 0))[:, :-1]
    told = torch.where(plan.predicted[:, None], differences, numbers)
    signed, zeros, k = plan.signed[:, None].long(), plan.zeros[:, None].long(), plan.k[:, None]
    v = ((told.abs().long() - 1).clamp(min=0) << signed) + (told < 0).long()
    before = (v >> k) + zeros
    symbol = ((v & (1 << k) - 1) * 2 + 1) << before
    zero = (told == 0) & (zeros == 1)
    return symbol.masked_fill(zero, 1), (before + k + 1).masked_fill(zero, 1)


def unpack_bounded(kept: BoundedParts, layout: Layout, how: Coding) -> Tensor:
    """What was packed, as a tensor of that dense layout."""
    n = math.prod(layout.shape)
    check_bounded(kept, n, layout.dtype)
    out = layout.empty()
    flat = out.as_strided((n,), (1,))
    for first in range(0, n, BATCH):
        target = flat[first : first + BATCH]
        heads = kept.heads[first // CHUNK :][: math.ceil(len(target) / CHUNK)]
        places = kept.places[first // TILE :][: math.ceil(len(target) / TILE)]
        found = _unpack_some(kept.words, heads, places, kept.bound, first, layout.dtype, how)
        target.copy_(found.flatten()[: len(target)])
    return out


def _unpack_some(
    words: Tensor, heads: Tensor, places: Tensor, bound: Tensor, first: int, dtype: torch.dtype, how: Coding
) -> Tensor:
    """Some chunks, from this element on."""
    extent = Extent(0, dtype.itemsize)
    heads = heads.long() & 0xFFFF
    raw = heads >> extent.length_shift == extent.raw_length
    lengths = torch.where(raw, extent.raw_words, heads >> extent.length_shift)
    begin = _begins(lengths, places)
    level = heads >> LEVEL_SHIFT & MOST_LEVEL if dtype.itemsize == 2 else heads * 0
    numbers = _read(heads, torch.where(raw, 0, lengths), begin, words)
    values = values_of(numbers, step_of(bound, level)[:, None], offsets(first, len(heads), how, words.device), how)
    out = values.to(dtype)
    if bool(raw.any()):
        bits = words[begin[raw][:, None] + torch.arange(extent.raw_words, device=words.device)]
        out[raw] = bits.view(dtype)
    return out


def _begins(lengths: Tensor, places: Tensor) -> Tensor:
    """Of chunks; tiles lie in any order."""
    tiles = pad(lengths, (0, -len(lengths) % LANES)).view(-1, LANES)
    return (places[:, None].long() + tiles.cumsum(1) - tiles).flatten()[: len(lengths)]


def _read(heads: Tensor, lengths: Tensor, begin: Tensor, words: Tensor) -> Tensor:
    """The numbers of all chunks, one column after the other."""
    k, signed, zeros = heads & 15, (heads & SIGNED != 0).long(), (heads & HAS_ZEROS != 0).long()
    predicted, some = heads & PREDICTED != 0, lengths > 0
    last = max(0, len(words) - 1)
    at, before, columns = begin * WORD_BITS, torch.zeros_like(k), []
    for _ in range(CHUNK):
        place = at // WORD_BITS
        low, high = (
            words[(place + i).clamp(max=last)].long() & 0xFFFFFFFF if len(words) else place * 0 for i in (0, 1)
        )
        window = (high & 0x7FFFFFFF) << WORD_BITS | low
        window >>= at & WORD_BITS - 1
        ahead = _trailing_zeros(window & 0xFFFF)
        zero = (ahead == 0) & (zeros == 1) | ~some
        v = (ahead - zeros << k) + (window >> ahead + 1 & (1 << k) - 1)
        number = ((v >> signed) + 1) * (1 - 2 * (v & signed))
        number = torch.where(zero, 0, number)
        at = at + torch.where(zero, 1, ahead + 1 + k)
        before = torch.where(predicted, before + number, number)
        columns.append(before)
    return torch.stack(columns, 1)


def values_of(numbers: Tensor, step: Tensor, offset: Tensor | float, how: Coding) -> Tensor:
    """What numbers stand for, in float32: the middle of an interval."""
    middle = numbers.abs().float() + (0.5 - offset)
    if how.zeros and how.dither:
        middle = middle.clamp(min=LEAST_MIDDLE)
    value = torch.where(numbers < 0, -(middle * step), middle * step)
    return value.masked_fill(numbers == 0, 0)


def offsets(first: int, chunks: int, how: Coding, device: torch.device) -> Tensor | float:
    """What is added before numbers are cut, [chunks, CHUNK] if each element has its own: see NOTE [Errors that do not
    know each other].
    """
    if not how.dither:
        return 1.0 if how.between else 0.5
    number = torch.arange(chunks, device=device) + first // CHUNK
    state = (hashed(number * GOLDEN & 0xFFFFFFFF) | 1)[:, None] * _powers().to(device)
    return (state & STATE_MASK | ONE_BITS).int().view(torch.float32)


@lru_cache(maxsize=1)
def _powers() -> Tensor:
    """From the first of a chunk's states to each of them, modulo 2^23."""
    return torch.tensor([pow(MULTIPLIER, power, STATE_MASK + 1) for power in range(CHUNK)])


def _trailing_zeros(x: Tensor) -> Tensor:
    """Of integers below 2^24."""
    return ((x & -x).float().view(torch.int32).long() >> 23) - 127


def _raw_words(chunks: Tensor) -> Tensor:
    """In the order in which the device has the bytes of a number: the lower half first."""
    return chunks.contiguous().view(torch.int32)


def _int32(x: Tensor) -> Tensor:
    """The low 32 bits."""
    return (x - ((x >> 31 & 1) << 32)).to(torch.int32)


def check_bounded(kept: BoundedParts, n: int, dtype: torch.dtype) -> None:
    extent = Extent(n, dtype.itemsize)
    found = (kept.heads.numel(), kept.places.numel(), kept.bound.numel())
    if found != (extent.chunks, extent.places, 1):
        raise SpecError(
            f"expected {extent.chunks} heads, {extent.places} places and one bound for {n} elements, found {found}"
        )
