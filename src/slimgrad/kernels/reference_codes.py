"""Few-bit codes in plain torch: what the Triton twin must equal bit for bit. See codes.py for the format."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from slimgrad.kernels.codes import Buckets, Pointwise, check_codes, check_floating, code_bytes, tiles_of
from slimgrad.kernels.geometry import ROUNDS, THREADS, TILE, check_dense
from slimgrad.kernels.reference import chunks

NIBBLE = 4

FEW = 15
"""Borders that are compared one by one: on a CPU it takes a quarter of the time that searching among 7 does."""


def pack_codes(x: Tensor, buckets: Buckets) -> Tensor:
    """The codes of a dense tensor, in the order of its memory."""
    check_floating(x)
    check_dense("pack_codes", x)
    n = x.numel()
    x = x.detach().as_strided((n,), (1,))
    out = torch.empty(code_bytes(n, buckets.bits), dtype=torch.uint8, device=x.device)
    tiles = out.view(torch.int32).view(tiles_of(n), buckets.bits, THREADS)
    precision = torch.promote_types(x.dtype, torch.float32)
    borders = torch.tensor(buckets.borders, dtype=precision, device=x.device)
    for first, last in chunks(n):
        at, missing = x[first:last].to(precision), (first - last) % TILE
        at = F.pad(at, (0, missing)) if missing else at
        at = (at - buckets.centre).abs_() if buckets.absolute else at
        _weave(_codes(at, borders), buckets, tiles[first // TILE : tiles_of(last)])
    return out


def _codes(at: Tensor, borders: Tensor) -> Tensor:
    """How many borders are not at or above each element, as uint8."""
    if len(borders) > FEW:
        return torch.bucketize(at, borders, out_int32=True).to(torch.uint8)
    codes = torch.full(at.shape, len(borders), dtype=torch.uint8, device=at.device)
    for border in borders:
        codes -= (at <= border).view(torch.uint8)
    return codes


def unpack_codes(
    packed: Tensor, shape: Sequence[int], stride: Sequence[int], buckets: Buckets, dtype: torch.dtype
) -> Tensor:
    """The value of each code, as a tensor of that dense layout."""
    n = math.prod(shape)
    check_codes(packed, n, buckets.bits)
    out = torch.empty(n, dtype=dtype, device=packed.device)
    tiles = packed.view(torch.int32).view(tiles_of(n), buckets.bits, THREADS)
    values = torch.tensor(buckets.values, dtype=torch.float64, device=packed.device).to(dtype)
    for first, last in chunks(n):
        codes = _unwoven(tiles[first // TILE : tiles_of(last)], buckets)
        out[first:last] = values.index_select(0, codes[: last - first].int())
    return out.as_strided(shape, stride)


def pointwise_forward(x: Tensor, unit: Pointwise, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """f(x), and the codes of a dense x. With `out=x` in the place of x."""
    codes = pack_codes(x, unit.buckets)
    y = unit.f(x.detach())
    return (y if out is None else out.copy_(y)), codes


def pointwise_backward(codes: Tensor, dy: Tensor, unit: Pointwise) -> Tensor:
    """level * dY, for a dY that lies in memory as x did."""
    levels = unpack_codes(codes, dy.shape, dy.stride(), unit.buckets, torch.promote_types(dy.dtype, torch.float32))
    return levels.mul_(dy).to(dy.dtype)


# --- tiles: see NOTE [Tiles of codes] in codes.py ---------------------------------------------------------------------
#
# Eight codes at a time, as the bytes of a 64-bit word: on a CPU this takes a fifth of the time of arithmetic on bytes.

FOURTHS = 0x000F000F000F000F
"""The low nibbles of every second byte of a word."""


def _nibbles(words: Tensor) -> Tensor:
    """Rows of eight codes below 16, each in its byte -> the same in nibbles, elements 0, 2, 4, 6 below 1, 3, 5, 7."""
    even, odd = words & FOURTHS, words >> 8 & FOURTHS
    low, high = (half | half >> 12 | half >> 24 | half >> 36 for half in (even, odd))
    return low & 0xFFFF | (high & 0xFFFF) << 16


def _in_bytes(rows: Tensor) -> Tensor:
    """The inverse."""
    low, high = rows & 0xFFFF, rows >> 16 & 0xFFFF
    even, odd = ((half | half << 12 | half << 24 | half << 36) & FOURTHS for half in (low, high))
    return even | odd << 8


def _planes(buckets: Buckets) -> Iterator[tuple[int, int, int]]:
    """Of each plane: the bits below it, its width, and the mask of as many bits in every nibble."""
    below = 0
    for width in buckets.planes:
        yield below, width, 0x11111111 * ((1 << width) - 1)
        below += width


def _weave(codes: Tensor, buckets: Buckets, tiles: Tensor) -> None:
    """Write whole tiles of codes into [tiles, bits, threads] words: 4 / width rows share one."""
    words = codes.view(torch.int64).view(-1, ROUNDS, THREADS)
    rows = [_nibbles(words), _nibbles(words >> 4)] if buckets.bits > NIBBLE else [_nibbles(words)]
    for below, width, mask in _planes(buckets):
        part = rows[below // NIBBLE] >> below % NIBBLE & mask
        share = ROUNDS // width
        word = part[:, ::share]
        for turn in range(1, share):
            word = word | part[:, turn::share] << turn * width
        tiles[:, below : below + width] = word


def _unwoven(tiles: Tensor, buckets: Buckets) -> Tensor:
    """The inverse: one code after another."""
    words = tiles.to(torch.int64)
    rows = [words.new_zeros(len(tiles), ROUNDS, THREADS) for _ in range(1 + (buckets.bits > NIBBLE))]
    for below, width, mask in _planes(buckets):
        plane, share = words[:, below : below + width], ROUNDS // width
        for turn in range(share):
            rows[below // NIBBLE][:, turn::share] |= (plane >> turn * width & mask) << below % NIBBLE
    codes = _in_bytes(rows[0])
    for high in rows[1:]:
        codes |= _in_bytes(high) << NIBBLE
    return codes.flatten().view(torch.uint8)
