"""Packing groups in Triton.

A program is one warp and treats one tile as [rounds, groups, threads of a group, lanes]; see NOTE [Tiles], groups.py.
Only the last tile may be ragged, so only it has masks. Tiles without a wild group, that is all of them in a healthy
training, take a short way that tests nothing per element; with one warp, asking costs no barrier.

A nonlinearity may be computed on the way: x is read once for both.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels import reference_groups
from slimgrad.kernels.formulas import value_of
from slimgrad.kernels.tiles import (
    GOLDEN,
    INTERPRETED,
    LANES,
    ROUNDS,
    SPECIALS,
    THREADS,
    TILE,
    WILD_PART,
    bits_of,
    float32,
    float_of,
    hashed,
    lanes,
    mixed,
    rounded,
)

RAISE = tl.constexpr(reference_groups.RAISE)
RAISE_BITS = tl.constexpr(0x43000000)
ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2**23: adding it to a small float leaves the nearest integer (ties to even) in the low bits of the sum."""


@triton.jit
def _least(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _has_nan(x):
    """Of each group. Some versions of the interpreter lose NaN where they reduce."""
    return tl.max(tl.max(tl.max(tl.where(x == x, 0, 1), 3), 0), 1) != 0


@triton.jit
def _low_of(x):
    """The least of each group, [rounds, groups, threads, lanes] -> [1, groups, 1, 1]; NaN if there is one."""
    if INTERPRETED:
        return tl.where(_has_nan(x), float("nan"), tl.min(tl.min(tl.min(x, 3), 0), 1))[None, :, None, None]
    return tl.reduce(tl.reduce(tl.reduce(x, 3, _least), 0, _least), 1, _least)[None, :, None, None]


@triton.jit
def _high_of(x):
    if INTERPRETED:
        return tl.where(_has_nan(x), float("nan"), tl.max(tl.max(tl.max(x, 3), 0), 1))[None, :, None, None]
    return tl.reduce(tl.reduce(tl.reduce(x, 3, _largest), 0, _largest), 1, _largest)[None, :, None, None]


@triton.jit
def _raised_fractions(scales, number, seed, pair):
    """RAISE and a fraction in [0, 1) per element; see NOTE [Random numbers without a state] in groups.py."""
    key = hashed(scales.to(tl.uint32, bitcast=True) ^ hashed((number + seed).to(tl.uint32)))
    drawn = mixed(key + pair.to(tl.uint32) * GOLDEN)
    both = tl.join((drawn & 0xFFFF) | RAISE_BITS, (drawn >> 16) | RAISE_BITS)
    return tl.reshape(both, [both.shape[0], both.shape[1], both.shape[2], LANES]).to(tl.float32, bitcast=True)


@triton.jit
def _down(raised):
    """The integer below a number that was raised, less RAISE: by a sum that is rounded down, see ROUNDER."""
    if INTERPRETED:
        return (tl.floor(raised) - RAISE).to(tl.int32)
    # 0x4B3FFF80 is ROUNDER - RAISE
    bits = tl.inline_asm_elementwise("add.rm.f32 $0, $1, 0f4B3FFF80;", "=r,f", [raised], tl.int32, True, 1)
    return bits & 0xFF


@triton.jit
def _offset_of(low):
    """The largest bfloat16 that is not above `low`; never -inf."""
    low = tl.where(low == 0.0, 0.0, low)  # -0.0 becomes 0.0
    bits = bits_of(low)
    away = tl.minimum((bits + 0xFFFF) & -0x10000, -0x00810000)
    return float_of(tl.where(low < 0.0, away, bits & -0x10000))


@triton.jit
def _scale(low, high, factor, ZEROS: tl.constexpr, LEAST: tl.constexpr):
    """Offset and step of each group; the step is rounded up to bfloat16."""
    offset = tl.zeros_like(high) if ZEROS else _offset_of(low)
    step = (high * 0.5 - offset * 0.5) * factor
    rounded = float_of(tl.minimum((bits_of(step) + 0xFFFF) & -0x10000, 0x7F7F0000))
    step = tl.where(step > 0.0, tl.maximum(rounded, LEAST), 0.0)
    return step * 0.5 if ZEROS else offset, step


@triton.jit
def _scales_of(offset, step):
    return ((bits_of(offset) >> 16) & 0xFFFF) | (bits_of(step) & -0x10000)


@triton.jit
def _place_of(x, offset, step):
    """Where x lies on the group's scale, in steps."""
    return (x - offset) * tl.where(step > 0.0, tl.div_rn(1.0, step), 0.0)


@triton.jit
def _tame_codes(
    x,
    low,
    high,
    number,
    seed,
    pair,
    LAST: tl.constexpr,
    FACTOR: tl.constexpr,
    LEAST: tl.constexpr,
    ZEROS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Codes and scales where every number is finite and none is huge: rounding cannot leave the range."""
    offset, step = _scale(low, high, FACTOR, ZEROS, LEAST)
    scales = _scales_of(offset, step)
    at = _place_of(x, offset, step)
    if ZEROS:
        at = tl.maximum(at, 0.0)
    if STOCHASTIC:
        at += _raised_fractions(scales, number, seed, pair)
        if ZEROS or LAST > 15:  # otherwise the sum is fine enough to stay under LAST + 1
            at = tl.minimum(at, LAST + RAISE + 0.5)
        codes = _down(at)
    else:
        codes = bits_of(at + ROUNDER) & 0xFF
    if ZEROS:
        codes = tl.where(x == 0.0, 0, codes + 1)
    return codes, scales


@triton.jit
def _any_codes(
    x,
    exists,
    number,
    seed,
    pair,
    LAST: tl.constexpr,
    FACTOR: tl.constexpr,
    WILD_LAST: tl.constexpr,
    WILD_FACTOR: tl.constexpr,
    TAME: tl.constexpr,
    LEAST: tl.constexpr,
    ZEROS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Codes and scales for whatever there is, element by element; the same as the short way where that is taken."""
    finite = tl.abs(x) <= 3.4028234663852886e38
    strange = tl.where(exists & ((tl.abs(x) <= TAME) == 0), 1, 0)
    wild = tl.max(tl.max(tl.max(strange, 3), 0), 1)[None, :, None, None] != 0
    low = _low_of(tl.where(finite & exists, x, float("inf")))
    high = _high_of(tl.where(finite & exists, x, -float("inf")))
    low, high = tl.where(low > high, 0.0, low), tl.where(low > high, 0.0, high)  # a group without a number
    offset, step = _scale(low, high, tl.where(wild, WILD_FACTOR, FACTOR), ZEROS, LEAST)
    scales = _scales_of(offset, step) | tl.where(wild, -0x80000000, 0).to(tl.int32)
    part = tl.where(wild, WILD_PART, 1.0)
    at = _place_of(tl.where(finite, x, 0.0) * part, offset * part, step) * tl.where(wild, 1.0 / WILD_PART, 1.0)
    if STOCHASTIC:
        at = tl.floor(at + _raised_fractions(scales, number, seed, pair)) - RAISE
    at = tl.minimum(tl.maximum(at, 0.0), tl.where(wild, WILD_LAST, LAST).to(tl.float32))
    codes = (bits_of(at + ROUNDER) & 0xFF) + tl.where(wild, SPECIALS, 1 if ZEROS else 0)
    if ZEROS:
        codes = tl.where(x == 0.0, 0, codes)
    codes = tl.where(x != x, 1 if ZEROS else 0, codes)
    codes = tl.where(x == -float("inf"), 1, codes)
    codes = tl.where(x == float("inf"), 2, codes)
    return tl.where(exists, codes, 0), scales


@triton.jit
def _least_of_pairs(a, b):
    return tl.inline_asm_elementwise("min.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _largest_of_pairs(a, b):
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _least_of_half_pairs(a, b):
    return tl.inline_asm_elementwise("min.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _largest_of_half_pairs(a, b):
    return tl.inline_asm_elementwise("max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.int32, True, 1)


@triton.jit
def _of_pair(words, HALF: tl.constexpr):
    """The two 16-bit numbers of each word in float32."""
    if HALF:
        first = words.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        return first, (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return float_of(words << 16), float_of(words & -0x10000)


@triton.jit
def _tile_of_pairs(words, HALF: tl.constexpr, ZEROS: tl.constexpr):
    """The tile in float32, and least and largest of each group, found two numbers at a time in 16 bits.

    This halves the work of the search, the largest part of packing: from 84 to 89 % of copy bandwidth for bf16.
    """
    a, b = _of_pair(words, HALF)
    x = tl.reshape(tl.join(a, b), [ROUNDS, words.shape[1], words.shape[2], LANES])
    if HALF:
        high = tl.reduce(tl.reduce(words, 3, _largest_of_half_pairs), 0, _largest_of_half_pairs)
        low = tl.reduce(tl.reduce(words, 3, _least_of_half_pairs), 0, _least_of_half_pairs)
    else:
        high = tl.reduce(tl.reduce(words, 3, _largest_of_pairs), 0, _largest_of_pairs)
        low = tl.reduce(tl.reduce(words, 3, _least_of_pairs), 0, _least_of_pairs)
    a, b = _of_pair(high, HALF)
    high = tl.reduce(_largest(a, b), 1, _largest)[None, :, None, None]
    a, b = _of_pair(low, HALF)
    low = high if ZEROS else tl.reduce(_least(a, b), 1, _least)[None, :, None, None]  # unused, so never computed
    return x, low, high


@triton.jit
def _pairs(SHARE: tl.constexpr):
    """The place of each pair of elements in its group."""
    turn = tl.arange(0, ROUNDS)[:, None, None, None]
    lane = tl.arange(0, LANES // 2)[None, None, None, :]
    return (tl.arange(0, SHARE)[None, None, :, None] * ROUNDS + turn) * (LANES // 2) + lane


@triton.jit
def _store_plane(out_ptr, codes, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH bits of each code from bit SHIFT on, eight codes to a word; the words of a thread lie side by side."""
    if WIDTH == 8:
        tl.store(out_ptr + tl.arange(0, TILE), tl.reshape(tl.permute(codes, [1, 2, 0, 3]), [TILE]).to(tl.uint8))
    else:
        part = (codes >> SHIFT) & ((1 << WIDTH) - 1)
        words = tl.sum(part << (lanes() * WIDTH), 3)
        words = tl.reshape(tl.permute(words, [1, 2, 0]), [TILE // LANES])
        word = tl.arange(0, TILE // LANES)
        if WIDTH == 4:
            tl.store(out_ptr.to(tl.pointer_type(tl.int32)) + word, words)
        elif WIDTH == 2:
            tl.store(out_ptr.to(tl.pointer_type(tl.int16)) + word, words.to(tl.int16))
        else:
            tl.store(out_ptr.to(tl.pointer_type(tl.int8)) + word, words.to(tl.int8))


@triton.jit
def _store(out_ptr, codes, scales, BITS: tl.constexpr, GROUPS: tl.constexpr):
    """The codes and scales of this program's tile."""
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    tile = tl.program_id(0).to(tl.int64)
    tiles = tl.num_programs(0).to(tl.int64)
    _store_plane(out_ptr + tile * (TILE // 8 * LOW), codes, 0, LOW)
    if BITS == 3:
        _store_plane(out_ptr + tiles * (TILE // 4) + tile * (TILE // 8), codes, 2, 1)
    scale_ptr = (out_ptr + tiles * (TILE // 8 * BITS)).to(tl.pointer_type(tl.int32))
    tl.store(scale_ptr + tile * GROUPS + tl.arange(0, GROUPS), tl.reshape(scales, [GROUPS]))


@triton.jit
def _store_values(y_ptr, x, left, WHOLE: tl.constexpr, FUNCTION: tl.constexpr, NATIVE: tl.constexpr):
    """f of a tile, in the order of memory."""
    OUT: tl.constexpr = y_ptr.dtype.element_ty
    y = tl.reshape(rounded(value_of(x, FUNCTION, tl.float32 == OUT, NATIVE), OUT), [TILE])
    cell = tl.arange(0, TILE)
    if WHOLE:
        tl.store(y_ptr + cell, y)
    else:
        tl.store(y_ptr + cell, y, mask=cell < left)


@triton.jit(do_not_specialize=["n", "seed"])
def pack_kernel(
    x_ptr,
    out_ptr,
    y_ptr,
    n,
    seed,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    LAST: tl.constexpr,
    FACTOR: tl.constexpr,
    WILD_LAST: tl.constexpr,
    WILD_FACTOR: tl.constexpr,
    TAME: tl.constexpr,
    LEAST: tl.constexpr,
    PAIRS: tl.constexpr,
    FUNCTION: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes and scales of x; with a function, also f(x) to `y_ptr`, which is None otherwise."""
    GROUPS: tl.constexpr = TILE // GROUP
    SHARE: tl.constexpr = THREADS // GROUPS
    tile = tl.program_id(0).to(tl.int64)
    cell = tl.arange(0, TILE)
    pair = _pairs(SHARE)
    number = tile * GROUPS + tl.arange(0, GROUPS)[None, :, None, None]
    x_ptr += tile * TILE
    left = n - tile * TILE
    tame = left >= TILE
    if tame:
        if PAIRS:
            words = tl.load(x_ptr.to(tl.pointer_type(tl.int32)) + tl.arange(0, TILE // 2))
            words = tl.reshape(words, [ROUNDS, GROUPS, SHARE, LANES // 2])
            x, low, high = _tile_of_pairs(words, x_ptr.dtype.element_ty == tl.float16, ZEROS)
        else:
            x = float32(tl.reshape(tl.load(x_ptr + cell), [ROUNDS, GROUPS, SHARE, LANES]))
            high = _high_of(x)
            low = high if ZEROS else _low_of(x)
        tame = tl.min(tl.where((low >= -TAME) & (high <= TAME), 1, 0)) == 1
        if tame:
            codes, scales = _tame_codes(x, low, high, number, seed, pair, LAST, FACTOR, LEAST, ZEROS, STOCHASTIC)
            _store(out_ptr, codes, scales, BITS, GROUPS)
            if FUNCTION != "":
                _store_values(y_ptr + tile * TILE, x, left, True, FUNCTION, NATIVE)
    if not tame:  # reads again, so that the short way need not hold its registers for this one
        exists = tl.reshape(cell < left, [ROUNDS, GROUPS, SHARE, LANES])
        x = tl.reshape(float32(tl.load(x_ptr + cell, mask=cell < left, other=0.0)), [ROUNDS, GROUPS, SHARE, LANES])
        codes, scales = _any_codes(
            x, exists, number, seed, pair, LAST, FACTOR, WILD_LAST, WILD_FACTOR, TAME, LEAST, ZEROS, STOCHASTIC
        )
        _store(out_ptr, codes, scales, BITS, GROUPS)
        if FUNCTION != "":
            _store_values(y_ptr + tile * TILE, x, left, False, FUNCTION, NATIVE)
