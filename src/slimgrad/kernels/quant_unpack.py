"""Unpacking groups in Triton: a program is one warp and treats one tile, as in quant_pack.py."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels.tiles import (
    LANES,
    ROUNDS,
    SPECIALS,
    THREADS,
    TILE,
    WILD_PART,
    float_of,
    lanes,
    rounded,
)


@triton.jit
def _load_words(packed_ptr, WIDTH: tl.constexpr):
    """One plane of a tile, flat: words of four 8-bit codes, else of eight codes."""
    word = tl.arange(0, TILE // 4 if WIDTH == 8 else TILE // LANES)
    if WIDTH == 8 or WIDTH == 4:
        words = tl.load(packed_ptr.to(tl.pointer_type(tl.int32)) + word)
    elif WIDTH == 2:
        words = tl.load(packed_ptr.to(tl.pointer_type(tl.int16)) + word)
    else:
        words = tl.load(packed_ptr + word)
    return words.to(tl.int32)


@triton.jit
def _codes_of(words, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """The codes in the words of one plane."""
    SHARE: tl.constexpr = THREADS // GROUPS
    if WIDTH == 8:
        words = tl.permute(tl.reshape(words, [GROUPS, SHARE, ROUNDS, 2]), [2, 0, 1, 3])
        codes = (words[:, :, :, :, None] >> (tl.arange(0, 4)[None, None, None, None, :] * 8)) & 0xFF
        codes = tl.reshape(codes, [ROUNDS, GROUPS, SHARE, LANES])
    else:
        words = tl.permute(tl.reshape(words, [GROUPS, SHARE, ROUNDS]), [2, 0, 1])
        codes = (words[:, :, :, None] >> (lanes() * WIDTH)) & ((1 << WIDTH) - 1)
    return codes


@triton.jit
def _tame_values(codes, scales, ZEROS: tl.constexpr):
    """What the codes of tame groups stand for. code * step is exact, so that fusing it with the sum changes no bit."""
    number = float_of(codes | 0x4B000000) - (8388609.0 if ZEROS else 8388608.0)  # an integer to float, by its bits
    values = tl.fma(number, float_of(scales & 0x7FFF0000), float_of(scales << 16))
    return tl.where(codes == 0, 0.0, values) if ZEROS else values


@triton.jit
def _any_values(codes, scales, ZEROS: tl.constexpr, LARGEST: tl.constexpr):
    """What codes stand for in tame and wild groups alike."""
    wild = scales < 0
    number = (codes - tl.where(wild, SPECIALS, 1 if ZEROS else 0)).to(tl.float32)
    part = tl.where(wild, WILD_PART, 1.0)
    values = float_of(scales << 16) * part + number * (float_of(scales & 0x7FFF0000) * part)
    values = tl.minimum(tl.maximum(values, -LARGEST * part), LARGEST * part) * tl.where(wild, 1.0 / WILD_PART, 1.0)
    values = tl.where(codes == 0, 0.0, values) if ZEROS else tl.where(wild & (codes == 0), float("nan"), values)
    values = tl.where(wild & (codes == 1), float("nan") if ZEROS else -float("inf"), values)
    return tl.where(wild & (codes == 2), float("inf"), values)


@triton.jit
def tile_values(
    packed_ptr,
    tile,
    tiles,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """What one tile stands for, in float32; as a warp holds it."""
    GROUPS: tl.constexpr = TILE // GROUP
    SHARE: tl.constexpr = THREADS // GROUPS
    LOW: tl.constexpr = 2 if BITS == 3 else BITS
    scale_ptr = (packed_ptr + tiles * (TILE // 8 * BITS)).to(tl.pointer_type(tl.int32)) + tile * GROUPS
    scales = tl.reshape(tl.load(scale_ptr + tl.arange(0, THREADS) // SHARE), [GROUPS, SHARE])[None, :, :, None]
    words = _load_words(packed_ptr + tile * (TILE // 8 * LOW), LOW)
    codes = _codes_of(words, GROUPS, LOW)
    if BITS == 3:
        codes |= _codes_of(_load_words(packed_ptr + tiles * (TILE // 4) + tile * (TILE // 8), 1), GROUPS, 1) << 2
    if tl.min(scales) >= 0:  # noqa: SIM108
        values = _tame_values(codes, scales, ZEROS)
    else:
        values = _any_values(codes, scales, ZEROS, LARGEST)
    return values


@triton.jit(do_not_specialize=["n"])
def unpack_kernel(
    packed_ptr,
    out_ptr,
    n,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    tile = tl.program_id(0).to(tl.int64)
    tiles = tl.num_programs(0).to(tl.int64)
    cell = tl.arange(0, TILE)
    values = tile_values(packed_ptr, tile, tiles, BITS, GROUP, ZEROS, LARGEST)
    values = tl.reshape(rounded(values, out_ptr.dtype.element_ty), [TILE])
    out_ptr += tile * TILE
    left = n - tile * TILE
    if left >= TILE:
        tl.store(out_ptr + cell, values)
    else:
        tl.store(out_ptr + cell, values, mask=cell < left)
