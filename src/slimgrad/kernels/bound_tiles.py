"""Triton kernels for values within a bound: a tile at a time. See bounds.py for what is written.

NOTE [Codes side by side]
A block's codes have any width, and of a masked block only some lanes have one: which bits a lane fills depends on all
lanes before it. So lanes first leave their codes, one behind the other, in a scratch that belongs to the program (it
stays in the cache, because programs are few and take one tile after the other); then each unit is put together from the
codes that reach into it.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels import bounds
from slimgrad.kernels.tiles import GOLDEN, float32, mixed, rounded

BLOCK, BLOCKS, TILE = tl.constexpr(bounds.BLOCK), tl.constexpr(bounds.BLOCKS), tl.constexpr(bounds.TILE)
UNIT_BITS, MASK_UNITS = tl.constexpr(bounds.UNIT_BITS), tl.constexpr(bounds.MASK_UNITS)
MOST_WIDTH, LIMIT, NOISE_BITS = (
    tl.constexpr(bounds.MOST_WIDTH),
    tl.constexpr(bounds.LIMIT),
    tl.constexpr(bounds.NOISE_BITS),
)
MASKED, SIGNED, RAW = tl.constexpr(bounds.MASKED), tl.constexpr(bounds.SIGNED), tl.constexpr(bounds.RAW)
SIZE_SHIFT, PREDICTED = tl.constexpr(bounds.SIZE_SHIFT), tl.constexpr(bounds.PREDICTED)
LEAST_MIDDLE = tl.constexpr(bounds.LEAST_MIDDLE)
INF = tl.constexpr(float("inf"))


@triton.jit
def power(exponent):
    """2^(exponent - 127); 0 where that is no normal number."""
    return (tl.maximum(exponent, 0) << 23).to(tl.float32, bitcast=True)


@triton.jit
def step_of(bound, exponent, MANTISSA: tl.constexpr):
    """The step of codes: see NOTE [A bound that holds] in bounds.py."""
    slack = power(exponent - (MANTISSA + 1)) + power(exponent - NOISE_BITS)
    return tl.maximum(bound - slack, bound * 0.5) * 2.0


@triton.jit
def shifts(at, DITHER: tl.constexpr):
    """Of each element's intervals, by where it is; as a part of a step."""
    drawn = mixed(at.to(tl.uint32) * GOLDEN) >> 16
    return drawn.to(tl.float32) * (1.0 / 65536) if DITHER else (at * 0).to(tl.float32)


@triton.jit
def codes_of(x, step, shift, BETWEEN: tl.constexpr):
    """Of float32; where x is not finite, any."""
    inverse = tl.where(step > 0, tl.div_rn(1.0, step), 0.0)  # without a step, nothing but zeros has a code
    scaled = tl.where(tl.abs(x) < INF, x, 0.0) * inverse
    scaled = tl.minimum(tl.maximum(scaled, -2.0 * LIMIT), 2.0 * LIMIT)
    if BETWEEN:
        size = (tl.floor(tl.abs(scaled) + shift) + 1.0).to(tl.int32)
        codes = tl.where(x > 0, size, tl.where(x < 0, -size, 0))
    else:
        codes = tl.floor(scaled + 0.5).to(tl.int32)
    return codes


@triton.jit
def values_of(codes, step, shift, BETWEEN: tl.constexpr, ZEROS: tl.constexpr):
    """What codes stand for, in float32: the middle of an interval."""
    if BETWEEN:
        middle = tl.abs(codes).to(tl.float32) - 0.5 - shift
        size = (tl.maximum(middle, LEAST_MIDDLE) if ZEROS else middle) * step
        values = tl.where(codes > 0, size, tl.where(codes < 0, -size, 0.0))
    else:
        values = codes.to(tl.float32) * step
    return values


@triton.jit
def bit_length(x):
    """Of integers below 2^24."""
    return tl.maximum((x.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126, 0)


@triton.jit
def measured(codes, fits, RAW_UNITS: tl.constexpr):
    """How each block is told in the fewest units: its head and its units."""
    size, minus = tl.abs(codes), (codes < 0).to(tl.int32)
    signed = tl.max(minus, 1)
    count = tl.sum((codes != 0).to(tl.int32), 1)
    doubled = signed[:, None] == 1
    width = bit_length(tl.max(tl.where(doubled, 2 * size - minus, size), 1))
    masked_width = bit_length(tl.maximum(tl.max(tl.where(doubled, 2 * size - 2 + minus, size - 1), 1), 0))
    units, masked_units = width * MASK_UNITS, MASK_UNITS + (count * masked_width + UNIT_BITS - 1) // UNIT_BITS
    masked = masked_units < units
    width, units = tl.where(masked, masked_width, width), tl.where(masked, masked_units, units)
    raw = (fits == 0) | (width > MOST_WIDTH) | (units >= RAW_UNITS)
    heads = width + tl.where(masked, MASKED, 0) + signed * SIGNED
    units = tl.where(raw, RAW_UNITS, units)
    return tl.where(raw, RAW, heads) | (units << SIZE_SHIFT), units


@triton.jit
def write_raw(units, begin, raw, value, capacity, PER: tl.constexpr):
    """The elements of raw blocks, as they are."""
    lane = tl.arange(0, BLOCK)[None, :]
    at = begin[:, None] + lane * PER
    if PER == 1:
        tl.store(units + at, value.to(tl.int16, bitcast=True), mask=raw[:, None] & (at < capacity))
    else:
        bits = value.to(tl.int32, bitcast=True)
        tl.store(units + at, bits.to(tl.int16), mask=raw[:, None] & (at < capacity))
        tl.store(units + at + 1, (bits >> 16).to(tl.int16), mask=raw[:, None] & (at + 1 < capacity))


@triton.jit
def write_codes(units, scratch, codes, heads, begin, capacity):
    """Masks and codes of the other blocks: see NOTE [Codes side by side]."""
    block, lane = tl.arange(0, BLOCKS)[:, None], tl.arange(0, BLOCK)[None, :]
    width, raw = heads & 15, (heads & RAW) != 0
    masked, signed = ((heads & MASKED) != 0)[:, None], ((heads & SIGNED) != 0)[:, None]
    some = (codes != 0).to(tl.int32)
    shifted = tl.reshape(some, [BLOCKS, MASK_UNITS, UNIT_BITS]) << tl.arange(0, UNIT_BITS)[None, None, :]
    at = begin[:, None] + tl.arange(0, MASK_UNITS)[None, :]
    tl.store(units + at, tl.sum(shifted, 2).to(tl.int16), mask=masked & (at < capacity))
    rank = tl.where(masked, tl.cumsum(some, 1) - 1, lane)
    size, minus = tl.abs(codes) - tl.where(masked, 1, 0), (codes < 0).to(tl.int32)
    word = tl.where(signed, 2 * size + tl.where(masked, minus, -minus), size)
    listed = ((some == 1) | (masked == 0)) & (raw == 0)[:, None]
    tl.store(scratch + block * BLOCK + rank, word.to(tl.int16), mask=listed)
    count = tl.where((heads & MASKED) != 0, tl.sum(some, 1), BLOCK)
    needed = tl.where(raw, 0, (count * width + UNIT_BITS - 1) // UNIT_BITS)
    most = tl.max(needed, 0)
    turns = UNIT_BITS // tl.min(tl.where(needed > 0, width, MOST_WIDTH), 0) + 2
    wide = tl.maximum(width, 1)[:, None]
    start = begin[:, None] + tl.where(masked, MASK_UNITS, 0)
    tl.debug_barrier()
    first = 0
    while first < most:
        unit = first + tl.arange(0, 16)[None, :]
        live = unit < needed[:, None]
        number = unit * UNIT_BITS // wide
        shift = number * wide - unit * UNIT_BITS
        total = tl.zeros([BLOCKS, 16], tl.int32)
        turn = 0
        while turn < turns:
            reaches = live & (number < count[:, None]) & (shift < UNIT_BITS)
            code = tl.load(scratch + block * BLOCK + number, mask=reaches, other=0).to(tl.int32) & 0xFFFF
            total |= tl.where(shift >= 0, code << tl.maximum(shift, 0), code >> tl.maximum(-shift, 0))
            number += 1
            shift += wide
            turn += 1
        tl.store(units + start + unit, total.to(tl.int16), mask=live & (start + unit < capacity))
        first += 16
    tl.debug_barrier()


@triton.jit
def load_tile(x, at, left):
    """Elements of a tile, of which `left` are there. Only the last needs a mask, which would break up wide loads."""
    if left >= TILE:  # noqa: SIM108
        value = tl.load(x + at)
    else:
        value = tl.load(x + at, mask=at < left, other=0.0)
    return value


@triton.jit(do_not_specialize=["n", "capacity", "tiles"])
def pack_kernel(
    x, units, heads, places, bound, scratch, capacity, n, tiles,
    MANTISSA: tl.constexpr, BETWEEN: tl.constexpr, ZEROS: tl.constexpr, DITHER: tl.constexpr, PLAIN: tl.constexpr,
    AHEAD: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """One tile after the other. PLAIN and AHEAD: whether codes are tried as they are, and as differences."""
    eb = tl.load(bound)
    scratch += tl.program_id(0) * TILE
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tile = tl.program_id(0)
    while tile < tiles:
        begin_tile = x + tile.to(tl.int64) * TILE
        left = n - tile * TILE
        value = load_tile(begin_tile, at, left)
        wide = float32(value)
        size = tl.abs(wide)
        largest = tl.max(tl.max(tl.where(size < INF, size, 0.0), 1), 0)
        exponent = largest.to(tl.int32, bitcast=True) >> 23
        step = step_of(eb, exponent, MANTISSA)
        shift = shifts(tile * TILE + at, DITHER)
        codes = codes_of(wide, step, shift, BETWEEN)
        back = float32(rounded(values_of(codes, step, shift, BETWEEN, ZEROS), value.dtype))
        good = (tl.abs(wide - back) <= eb) & (tl.abs(codes) <= LIMIT)
        if ZEROS:
            good = good & ((wide > 0) == (back > 0)) & ((wide < 0) == (back < 0))
        fits = tl.min(good.to(tl.int32), 1)
        head, used = measured(codes, fits, PER * BLOCK)
        predicted = 0
        if AHEAD:
            previous = float32(tl.load(begin_tile + at - 1, mask=(at > 0) & (at < left), other=0.0))
            before = codes_of(previous, step, shifts(tile * TILE + at - 1, DITHER), BETWEEN)
            difference = tl.where(at < left, codes - before, 0)
            ahead_head, ahead_used = measured(difference, fits, PER * BLOCK)
            allowed = tl.max(ahead_head & RAW, 0) == 0
            if PLAIN:
                allowed = allowed & (tl.sum(ahead_used, 0) < tl.sum(used, 0))
            head, used = tl.where(allowed, ahead_head, head), tl.where(allowed, ahead_used, used)
            codes = tl.where(allowed, difference, codes)
            predicted = tl.where(allowed, PREDICTED, 0)
        place = tl.atomic_add(places + tiles, tl.sum(used, 0))
        tl.store(places + tile, place)
        tl.store(heads + tile * (BLOCKS + 1) + block, head.to(tl.int16))
        tl.store(heads + tile * (BLOCKS + 1) + BLOCKS, (exponent | predicted).to(tl.int16))
        begin = place + tl.cumsum(used, 0) - used
        write_raw(units, begin, (head & RAW) != 0, value, capacity, PER)
        write_codes(units, scratch, codes, head, begin, capacity)
        tile += tl.num_programs(0)


@triton.jit
def read_codes(units, heads, begin):
    """The codes of all blocks that are not raw; of those, zeros."""
    lane = tl.arange(0, BLOCK)[None, :]
    raw = (heads & RAW) != 0
    width = tl.where(raw, 0, heads & 15)[:, None]
    masked = (((heads & MASKED) != 0) & (raw == 0))[:, None]
    signed = ((heads & SIGNED) != 0)[:, None]
    bits = tl.load(units + begin[:, None] + lane // UNIT_BITS, mask=masked & (lane >= 0), other=0).to(tl.int32)
    some = tl.where(masked, (bits >> (lane % UNIT_BITS)) & 1, 1)
    rank = tl.where(masked, tl.cumsum(some, 1) - 1, lane)
    told = (some == 1) & (width > 0)
    bit = rank * width
    at = begin[:, None] + tl.where(masked, MASK_UNITS, 0) + bit // UNIT_BITS
    shift = bit % UNIT_BITS
    low = tl.load(units + at, mask=told, other=0).to(tl.int32) & 0xFFFF
    high = tl.load(units + at + 1, mask=told & (shift + width > UNIT_BITS), other=0).to(tl.int32) & 0xFFFF
    word = ((low | (high << 16)) >> shift) & ((1 << width) - 1)
    sign = 1 - 2 * (word & 1)
    plain = tl.where(signed, ((word + 1) >> 1) * sign, word)
    beyond = tl.where(signed, ((word >> 1) + 1) * sign, word + 1) * some
    return tl.where(masked, beyond, plain)


@triton.jit
def read_raw(units, begin, raw, out, PER: tl.constexpr):
    """The elements of raw blocks, as `out` has them."""
    lane = tl.arange(0, BLOCK)[None, :]
    at = begin[:, None] + lane * PER
    if PER == 1:
        bits = tl.load(units + at, mask=raw[:, None] & (lane >= 0), other=0)
    else:
        low = tl.load(units + at, mask=raw[:, None] & (lane >= 0), other=0).to(tl.int32) & 0xFFFF
        high = tl.load(units + at + 1, mask=raw[:, None] & (lane >= 0), other=0).to(tl.int32)
        bits = low | (high << 16)
    return bits.to(out.dtype.element_ty, bitcast=True)


@triton.jit(do_not_specialize=["n"])
def unpack_kernel(
    units, out, heads, places, bound, n, MANTISSA: tl.constexpr, BETWEEN: tl.constexpr, ZEROS: tl.constexpr,
    DITHER: tl.constexpr, AHEAD: tl.constexpr, PER: tl.constexpr,
):  # fmt: skip
    """One tile."""
    tile = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    head = tl.load(heads + tile * (BLOCKS + 1) + block).to(tl.int32) & 0xFFFF
    own = tl.load(heads + tile * (BLOCKS + 1) + BLOCKS).to(tl.int32)
    used = head >> SIZE_SHIFT
    begin = tl.load(places + tile) + tl.cumsum(used, 0) - used
    codes = read_codes(units, head, begin)
    if AHEAD:  # noqa: SIM102
        if (own & PREDICTED) != 0:
            sums = tl.sum(codes, 1)
            codes = tl.cumsum(codes, 1) + (tl.cumsum(sums, 0) - sums)[:, None]
    step = step_of(tl.load(bound), own & 0xFF, MANTISSA)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    shift = shifts(tile * TILE + at, DITHER)
    value = rounded(values_of(codes, step, shift, BETWEEN, ZEROS), out.dtype.element_ty)
    raw = (head & RAW) != 0
    if tl.max(raw.to(tl.int32), 0) == 1:
        value = tl.where(raw[:, None], read_raw(units, begin, raw, out, PER), value)
    left = n - tile * TILE
    target = out + tile.to(tl.int64) * TILE + at
    if left >= TILE:
        tl.store(target, value)
    else:
        tl.store(target, value, mask=at < left)
