"""Triton kernels for values within a bound: a chunk to a thread, a tile to a warp. See bounds.py for what is written.

NOTE [A chunk to a thread]
Symbols have any length, and where one begins is known after all before it. A thread that tells a chunk alone keeps that
in a register, and a warp needs no word from another. It looks at its chunk once for what the plan needs, and reads it
again, from the nearest cache, to tell it. How many words that makes is known at the end only, so they are left in a
scratch that belongs to the program (a tenth of what was read), and copied to their place when that is known.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels import bounds
from slimgrad.kernels.tiles import GOLDEN, INTERPRETED, bits_of, float32, float_of, hashed, rounded

CHUNK, LANES, TILE = tl.constexpr(bounds.CHUNK), tl.constexpr(bounds.LANES), tl.constexpr(bounds.TILE)
GROUP = tl.constexpr(8)
"""Elements of a chunk that are read or written at once."""
WORD_BITS, MOST_BITS, MOST_K = (
    tl.constexpr(bounds.WORD_BITS),
    tl.constexpr(bounds.MOST_BITS),
    tl.constexpr(bounds.MOST_K),
)
LIMIT, MEAN_OFFSET, LEAST_MIDDLE = (
    tl.constexpr(bounds.LIMIT),
    tl.constexpr(bounds.MEAN_OFFSET),
    tl.constexpr(bounds.LEAST_MIDDLE),
)
SIGNED, HAS_ZEROS, PREDICTED = (
    tl.constexpr(bounds.SIGNED),
    tl.constexpr(bounds.HAS_ZEROS),
    tl.constexpr(bounds.PREDICTED),
)
LEVEL_SHIFT, MOST_LEVEL = tl.constexpr(bounds.LEVEL_SHIFT), tl.constexpr(bounds.MOST_LEVEL)
STEP_OF_BOUND, STEP_OF_LEVEL, COVERED_LEVELS = (
    tl.constexpr(bounds.STEP_OF_BOUND),
    tl.constexpr(bounds.STEP_OF_LEVEL),
    tl.constexpr(bounds.COVERED_LEVELS),
)
STATE_MASK, ONE_BITS = tl.constexpr(bounds.STATE_MASK), tl.constexpr(bounds.ONE_BITS)
MULTIPLIER, INCREMENT = tl.constexpr(bounds.MULTIPLIER), tl.constexpr(bounds.INCREMENT)


@triton.jit
def four_columns(x):
    even, odd = tl.split(tl.reshape(x, [LANES, 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def load_columns(x, at, left, COLUMNS: tl.constexpr):
    """Elements that each thread reads at once. Only at the end is there need for a mask, which would break up loads."""
    at = at[:, None] + tl.arange(0, COLUMNS)[None, :]
    if left >= TILE:  # noqa: SIM108
        value = tl.load(x + at)
    else:
        value = tl.load(x + at, mask=at < left, other=0.0)
    return float32(value)


@triton.jit
def load_group(x, at, left):
    """GROUP elements of each chunk, in float32, 16 bytes of each at a time; zeros from `left` on."""
    if x.dtype.element_ty == tl.float32:
        a, b, c, d = four_columns(load_columns(x, at, left, 4))
        e, f, g, h = four_columns(load_columns(x, at + 4, left, 4))
    else:
        even, odd = tl.split(tl.reshape(load_columns(x, at, left, 8), [LANES, 4, 2]))
        a, c, e, g = four_columns(even)
        b, d, f, h = four_columns(odd)
    return a, b, c, d, e, f, g, h


@triton.jit
def join_group(a, b, c, d):
    """Four columns side by side."""
    return tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), [LANES, 4])


@triton.jit
def store_group(out, at, left, values):
    """The counterpart of `load_group`."""
    if out.dtype.element_ty == tl.float32:
        store_columns(out, at, left, join_group(values[0], values[1], values[2], values[3]), 4)
        store_columns(out, at + 4, left, join_group(values[4], values[5], values[6], values[7]), 4)
    else:
        even = join_group(values[0], values[2], values[4], values[6])
        odd = join_group(values[1], values[3], values[5], values[7])
        store_columns(out, at, left, tl.reshape(tl.join(even, odd), [LANES, 8]), 8)


@triton.jit
def store_columns(out, at, left, values, COLUMNS: tl.constexpr):
    at = at[:, None] + tl.arange(0, COLUMNS)[None, :]
    if left >= TILE:
        tl.store(out + at, values)
    else:
        tl.store(out + at, values, mask=at < left)


# --- numbers ---


@triton.jit
def first_state(chunk):
    return hashed(chunk.to(tl.uint32) * GOLDEN)


@triton.jit
def next_state(state, DITHER: tl.constexpr):
    return state * MULTIPLIER + INCREMENT if DITHER else state


@triton.jit
def offset_of(state, BETWEEN: tl.constexpr, DITHER: tl.constexpr):
    """What is added before a number is cut."""
    if DITHER:
        found = ((state & STATE_MASK) | ONE_BITS).to(tl.float32, bitcast=True)
    else:
        found = tl.full([LANES], 1.0 if BETWEEN else 0.5, tl.float32)
    return found


@triton.jit
def number_of(x, inverse, offset, BETWEEN: tl.constexpr):
    """Its size; of what is not finite, any."""
    scaled = tl.minimum(tl.abs(x) * inverse + offset, 2 * LIMIT)
    size = scaled.to(tl.int32)
    return tl.where(x == 0, 0, size) if BETWEEN else size


@triton.jit
def value_of(size, minus, step, offset, ZEROS: tl.constexpr):
    """What a number stands for: the middle of an interval."""
    middle = size.to(tl.float32) + (0.5 - offset)
    if ZEROS:
        middle = tl.maximum(middle, LEAST_MIDDLE)
    value = middle * step
    return tl.where(size == 0, 0.0, tl.where(minus, -value, value))


# --- plans: every step is one of the reference's, with the same rounding ---


@triton.jit
def seen(size, largest, total, some, threshold):
    """What a look at one more element tells of each chunk."""
    largest = tl.maximum(largest, size, propagate_nan=tl.PropagateNan.ALL)
    return largest, total + size, some + (size > threshold).to(tl.int32)


@triton.jit
def inverse_of(x):
    return tl.where(x > 0, tl.div_rn(1.0, x), 0.0)


@triton.jit
def level_of(largest, bound, MANTISSA: tl.constexpr, LEAST_SLACK: tl.constexpr):
    """By how many 16ths of the bound the step is smaller than it could be."""
    if MANTISSA == 23:
        level = tl.zeros([LANES], tl.int32)
    else:
        exponent = (bits_of(largest + bound) >> 23) - (MANTISSA + 1)
        slack = tl.maximum(float_of(tl.maximum(exponent, 0) << 23), LEAST_SLACK)
        levels = slack * (inverse_of(bound) * 16.0)
        level = tl.where(levels < 99.0, levels + COVERED_LEVELS, 99.0).to(tl.int32)
    return level


@triton.jit
def step_of(bound, level):
    return bound * (STEP_OF_BOUND - level.to(tl.float32) * STEP_OF_LEVEL)


@triton.jit
def rice_of(largest, total, some, inverse, signed, OFFSET: tl.constexpr):
    """The k of chunks, of which no symbol is longer than it may be."""
    twice = tl.where(signed, 2.0, 1.0)
    mean = tl.div_rn(total * inverse, tl.maximum(some, 1).to(tl.float32)) * twice
    k = tl.minimum(tl.maximum((bits_of(mean + MEAN_OFFSET) >> 23) - 127, 0), MOST_K)
    steps = tl.minimum(largest * inverse + OFFSET, 8192.0) * twice
    k = tl.maximum(k, (bits_of(steps) >> 23) - 130)
    k = tl.minimum(k, MOST_K + 3)  # of what is not finite
    whole = steps.to(tl.int32)
    for _ in tl.static_range(3):
        k += ((whole >> k) + k > MOST_BITS - 2).to(tl.int32)
    return k


@triton.jit
def cost_of(total, some, inverse, k, signed, zeros):
    """The bits that symbols are likely to take."""
    steps = total * inverse
    some = tl.minimum(some.to(tl.float32), steps)
    power = float_of((127 - k) << 23)
    return some * (k + 1).to(tl.float32) + steps * power * tl.where(signed, 2.0, 1.0) + tl.where(zeros, 1.0, 0.0) * CHUNK


# --- symbols ---


@triton.jit
def symbol_of(size, minus, k, signed, zeros):
    """A symbol and its bits."""
    v = (tl.maximum(size - 1, 0) << signed) + minus
    before = (v >> k) + zeros
    symbol = ((v & ((1 << k) - 1)) * 2 + 1) << before
    told = (size != 0) | (zeros == 0)
    return tl.where(told, symbol, 1), tl.where(told, before + k + 1, 1)


@triton.jit
def zeros_before_one(window):
    """Of words that have a one."""
    if INTERPRETED:
        low = window & (0 - window)
        found = (low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    else:
        found = tl.inline_asm_elementwise(
            "brev.b32 $0, $1; bfind.shiftamt.u32 $0, $0;", "=r,r", [window], dtype=tl.int32, is_pure=True, pack=1
        )
    return found


@triton.jit
def difference(size, minus, before):
    """Of a number to the one before: size, whether it is negative, and the number itself."""
    number = tl.where(minus, -size, size)
    return tl.abs(number - before), number < before, number


@triton.jit(do_not_specialize=["n", "capacity", "tiles"])
def pack_kernel(
    x, words, heads, places, bound, scratch, capacity, n, tiles,
    MANTISSA: tl.constexpr, MOST: tl.constexpr, LEAST_BOUND: tl.constexpr, LEAST_SLACK: tl.constexpr,
    RAW_WORDS: tl.constexpr, LENGTH_SHIFT: tl.constexpr, BETWEEN: tl.constexpr, ZEROS: tl.constexpr,
    DITHER: tl.constexpr, PLAIN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile after the other. PLAIN and AHEAD: whether numbers are tried as they are, and as differences."""
    lane = tl.arange(0, LANES)
    eb = tl.load(bound + lane * 0)
    scratch += tl.program_id(0) * TILE // 2 + lane
    raw_length: tl.constexpr = (1 << (16 - LENGTH_SHIFT)) - 1
    most_words: tl.constexpr = RAW_WORDS if raw_length > RAW_WORDS else raw_length
    threshold = tl.zeros([LANES], tl.float32) if BETWEEN else 2.0 * eb
    tile = tl.program_id(0)
    while tile < tiles:
        start = x + tile.to(tl.int64) * TILE
        left = n - tile * TILE
        at = lane * CHUNK
        largest, total, signs = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.int32)
        some, before = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.float32)
        far, way, moved = tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.float32), tl.zeros([LANES], tl.int32)
        for j in range(0, CHUNK, GROUP):
            group = load_group(start, at + j, left)
            for i in tl.static_range(GROUP):
                largest, total, some = seen(tl.abs(group[i]), largest, total, some, threshold)
                signs |= bits_of(group[i])
                if AHEAD:
                    far, way, moved = seen(tl.abs(group[i] - before), far, way, moved, 0.0)
                    before = group[i]
        level = level_of(largest, eb, MANTISSA, LEAST_SLACK)
        step = step_of(eb, level)
        inverse = inverse_of(step)
        usable = (eb >= LEAST_BOUND) & (largest + eb <= MOST) & (level <= MOST_LEVEL) & (largest * inverse < LIMIT)
        empty = (largest == 0) if BETWEEN else ((largest * inverse + 0.5 < 1) & (usable | (largest == 0)))
        minus, gaps = signs < 0, some < CHUNK
        k = rice_of(largest, total, some, inverse, minus, 2.0)
        ahead = largest < 0
        if AHEAD:
            yes = largest >= 0
            other = rice_of(far, way, moved, inverse, yes, 5.0)
            ahead = yes
            if PLAIN:
                plain = cost_of(total, some, inverse, k, minus, gaps)
                ahead = cost_of(way, moved, inverse, other, yes, yes) < plain
            k = tl.where(ahead, other, k)
        signed, zeros = (minus | ahead).to(tl.int32), (gaps | ahead).to(tl.int32)
        state = first_state(tile * LANES + lane)
        word, filled, count = tl.zeros([LANES], tl.uint32), tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32)
        number = tl.zeros([LANES], tl.int32)
        skip = empty | (usable == 0)
        for j in range(0, CHUNK, GROUP):
            group = load_group(start, at + j, left)
            for i in tl.static_range(0, GROUP, 2):
                size = number_of(group[i], inverse, offset_of(state, BETWEEN, DITHER), BETWEEN)
                negative = group[i] < 0
                if AHEAD:
                    change, fall, number = difference(size, negative, number)
                    size, negative = tl.where(ahead, change, size), tl.where(ahead, fall, negative)
                first, bits = symbol_of(size, negative.to(tl.int32), k, signed, zeros)
                state = next_state(state, DITHER)
                size = number_of(group[i + 1], inverse, offset_of(state, BETWEEN, DITHER), BETWEEN)
                negative = group[i + 1] < 0
                if AHEAD:
                    change, fall, number = difference(size, negative, number)
                    size, negative = tl.where(ahead, change, size), tl.where(ahead, fall, negative)
                second, more = symbol_of(size, negative.to(tl.int32), k, signed, zeros)
                state = next_state(state, DITHER)
                both = first.to(tl.uint32) | (second.to(tl.uint32) << bits)
                wide = both.to(tl.uint64) << filled
                word |= wide.to(tl.uint32)
                filled += bits + more
                full = filled >= WORD_BITS
                tl.store(scratch + count * LANES, word, mask=full & (skip == 0))
                word = tl.where(full, (wide >> WORD_BITS).to(tl.uint32), word)
                count += full.to(tl.int32)
                filled &= WORD_BITS - 1
        tl.store(scratch + count * LANES, word, mask=(filled > 0) & (skip == 0))
        count = tl.where(empty, 0, count + (filled > 0).to(tl.int32))
        raw = (empty == 0) & ((usable == 0) | (count >= most_words))
        raw = raw & (at < left)
        length = tl.where(raw, RAW_WORDS, tl.where(at < left, count, 0))
        begin = tl.cumsum(length, 0) - length
        place = tl.atomic_add(places + tiles, tl.sum(length, 0))
        tl.store(places + tile, place)
        head = k + signed * SIGNED + zeros * HAS_ZEROS + tl.where(ahead, PREDICTED, 0)
        head += (level << LEVEL_SHIFT) + (length << LENGTH_SHIFT)
        head = tl.where(raw, raw_length << LENGTH_SHIFT, tl.where(empty, 0, head))
        tl.store(heads + tile * LANES + lane, head.to(tl.int16), mask=at < left)
        begin += place
        coded = tl.where(raw, 0, length)
        longest = tl.max(coded, 0)
        tl.debug_barrier()
        i = 0
        while i < longest:
            live = (i < coded) & (begin + i < capacity)
            tl.store(words + begin + i, tl.load(scratch + i * LANES, mask=live, other=0), mask=live)
            i += 1
        if tl.max(raw.to(tl.int32), 0) == 1:
            for j in range(0, RAW_WORDS):
                bits = raw_word(start, at, j, left, RAW_WORDS)
                tl.store(words + begin + j, bits, mask=raw & (begin + j < capacity))
        tl.debug_barrier()
        tile += tl.num_programs(0)


@triton.jit
def raw_word(x, at, j, left, RAW_WORDS: tl.constexpr):
    """A word of each chunk, as it lies in memory."""
    if RAW_WORDS == CHUNK:
        bits = tl.load(x + at + j, mask=at + j < left, other=0.0).to(tl.int32, bitcast=True)
    else:
        at += 2 * j
        low = tl.load(x + at, mask=at < left, other=0.0).to(tl.int16, bitcast=True)
        high = tl.load(x + at + 1, mask=at + 1 < left, other=0.0).to(tl.int16, bitcast=True)
        bits = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    return bits


@triton.jit
def read_symbol(window, k, low_bits, signed, zeros, some):
    """The first symbol of a window: its size, whether it is negative, and its bits."""
    before = zeros_before_one(window)
    v = ((before - zeros) << k) + ((window >> (before + 1)).to(tl.int32) & low_bits)
    told = some & ((before > 0) | (zeros == 0))
    size = tl.where(told, (v >> signed) + 1, 0)
    return size, (v & signed) != 0, tl.where(told, before + 1 + k, 1)


@triton.jit(do_not_specialize=["n"])
def unpack_kernel(
    words, out, heads, places, bound, n,
    MANTISSA: tl.constexpr, RAW_WORDS: tl.constexpr, LENGTH_SHIFT: tl.constexpr, BETWEEN: tl.constexpr,
    ZEROS: tl.constexpr, DITHER: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    tile, lane = tl.program_id(0), tl.arange(0, LANES)
    raw_length: tl.constexpr = (1 << (16 - LENGTH_SHIFT)) - 1
    start = out + tile.to(tl.int64) * TILE
    left = n - tile * TILE
    at = lane * CHUNK
    head = tl.load(heads + tile * LANES + lane, mask=at < left, other=0).to(tl.int32) & 0xFFFF
    length = head >> LENGTH_SHIFT
    raw = length == raw_length
    length = tl.where(raw, RAW_WORDS, length)
    begin = tl.load(places + tile) + tl.cumsum(length, 0) - length
    k, signed, zeros = head & 15, (head // SIGNED) & 1, (head // HAS_ZEROS) & 1
    ahead, low_bits = (head & PREDICTED) != 0, (1 << k) - 1
    level = tl.zeros([LANES], tl.int32) if MANTISSA == 23 else (head >> LEVEL_SHIFT) & MOST_LEVEL
    step = step_of(tl.load(bound + lane * 0), level)
    some = (length > 0) & (raw == 0)
    end = begin + tl.where(some, length, 0)
    word = tl.load(words + begin, mask=begin < end, other=0).to(tl.uint32, bitcast=True)
    after = tl.load(words + begin + 1, mask=begin + 1 < end, other=0).to(tl.uint32, bitcast=True)
    later = begin + 2
    used, number, state = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32), first_state(tile * LANES + lane)
    for j in range(0, CHUNK, GROUP):
        values = ()
        for _ in tl.static_range(0, GROUP, 2):
            wide = (after.to(tl.uint64) << WORD_BITS) | word.to(tl.uint64)
            window = (wide >> used).to(tl.uint32)
            size, minus, bits = read_symbol(window, k, low_bits, signed, zeros, some)
            if AHEAD:
                size, minus, number = sum_of(size, minus, number, ahead)
            value = value_of(size, minus, step, offset_of(state, BETWEEN, DITHER), ZEROS and DITHER)
            values = values + (rounded(value, out.dtype.element_ty),)
            state = next_state(state, DITHER)
            size, minus, more = read_symbol(window >> bits, k, low_bits, signed, zeros, some)
            if AHEAD:
                size, minus, number = sum_of(size, minus, number, ahead)
            value = value_of(size, minus, step, offset_of(state, BETWEEN, DITHER), ZEROS and DITHER)
            values = values + (rounded(value, out.dtype.element_ty),)
            state = next_state(state, DITHER)
            used += bits + more
            done = used >= WORD_BITS
            word = tl.where(done, after, word)
            fresh = tl.load(words + later, mask=done & (later < end), other=0).to(tl.uint32, bitcast=True)
            after = tl.where(done, fresh, after)
            later += done.to(tl.int32)
            used &= WORD_BITS - 1
        store_group(start, at + j, left, values)
    if tl.max(raw.to(tl.int32), 0) == 1:
        tl.debug_barrier()
        for j in range(0, RAW_WORDS):
            bits = tl.load(words + begin + j, mask=raw, other=0)
            store_raw(start, at, j, left, raw, bits, RAW_WORDS)


@triton.jit
def sum_of(size, minus, before, ahead):
    """The number that a difference leads to, where they are told; and else the number itself."""
    number = tl.where(minus, -size, size) + tl.where(ahead, before, 0)
    return tl.abs(number), number < 0, number


@triton.jit
def store_raw(out, at, j, left, raw, bits, RAW_WORDS: tl.constexpr):
    if RAW_WORDS == CHUNK:
        tl.store(out + at + j, bits.to(tl.float32, bitcast=True), mask=raw & (at + j < left))
    else:
        at += 2 * j
        low = bits.to(tl.int16).to(out.dtype.element_ty, bitcast=True)
        high = (bits >> 16).to(tl.int16).to(out.dtype.element_ty, bitcast=True)
        tl.store(out + at, low, mask=raw & (at < left))
        tl.store(out + at + 1, high, mask=raw & (at + 1 < left))
