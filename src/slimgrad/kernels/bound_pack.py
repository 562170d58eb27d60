"""Packing within a bound: a look at each chunk, a plan for it, and its symbols one behind the other.

How many words symbols make is known at the end only. So they are left in a scratch that belongs to the program (a tenth
of what was read), and copied to their place when that is known. See bounds.py for what is written, and NOTE [A chunk to
a thread] in bound_columns.py.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels import bounds
from slimgrad.kernels.bound_columns import (
    CHUNK,
    GROUP,
    HAS_ZEROS,
    LANES,
    LEVEL_SHIFT,
    MOST_LEVEL,
    PREDICTED,
    SIGNED,
    TILE,
    WORD_BITS,
    columns_of,
    first_state,
    load_group,
    next_state,
    offset_of,
    sign_of,
    size_of,
    step_of,
)
from slimgrad.kernels.tiles import bits_of, float32, float_of

COPIED = tl.constexpr(8)
"""Words of a chunk that are on their way at once: one after the other made packing 15 % longer."""
MOST_BITS, MOST_K = tl.constexpr(bounds.MOST_BITS), tl.constexpr(bounds.MOST_K)
LIMIT, MEAN_OFFSET = tl.constexpr(bounds.LIMIT), tl.constexpr(bounds.MEAN_OFFSET)
COVERED_LEVELS = tl.constexpr(bounds.COVERED_LEVELS)
PLAIN_SPARE, AHEAD_SPARE = tl.constexpr(bounds.PLAIN_SPARE), tl.constexpr(bounds.AHEAD_SPARE)


@triton.jit
def none_yet(DTYPE: tl.constexpr):
    return tl.zeros([LANES], DTYPE)


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
    symbols = some * (k + 1).to(tl.float32) + steps * power * tl.where(signed, 2.0, 1.0)
    return symbols + tl.where(zeros, 1.0, 0.0) * CHUNK


@triton.jit
def looked_at(x, left, threshold, AHEAD: tl.constexpr):
    """Of each chunk: the largest magnitude, their sum, how many are above the threshold, and whether one is negative;
    then the first three of differences to the element before.
    """
    largest, total, some = none_yet(tl.float32), none_yet(tl.float32), none_yet(tl.int32)
    far, way, moved = none_yet(tl.float32), none_yet(tl.float32), none_yet(tl.int32)
    signs, before = none_yet(tl.int32), none_yet(tl.float32)
    for j in range(0, CHUNK, GROUP):
        columns = columns_of(float32(load_group(x, j, left)))
        for i in tl.static_range(GROUP):
            largest, total, some = seen(tl.abs(columns[i]), largest, total, some, threshold)
            signs |= bits_of(columns[i])
            if AHEAD:
                far, way, moved = seen(tl.abs(columns[i] - before), far, way, moved, 0.0)
                before = columns[i]
    return largest, total, some, signs < 0, far, way, moved


@triton.jit
def planned(
    x, left, bound, MANTISSA: tl.constexpr, MOST: tl.constexpr, LEAST_BOUND: tl.constexpr, LEAST_SLACK: tl.constexpr,
    BETWEEN: tl.constexpr, PLAIN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """How each chunk is told: whether it can be, whether it is all zeros, then level, 1 / step, k, and the flags."""
    threshold = none_yet(tl.float32) if BETWEEN else 2.0 * bound
    largest, total, some, minus, far, way, moved = looked_at(x, left, threshold, AHEAD)
    level = level_of(largest, bound, MANTISSA, LEAST_SLACK)
    inverse = inverse_of(step_of(bound, level))
    usable = (bound >= LEAST_BOUND) & (largest + bound * 2.0 <= MOST)
    usable = usable & (level <= MOST_LEVEL) & (largest * inverse < LIMIT)
    empty = (largest == 0) if BETWEEN else ((largest * inverse + 0.5 < 1) & (usable | (largest == 0)))
    gaps = some < CHUNK
    k = rice_of(largest, total, some, inverse, minus, PLAIN_SPARE)
    ahead = largest < 0
    if AHEAD:
        yes = largest >= 0
        other = rice_of(far, way, moved, inverse, yes, AHEAD_SPARE)
        ahead = yes
        if PLAIN:
            plain = cost_of(total, some, inverse, k, minus, gaps)
            ahead = cost_of(way, moved, inverse, other, yes, yes) < plain
        k = tl.where(ahead, other, k)
    return usable, empty, level, inverse, k, (minus | ahead).to(tl.int32), (gaps | ahead).to(tl.int32), ahead


# --- symbols ---


@triton.jit
def symbol_of(x, offset, before, inverse, plan, BETWEEN: tl.constexpr, AHEAD: tl.constexpr):
    """The symbol of an element, its bits, and the number, for the difference of the next to it."""
    k, low_bits, factor, base, full, ahead = plan
    size, minus = size_of(x, inverse, offset), sign_of(x)
    some = (x != 0) if BETWEEN else (size != 0)
    number = before
    if AHEAD:
        number = tl.where(some, tl.where(minus == 1, -size, size), 0)
        change = number - before
        size, minus = tl.where(ahead, tl.abs(change), size), tl.where(ahead, sign_of(change), minus)
        some = tl.where(ahead, change != 0, some)
    v = size * factor + (minus + base)
    gap = v >> k
    symbol = ((v & low_bits) * 2 + 1) << gap
    told = some | full
    return tl.where(told, symbol, 1).to(tl.uint32), tl.where(told, gap + (k + 1), 1), number


@triton.jit
def told(
    x, left, chunk, inverse, one, plan, scratch,
    BETWEEN: tl.constexpr, DITHER: tl.constexpr, AHEAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """All symbols of each chunk, in the scratch: the last word, its bits, and where it belongs."""
    word, filled, slot, number = none_yet(tl.uint32), none_yet(tl.int32), none_yet(tl.int32), none_yet(tl.int32)
    state = first_state(chunk)
    for j in range(0, CHUNK, GROUP):
        columns = columns_of(float32(load_group(x, j, left)))
        for i in tl.static_range(0, GROUP, 2):
            offset = offset_of(state, one, BETWEEN, DITHER, NATIVE)
            first, bits, number = symbol_of(columns[i], offset, number, inverse, plan, BETWEEN, AHEAD)
            state = next_state(state, DITHER)
            offset = offset_of(state, one, BETWEEN, DITHER, NATIVE)
            second, more, number = symbol_of(columns[i + 1], offset, number, inverse, plan, BETWEEN, AHEAD)
            state = next_state(state, DITHER)
            wide = (first | (second << bits)).to(tl.uint64) << filled
            word |= wide.to(tl.uint32)
            filled += bits + more
            full = filled >= WORD_BITS
            tl.store(scratch + slot, word, mask=full)
            word = tl.where(full, (wide >> WORD_BITS).to(tl.uint32), word)
            slot += tl.where(full, LANES, 0)
            filled &= WORD_BITS - 1
    return word, filled, slot


@triton.jit
def copied(scratch, words, begin, length, capacity):
    """From the scratch to their place."""
    longest = tl.max(length, 0)
    i = 0
    while i < longest:
        found = ()
        for c in tl.static_range(COPIED):
            found = found + (tl.load(scratch + (i + c) * LANES, mask=i + c < length, other=0),)  # noqa: RUF005
        for c in tl.static_range(COPIED):
            live = (i + c < length) & (begin + i + c < capacity)
            tl.store(words + begin + i + c, found[c], mask=live)
        i += COPIED


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


@triton.jit(do_not_specialize=["n", "capacity", "tiles"])
def pack_kernel(
    x, words, heads, places, bound, scratch, capacity, n, tiles,
    RAW_WORDS: tl.constexpr, LENGTH_SHIFT: tl.constexpr, DITHER: tl.constexpr, NATIVE: tl.constexpr,
    MANTISSA: tl.constexpr, MOST: tl.constexpr, LEAST_BOUND: tl.constexpr, LEAST_SLACK: tl.constexpr,
    BETWEEN: tl.constexpr, PLAIN: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile after the other. PLAIN and AHEAD: whether numbers are tried as they are, and as differences."""
    lane = tl.arange(0, LANES)
    eb = tl.load(bound + lane * 0)
    one = bits_of(eb * 0.0 + 1.0)
    scratch += tl.program_id(0) * TILE // 2 + lane
    raw_length: tl.constexpr = (1 << (16 - LENGTH_SHIFT)) - 1
    most_words: tl.constexpr = RAW_WORDS if raw_length > RAW_WORDS else raw_length
    tile = tl.program_id(0)
    while tile < tiles:
        start, left, at = x + tile.to(tl.int64) * TILE, n - tile * TILE, lane * CHUNK
        usable, empty, level, inverse, k, signed, zeros, ahead = planned(
            start, left, eb, MANTISSA, MOST, LEAST_BOUND, LEAST_SLACK, BETWEEN, PLAIN, AHEAD
        )
        # With zeros, v >> k counts one more: the zero that says "no zero".
        plan = k, (1 << k) - 1, 1 << signed, (zeros << k) - (1 << signed), zeros == 0, ahead
        chunk = tile * LANES + lane
        word, filled, slot = told(start, left, chunk, inverse, one, plan, scratch, BETWEEN, DITHER, AHEAD, NATIVE)
        rest = (filled > 0) & usable
        tl.store(scratch + slot, word, mask=rest)
        count = tl.where(empty, 0, slot // LANES + rest.to(tl.int32))
        raw = (empty == 0) & ((usable == 0) | (count >= most_words)) & (at < left)
        length = tl.where(raw, RAW_WORDS, tl.where(at < left, count, 0))
        place = tl.atomic_add(places + tiles, tl.sum(length, 0))
        tl.store(places + tile, place)
        head = k + signed * SIGNED + zeros * HAS_ZEROS + tl.where(ahead, PREDICTED, 0)
        head += (level << LEVEL_SHIFT) + (length << LENGTH_SHIFT)
        head = tl.where(raw, raw_length << LENGTH_SHIFT, tl.where(empty, 0, head))
        tl.store(heads + chunk, head.to(tl.int16), mask=at < left)
        begin = place + tl.cumsum(length, 0) - length
        tl.debug_barrier()
        copied(scratch, words, begin, tl.where(raw, 0, length), capacity)
        if tl.max(raw.to(tl.int32), 0) == 1:
            for j in range(0, RAW_WORDS):
                bits = raw_word(start, at, j, left, RAW_WORDS)
                tl.store(words + begin + j, bits, mask=raw & (begin + j < capacity))
        tl.debug_barrier()
        tile += tl.num_programs(0)
