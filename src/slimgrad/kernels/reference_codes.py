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

FEW = 15
"""Borders that are compared one by one: on a CPU it takes a quarter of the time that searching among 7 does."""


def pack_codes(x: Tensor, buckets: Buckets) -> Tensor:
    """The codes of a dense tensor, in the order of its memory."""
    check_floating(x)
    check_dense("pack_codes", x)
    n = x.numel()
    x = x.detach().as_strided((n,), (1,))
    out = torch.empty(code_bytes(n, buckets.bits), dtype=torch.uint8, device=x.device)
    tiles = out.view(tiles_of(n), buckets.bits * (TILE // 8))
    precision = torch.promote_types(x.dtype, torch.float32)
    borders = torch.tensor(buckets.borders, dtype=precision, device=x.device)
    for first, last in chunks(n):
        at = F.pad(x[first:last].to(precision), (0, (first - last) % TILE))
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
    tiles = packed.view(tiles_of(n), buckets.bits * (TILE // 8))
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


def _bytes_of_rows(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Views of whole tiles of codes, [tiles, rounds, threads, 2, 2]: what each byte's low and high nibble hold.

    The bytes of a row hold the codes of elements 0 and 2, 4 and 6, 1 and 3, 5 and 7.
    """
    rows = codes.view(-1, ROUNDS, THREADS, 2, 2, 2)
    low, high = (rows[..., place, :].transpose(-1, -2) for place in range(2))
    return low, high


def _planes(tiles: Tensor, buckets: Buckets) -> Iterator[tuple[int, int, Tensor]]:
    """Of each plane: the bits below it, its width, and a view of its bytes, [tiles, words, threads, 2, 2]."""
    below = 0
    for width in buckets.planes:
        part = tiles[:, below * TILE // 8 : (below + width) * TILE // 8]
        yield below, width, part.unflatten(1, (width, THREADS, 2, 2))
        below += width


def _weave(codes: Tensor, buckets: Buckets, tiles: Tensor) -> None:
    """Write whole tiles of codes: 4 / width rows share a word."""
    low, high = _bytes_of_rows(codes)
    for below, width, plane in _planes(tiles, buckets):
        plane.zero_()
        for turn in range(ROUNDS // width):
            rows = slice(turn, None, ROUNDS // width)
            plane |= _cut(low[:, rows], below, width) << turn * width
            plane |= _cut(high[:, rows], below, width) << 4 + turn * width


def _unwoven(tiles: Tensor, buckets: Buckets) -> Tensor:
    """The inverse: one code after another."""
    codes = tiles.new_zeros(len(tiles) * TILE)
    low, high = _bytes_of_rows(codes)
    for below, width, plane in _planes(tiles, buckets):
        for turn in range(ROUNDS // width):
            rows = slice(turn, None, ROUNDS // width)
            low[:, rows] |= _cut(plane, turn * width, width) << below
            high[:, rows] |= _cut(plane, 4 + turn * width, width) << below
    return codes


def _cut(bits: Tensor, shift: int, width: int) -> Tensor:
    return bits >> shift & (1 << width) - 1
