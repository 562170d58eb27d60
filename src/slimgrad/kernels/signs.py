"""Signs of the elements that are not picked, and their mean magnitudes, in Triton: see picks.py."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from slimgrad.kernels import picks
from slimgrad.kernels.tiles import float_of, rounded

TILE = tl.constexpr(picks.TILE)
SPAN = tl.constexpr(picks.SPAN)
NAMES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _by_span(x):
    """Sums of the spans of a tile: 8 elements of one thread first, then those of 128 threads."""
    return tl.sum(tl.reshape(tl.sum(x, 1), [TILE // SPAN, SPAN // 8]), 1)


@triton.jit
def _of_rows(x):
    """What a span has, for each row of 8 elements of a tile."""
    return tl.reshape(tl.broadcast_to(x[:, None], [TILE // SPAN, SPAN // 8]), [TILE // 8])[:, None]


@triton.jit(do_not_specialize=["n"])
def signs_kernel(x_ptr, signs_ptr, work_ptr, n, DTYPE: tl.constexpr):
    """Of one tile. `work` begins with the least magnitude that is picked."""
    tile = tl.program_id(0)
    cell = tl.arange(0, TILE // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    first = tile.to(tl.int64) * TILE
    exists = cell < n - first
    bits = tl.load(x_ptr + first + cell, mask=exists, other=0)
    if tl.float32 == DTYPE:
        magnitude = bits & 0x7FFFFFFF
        size = float_of(magnitude)
    else:
        magnitude = bits.to(tl.int32) & 0x7FFF
        if tl.bfloat16 == DTYPE:
            size = float_of(magnitude << 16)
        else:
            size = magnitude.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    other = magnitude > 0
    negative = (bits < 0) & other
    has_sign = _by_span(negative.to(tl.int32)) > 0
    has_signs = _of_rows(has_sign)
    byte = tl.sum(tl.where(has_signs, negative, other).to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    tl.store(signs_ptr + first // 8 + tl.arange(0, TILE // 8), byte.to(tl.uint8))
    counted = (magnitude < tl.load(work_ptr)) & (has_signs | other) & exists
    mean = _by_span(tl.where(counted, size, 0.0)) / tl.maximum(_by_span(counted.to(tl.int32)), 1).to(tl.float32)
    means = rounded(tl.where(has_sign, mean, -mean), DTYPE).to(bits.dtype, bitcast=True)
    tiles = (n + TILE - 1) // TILE
    means_ptr = (signs_ptr + tiles.to(tl.int64) * (TILE // 8)).to(tl.pointer_type(bits.dtype))
    tl.store(means_ptr + tile * (TILE // SPAN) + tl.arange(0, TILE // SPAN), means)


@triton.jit
def signed_means(signs_ptr, tile, n, cell, DTYPE: tl.constexpr):
    """What elements of a tile are if they are not picked, by their bits. The signs of all begin at `signs_ptr`."""
    tiles = (n + TILE - 1) // TILE
    means_ptr = (signs_ptr + tiles.to(tl.int64) * (TILE // 8)).to(tl.pointer_type(DTYPE))
    mean = tl.load(means_ptr + tile * (TILE // SPAN) + cell // SPAN).to(tl.int32)
    byte = tl.load(signs_ptr + tile.to(tl.int64) * (TILE // 8) + cell // 8).to(tl.int32)
    bit = (byte >> (cell % 8)) & 1
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
    tiles = (n + TILE - 1) // TILE
    means_ptr = (signs_ptr + tiles.to(tl.int64) * (TILE // 8)).to(tl.pointer_type(tl.int16 if WIDTH == 2 else tl.int32))
    mean = tl.load(means_ptr + tile * (TILE // SPAN) + vector * EACH // SPAN).to(tl.int32)
    bits = tl.load(signs_ptr + tile.to(tl.int64) * (TILE // 8) + vector * EACH // 8).to(tl.int32)
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
