"""Signs of the elements that are not picked, and their mean magnitudes, in Triton: see picks.py."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimgrad.kernels import picks
from slimgrad.kernels.rows import (
    DEPTH,
    LANES,
    ROW,
    load_rows,
    magnitude_in,
    magnitude_of,
    marks_in,
    negative_in,
    reaching,
    rows_of_warps,
)
from slimgrad.kernels.tiles import float_of, rounded

TILE = tl.constexpr(picks.TILE)
SPAN = tl.constexpr(picks.SPAN)
NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _means(signs_ptr, n, DTYPE: tl.constexpr):
    """Where they begin, behind the bits of n elements; as integers of this type."""
    tiles = ((n + TILE - 1) // TILE).to(tl.int64)
    return (signs_ptr + tiles * (TILE // ROW)).to(tl.pointer_type(DTYPE))


@triton.jit
def _by_span(x):
    """Sums of the spans of a tile: 8 elements of one thread first, then those of 128 threads."""
    return tl.sum(tl.reshape(tl.sum(x, 1), [TILE // SPAN, SPAN // ROW]), 1)


@triton.jit
def _of_rows(x):
    """What a span has, for each row of a tile."""
    return tl.reshape(tl.broadcast_to(x[:, None], [TILE // SPAN, SPAN // ROW]), [TILE // ROW])[:, None]


@triton.jit
def _size_of(magnitude, DTYPE: tl.constexpr):
    """Magnitudes, given by their bits in int32, in float32."""
    if tl.float32 == DTYPE:
        size = float_of(magnitude)
    elif tl.bfloat16 == DTYPE:
        size = float_of(magnitude << 16)
    else:
        size = magnitude.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return size


@triton.jit
def _bits_of_mean(total, count, has_sign, DTYPE: tl.constexpr, BITS: tl.constexpr):
    mean = total / tl.maximum(count, 1).to(tl.float32)
    return rounded(tl.where(has_sign, mean, -mean), DTYPE).to(BITS, bitcast=True)


@triton.jit
def _sign_tile(x_ptr, signs_ptr, means_ptr, least, size, DTYPE: tl.constexpr):
    """Of one tile, of which so many elements exist."""
    cell = tl.arange(0, TILE // ROW)[:, None] * ROW + tl.arange(0, ROW)[None, :]
    exists = cell < size
    bits = tl.load(x_ptr + cell, mask=exists, other=0)
    magnitude = magnitude_of(bits)
    other = magnitude > 0
    negative = (bits < 0) & other
    has_sign = _by_span(negative.to(tl.int32)) > 0
    has_signs = _of_rows(has_sign)
    byte = tl.sum(tl.where(has_signs, negative, other).to(tl.int32) << tl.arange(0, ROW)[None, :], 1)
    tl.store(signs_ptr + tl.arange(0, TILE // ROW), byte.to(tl.uint8))
    counted = (magnitude < least) & (has_signs | other) & exists
    total, count = _by_span(tl.where(counted, _size_of(magnitude, DTYPE), 0.0)), _by_span(counted.to(tl.int32))
    means = _bits_of_mean(total, count, has_sign, DTYPE, bits.dtype)
    tl.store(means_ptr + tl.arange(0, TILE // SPAN), means)


@triton.jit
def _sign_chunk(x_ptr, signs_ptr, means_ptr, least, ROWS: tl.constexpr, DTYPE: tl.constexpr):
    """Of DEPTH rows for each thread: a span for each warp, which needs no other."""
    tl.static_assert(SPAN == DEPTH * LANES * ROW)
    HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.int16
    row = rows_of_warps(ROWS)
    negatives = tl.zeros([ROWS], tl.int32)
    others, smalls, total = negatives, negatives, negatives.to(tl.float32)
    one = tl.full([], 1, tl.int32)
    for depth in tl.static_range(DEPTH):
        words = load_rows(x_ptr + (row + depth * LANES) * ROW)
        other, small = reaching(words, one, HALF), ~reaching(words, least, HALF) & 0xFF
        negatives |= (negative_in(words, HALF) & other) << (8 * depth)
        others |= other << (8 * depth)
        smalls |= small << (8 * depth)
        for lane in tl.static_range(ROW):
            size = _size_of(magnitude_in(words, lane, HALF), DTYPE)
            total += tl.where(((small >> lane) & 1) != 0, size, 0.0)
    has_sign = tl.sum(tl.reshape((negatives != 0).to(tl.int32), [ROWS // LANES, LANES]), 1) > 0
    has_signs = tl.reshape(tl.broadcast_to(has_sign[:, None], [ROWS // LANES, LANES]), [ROWS])
    bits = tl.where(has_signs, negatives, others)
    for depth in tl.static_range(DEPTH):
        tl.store(signs_ptr + row + depth * LANES, ((bits >> (8 * depth)) & 0xFF).to(tl.uint8))
    marks = marks_in(tl.where(has_signs, smalls, smalls & others))
    marks = (marks & 0x00FF00FF) + ((marks >> 8) & 0x00FF00FF)
    count = tl.sum(tl.reshape((marks & 0xFFFF) + (marks >> 16), [ROWS // LANES, LANES]), 1)
    total = tl.sum(tl.reshape(total, [ROWS // LANES, LANES]), 1)
    means = _bits_of_mean(total, count, has_sign, DTYPE, x_ptr.dtype.element_ty)
    tl.store(means_ptr + tl.arange(0, ROWS // LANES), means)


@triton.jit(do_not_specialize=["n"])
def signs_kernel(x_ptr, signs_ptr, work_ptr, n, ROWS: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """`work` begins with the least magnitude that is picked."""
    CHUNK: tl.constexpr = DEPTH * ROWS * ROW
    least = tl.load(work_ptr)
    first = tl.program_id(0).to(tl.int64) * CHUNK
    means_ptr = _means(signs_ptr, n, x_ptr.dtype.element_ty)
    x_ptr += first
    signs_ptr += first // ROW
    means_ptr += first // SPAN
    size = tl.minimum(n - first, CHUNK).to(tl.int32)
    at = size * 0
    if ALIGNED:
        while at + CHUNK <= size:  # once, or not at all
            _sign_chunk(x_ptr, signs_ptr, means_ptr, least, ROWS, DTYPE)
            at += CHUNK
    while at < size:
        _sign_tile(x_ptr + at, signs_ptr + at // ROW, means_ptr + at // SPAN, least, size - at, DTYPE)
        at += TILE


@triton.jit
def signed_means(signs_ptr, tile, n, cell, DTYPE: tl.constexpr):
    """What elements of a tile are if they are not picked, by their bits. The signs of all begin at `signs_ptr`."""
    mean = tl.load(_means(signs_ptr, n, DTYPE) + tile * (TILE // SPAN) + cell // SPAN).to(tl.int32)
    byte = tl.load(signs_ptr + tile.to(tl.int64) * (TILE // ROW) + cell // ROW).to(tl.int32)
    bit = (byte >> (cell % ROW)) & 1
    TOP: tl.constexpr = 15 if tl.int16 == DTYPE else 31
    MOST: tl.constexpr = 0x7FFF if tl.int16 == DTYPE else 0x7FFFFFFF
    return tl.where(mean < 0, tl.where(bit != 0, mean & MOST, 0), mean | (bit << TOP)).to(DTYPE)


@triton.jit
def _word(mean, flags, WIDTH: tl.constexpr):
    """One word of them, of which `flags` has the bits, each where the sign of its element is."""
    if WIDTH == 2:
        size = (mean & 0x7FFF) | ((mean & 0x7FFF) << 16)
        every = ((flags >> 15) & 0x00010001) * 0x7FFF  # all bits below the flags
    else:
        size = mean & 0x7FFFFFFF
        every = flags >> 31
    return tl.where(mean < 0, size & every, size | flags)


@triton.jit
def signed_words(signs_ptr, tile, n, vector, WIDTH: tl.constexpr):
    """The same for vectors of 16 bytes of a tile, as four words each."""
    EACH: tl.constexpr = 16 // WIDTH
    means_ptr = _means(signs_ptr, n, tl.int16 if WIDTH == 2 else tl.int32)
    mean = tl.load(means_ptr + tile * (TILE // SPAN) + vector * EACH // SPAN).to(tl.int32)
    bits = tl.load(signs_ptr + tile.to(tl.int64) * (TILE // ROW) + vector * EACH // ROW).to(tl.int32)
    if WIDTH == 2:
        a = _word(mean, (bits & 1) << 15 | (bits & 2) << 30, WIDTH)
        b = _word(mean, (bits & 4) << 13 | (bits & 8) << 28, WIDTH)
        c = _word(mean, (bits & 16) << 11 | (bits & 32) << 26, WIDTH)
        d = _word(mean, (bits & 64) << 9 | (bits & 128) << 24, WIDTH)
    else:
        bits >>= vector % 2 * 4
        a = _word(mean, (bits & 1) << 31, WIDTH)
        b = _word(mean, (bits & 2) << 30, WIDTH)
        c = _word(mean, (bits & 4) << 29, WIDTH)
        d = _word(mean, (bits & 8) << 28, WIDTH)
    return a, b, c, d
