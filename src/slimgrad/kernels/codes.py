"""Few-bit codes: which of a few intervals an element lies in. What a packed buffer holds, and both twins' checks.

With borders t, the code of x counts those that are not at or above it, so that x belongs to the first interval whose
border is not below it; a NaN belongs to the last. Eight elements are a row: each plane of code bits holds the codes of
a row side by side, the first in the low bits, and has whole rows. So b bits of n elements are b * ceil(n / 8) bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimgrad.errors import SpecError

PLANES: dict[int, tuple[int, ...]] = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
"""Bits per code -> widths of the planes that hold them, the low bits first; wide planes first, so that words align."""

ROW = 8


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


def rows_of(n: int) -> int:
    return -(-n // ROW)


def code_bytes(n: int, bits: int) -> int:
    """Bytes of the whole buffer."""
    return bits * rows_of(n)


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
