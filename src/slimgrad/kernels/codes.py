"""Few-bit codes: which of a few intervals an element lies in. What a packed buffer holds, and both twins' checks.

With borders t, the code of x counts those that are not at or above it, so that x belongs to the first interval whose
border is not below it; a NaN belongs to the last.

NOTE [Tiles of codes]
A tile is 1024 elements as a warp of a GPU reads them: in each of 4 rounds, 32 threads read a row of 8 consecutive
elements. The codes of a row fill the nibbles of a 32-bit word, those of elements 0, 2, 4 and 6 below those of 1, 3, 5
and 7, because a GPU compares two 16-bit floats at once and counts in both halves of a register. Codes of more than 4
bits take a second nibble. A plane holds 4, 2 or 1 bits of every nibble, so that 1, 2 or all 4 rows of a thread share a
word. A tile's planes follow each other, and the last tile is filled up with zeros: b bits of n elements are
b * 128 bytes for each tile, ceil(n * b / 8) bytes and less than b * 128 more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels.geometry import TILE

PLANES: dict[int, tuple[int, ...]] = {
    1: (1,),
    2: (2,),
    3: (2, 1),
    4: (4,),
    5: (4, 1),
    6: (4, 2),
    7: (4, 2, 1),
    8: (4, 4),
}
"""Bits per code -> widths of the planes that hold them, the low bits first."""


@dataclass(frozen=True, eq=False)
class Buckets:
    """Intervals, and the value that stands for each. Compared by identity: every pack asks, and tuples take long."""

    borders: tuple[float, ...]
    values: tuple[float, ...]
    centre: float = 0.0
    absolute: bool = False
    """Whether the intervals are those of |x - centre|."""

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.borders[:-1], self.borders[1:], strict=True))
        if len(self.values) not in (1 << bits for bits in PLANES) or len(self.borders) != len(self.values) - 1:
            raise SpecError(
                "Buckets: expected 2, 4, ... or 256 values and one border fewer, "
                f"found {len(self.values)} values and {len(self.borders)} borders"
            )
        if not rising:
            raise SpecError(f"Buckets: the borders must rise, found {self.borders}")

    @property
    def bits(self) -> int:
        return len(self.values).bit_length() - 1

    @property
    def planes(self) -> tuple[int, ...]:
        return PLANES[self.bits]


@dataclass(frozen=True, eq=False)
class Pointwise:
    """A function that is computed together with the codes of its derivative."""

    f: Callable[[Tensor], Tensor]
    """In plain torch."""
    buckets: Buckets
    """The intervals of x; the values are the levels of f'."""
    fused: str = ""
    """The name of the kernel that computes f and the codes in one pass; empty if there is none."""


def tiles_of(n: int) -> int:
    return -(-n // TILE)


def code_bytes(n: int, bits: int) -> int:
    """Bytes of the whole buffer."""
    return tiles_of(n) * bits * (TILE // 8)


def check_codes(packed: Tensor, n: int, bits: int) -> None:
    expected = code_bytes(n, bits)
    if packed.dtype != torch.uint8 or packed.shape != (expected,) or not packed.is_contiguous():
        raise SpecError(
            f"unpack_codes: expected {expected} contiguous bytes (uint8) for {n} codes of {bits} bits, "
            f"found {packed.dtype}, shape {tuple(packed.shape)}"
        )


def check_floating(x: Tensor) -> None:
    if not x.is_floating_point():
        raise SpecError(f"pack_codes: expected a floating-point tensor, found {x.dtype}")
