"""Unpacking within a bound: a thread reads its chunk's symbols one after the other.

See bounds.py for what they say, and NOTE [A chunk to a thread] in bound_columns.py.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

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
    first_state,
    next_state,
    offset_of,
    sign_of,
    step_of,
    store_columns,
    value_of,
)
from slimgrad.kernels.tiles import bits_of, float_of, rounded


@triton.jit
def zeros_before_one(window, NATIVE: tl.constexpr):
    """Of words that have a one."""
    if NATIVE:
        asm: tl.constexpr = "brev.b32 $0, $1; bfind.shiftamt.u32 $0, $0;"
        found = tl.inline_asm_elementwise(asm, "=r,r", [window], dtype=tl.int32, is_pure=True, pack=1)
    else:
        low = window & (0 - window)
        found = (low.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    return found


@triton.jit
def read_value(window, offset, before, step, how, ZEROS: tl.constexpr, AHEAD: tl.constexpr, NATIVE: tl.constexpr):
    """The value that the first symbol of a window stands for, the symbol's bits, and the number."""
    k, low_bits, factor, base, signed, sign_bit, full, ahead = how
    gap = zeros_before_one(window, NATIVE)
    told = (gap > 0) | full
    bits = tl.where(told, gap + (k + 1), 1)
    v = gap * factor + ((window >> gap).to(tl.int32) & low_bits) - base  # twice what was told: bit 1 is the sign
    less, minus, number = v >> (signed + 1), (v << 30) & sign_bit, before
    if AHEAD:
        size = tl.where(told, less + 1, 0)
        number = tl.where(minus < 0, -size, size) + tl.where(ahead, before, 0)
        less, minus, told = tl.abs(number) - 1, sign_of(number) << 31, number != 0
    value = float_of(bits_of(value_of(less, offset, step, ZEROS)) ^ minus)
    return tl.where(told, value, 0.0), bits, number


@triton.jit
def read_columns(
    words, cursor, step, one, how, DTYPE: tl.constexpr, BETWEEN: tl.constexpr, ZEROS: tl.constexpr,
    DITHER: tl.constexpr, AHEAD: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The next GROUP values of each chunk. A cursor: two words, how many bits of the first are used, where the next
    word is and the last ends; then the number and the state.
    """
    word, after, used, later, end, number, state = cursor
    values = ()
    for _ in tl.static_range(0, GROUP, 2):
        window = (((after.to(tl.uint64) << WORD_BITS) | word.to(tl.uint64)) >> used).to(tl.uint32)
        offset = offset_of(state, one, BETWEEN, DITHER, NATIVE)
        value, bits, number = read_value(window, offset, number, step, how, ZEROS, AHEAD, NATIVE)
        state = next_state(state, DITHER)
        offset = offset_of(state, one, BETWEEN, DITHER, NATIVE)
        other, more, number = read_value(window >> bits, offset, number, step, how, ZEROS, AHEAD, NATIVE)
        state = next_state(state, DITHER)
        values = values + (rounded(value, DTYPE), rounded(other, DTYPE))  # noqa: RUF005
        used += bits + more
        done = used >= WORD_BITS
        fresh = tl.load(words + later, mask=done & (later < end), other=-1).to(tl.uint32, bitcast=True)
        word, after = tl.where(done, after, word), tl.where(done, fresh, after)
        later += done.to(tl.int32)
        used &= WORD_BITS - 1
    return values, (word, after, used, later, end, number, state)


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


@triton.jit(do_not_specialize=["n", "tiles"])
def unpack_kernel(
    words, out, heads, places, bound, n, tiles,
    RAW_WORDS: tl.constexpr, LENGTH_SHIFT: tl.constexpr, DITHER: tl.constexpr, NATIVE: tl.constexpr,
    BETWEEN: tl.constexpr, ZEROS: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile after the other. ZEROS: whether no value but zero may become zero by its shift."""
    lane = tl.arange(0, LANES)
    eb = tl.load(bound + lane * 0)
    one = bits_of(eb * 0.0 + 1.0)
    raw_length: tl.constexpr = (1 << (16 - LENGTH_SHIFT)) - 1
    tile = tl.program_id(0)
    while tile < tiles:
        start, left, at = out + tile.to(tl.int64) * TILE, n - tile * TILE, lane * CHUNK
        head = tl.load(heads + tile * LANES + lane, mask=at < left, other=0).to(tl.int32) & 0xFFFF
        length = head >> LENGTH_SHIFT
        raw = length == raw_length
        length = tl.where(raw, RAW_WORDS, length)
        begin = tl.load(places + tile) + tl.cumsum(length, 0) - length
        end = begin + tl.where(raw, 0, length)
        k, signed, zeros = head & 15, (head // SIGNED) & 1, (head // HAS_ZEROS) & 1
        zeros = tl.where(begin < end, zeros, 1)  # beyond the last word all bits are ones, and these are zeros
        ahead = (head & PREDICTED) != 0
        how = k, (2 << k) - 2, 2 << k, zeros << (k + 1), signed, signed << 31, zeros == 0, ahead
        level = tl.zeros([LANES], tl.int32) if RAW_WORDS == CHUNK else (head >> LEVEL_SHIFT) & MOST_LEVEL
        step = step_of(eb, level)
        word = tl.load(words + begin, mask=begin < end, other=-1).to(tl.uint32, bitcast=True)
        after = tl.load(words + begin + 1, mask=begin + 1 < end, other=-1).to(tl.uint32, bitcast=True)
        used, number, state = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32), first_state(tile * LANES + lane)
        cursor = word, after, used, begin + 2, end, number, state
        for j in range(0, CHUNK, GROUP):
            values, cursor = read_columns(
                words, cursor, step, one, how, out.dtype.element_ty, BETWEEN, ZEROS, DITHER, AHEAD, NATIVE
            )
            store_columns(start, j, left, values)
        if tl.max(raw.to(tl.int32), 0) == 1:
            tl.debug_barrier()
            for j in range(0, RAW_WORDS):
                store_raw(start, at, j, left, raw, tl.load(words + begin + j, mask=raw, other=0), RAW_WORDS)
        tile += tl.num_programs(0)
