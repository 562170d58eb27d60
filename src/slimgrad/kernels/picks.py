"""A few elements of a tensor, where they lie, and perhaps the signs of the others: what is kept, and the checks that
both twins make.

Of a dense tensor, in the order of its memory, `values` holds the k picked elements and `places` says where they were.
Three ways to write that are known, and the one that takes the fewest bytes is taken:

- BITS: one bit per element.
- BYTES: one byte per picked element, its place in a block of 256.
- WORDS: two bytes per picked element, its place in a block of 4096.

Before these stands for each block (4096 elements for BITS) how many are picked before it, in 4 bytes, so that blocks
are read in parallel. At 10 % BYTES take 0.116 bytes per element and BITS 0.126; above 11 % BITS are fewer, below 1.5 %
WORDS are. Absolute places of 4 bytes would win nowhere: WORDS need 2 and a thousandth.

If it is `signed`, a third tensor holds one bit per element, whether it is negative; and for each span of 1024, in the
tensor's own dtype, the mean magnitude of those that are smaller than all that are picked. The others are put back as
that mean with their signs, instead of zeros. Where a span has no negative element, as behind a ReLU, the bit says
instead whether an element is not zero, the mean is that of such elements, and its sign bit is set to tell; zeros stay
zeros there. Bits and means fill whole tiles.

NOTE [The largest elements]
They are those with the largest magnitudes, by the bits without the sign: so a NaN is larger than all. Of equal ones
the first are picked. Exactly k are, always.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.errors import SpecError

TILE = 4096
"""Elements that a program treats at once."""
START_BYTES = 4
SPAN = 1024
"""Elements with a mean magnitude of their own."""


class Kind(enum.Enum):
    """How places are written."""

    BITS = "one bit per element"
    BYTES = "one byte per picked element"
    WORDS = "two bytes per picked element"

    @property
    def block(self) -> int:
        """Elements with a start of their own."""
        return 256 if self is Kind.BYTES else TILE


class Picks(NamedTuple):
    """k of n elements, how their places are written, and whether the signs of the others are held."""

    n: int
    k: int
    kind: Kind
    signed: bool = False

    @classmethod
    def of(cls, n: int, k: int, signed: bool = False) -> Picks:
        """In the way that takes the fewest bytes."""
        if not 0 <= k <= n:
            raise SpecError(f"expected to pick between none and all of {n} elements, found {k}")
        best = cls(n, k, Kind.BITS, signed)
        for kind in (Kind.BYTES, Kind.WORDS):  # a loop that a compiler can follow
            other = cls(n, k, kind, signed)
            best = other if other.nbytes < best.nbytes else best
        return best

    @property
    def blocks(self) -> int:
        return math.ceil(self.n / self.kind.block)

    @property
    def places_at(self) -> int:
        """The byte at which the starts end; one more than there are blocks, so that the last has an end too."""
        return (self.blocks + 1) * START_BYTES

    @property
    def nbytes(self) -> int:
        """Of `places`."""
        sizes = {Kind.BITS: self.bit_bytes, Kind.BYTES: self.k, Kind.WORDS: 2 * self.k}
        return self.places_at + sizes[self.kind]

    @property
    def tiles(self) -> int:
        return math.ceil(self.n / TILE)

    @property
    def bit_bytes(self) -> int:
        """Of one bit per element; in signs, also where the means begin."""
        return self.tiles * TILE // 8

    def sign_bytes(self, itemsize: int) -> int:
        """Of the signs and means of elements of so many bytes."""
        return self.bit_bytes + self.tiles * (TILE // SPAN) * itemsize if self.signed else 0


def check_picks(values: Tensor, places: Tensor, picks: Picks, signs: Tensor | None = None) -> None:
    """Before memory is read by places that somebody hands in."""
    held, expected = 0 if signs is None else signs.numel(), picks.sign_bytes(values.itemsize)
    if held != expected or (signs is not None and not (signs.dtype == torch.uint8 and signs.is_contiguous())):
        raise SpecError(f"expected {expected} bytes of signs for {picks}, contiguous; found {held}")
    found = (values.numel(), places.dtype, places.numel())
    if found != (picks.k, torch.uint8, picks.nbytes) or not (values.is_contiguous() and places.is_contiguous()):
        raise SpecError(
            f"expected {picks.k} values and {picks.nbytes} bytes of places, both contiguous, for {picks}; "
            f"found {values.numel()} values and {places.numel()} of {places.dtype}"
        )
