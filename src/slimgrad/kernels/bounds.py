"""Values within a bound, in as few bits as each block of them needs: the format that both twins share.

Elements are taken in the order in which they lie in memory, in tiles of TILE and blocks of BLOCK. Each becomes an
integer, x = code * step to within the bound; a block then tells all its codes in one width:

- plain: every code. A block of zeros has the width 0, and takes no room.
- masked: a bit for each element that says whether its code is not zero, then those codes alone. Half of what a ReLU
  leaves are zeros, and they cost a bit each.
- raw: the elements themselves, where they are not finite, where the bound is too small for them, or where no less would
  be kept.

A block is told in the fewest bits of the three. Codes without a sign are told without one.

With PREDICT, a tile tells the difference of each code to the one before instead, if that takes less (AUTO) or in any
case (LORENZO): smooth maps gain, white noise loses. A tile with a raw block is never predicted.

What is kept is four tensors:

- `units`, int16: the blocks, one behind the other, each from a whole unit on; how many are used is known to the device
  alone. A block's place in it follows from its tile's place and the sizes of the blocks before.
- `heads`, int16: for each tile BLOCKS heads of blocks, then its own; see NOTE [Heads].
- `places`, int32: where each tile begins in `units`; then how many units are used. Tiles lie there in the order in
  which they came, which is not always the same on a GPU; what they say is.
- `bound`, float32: the bound.

NOTE [Heads]
Of a block: its width in bits 0 to 3, whether it is masked (4), signed (5), raw (6), and its units in bits 7 to 15. Of a
tile: in bits 0 to 7 the exponent of its largest finite magnitude, as float32 has it; in bit 8 whether it is predicted.

NOTE [A bound that holds]
What is unpacked is rounded to the dtype. In bfloat16 that may move it by 2^-9 of its size, more than a small bound
leaves room for. So the step is not twice the bound but less, by what rounding may add at the tile's largest magnitude
(hence its exponent in the head); and every element is unpacked once while it is packed, and compared: a block of which
one is off by more than the bound is kept raw. That no rounding is forgotten is not a matter of proof.

NOTE [Zeros]
Zero has the code 0 and stays zero. Other values may come to have it too, unless ZEROS says that nothing else may: then
a ReLU's mask can be read from what is unpacked. Codes then stand for the intervals between the multiples of a step and
not for the ones around them.

NOTE [Errors that do not know each other]
Neighbours in a smooth map are rounded alike: their errors add up in a gradient instead of cancelling, to 1.2 to 5.4
times what independent ones would (convolutions on photographs, bounds of 0.02 and 0.2). With DITHER the intervals of
each element are shifted by a part of a step of its own, a hash of where it is, which is known again when it is
unpacked: errors are then even and independent, whatever the data. Zeros have a code of their own as with ZEROS. Values
smaller than a step may change their sign; with ZEROS they come as near to zero as LEAST_MIDDLE instead, which shifts
the mean of those in the first step by a 48th of one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

BLOCK, BLOCKS = 128, 16
TILE = BLOCK * BLOCKS
UNIT_BITS, UNIT_SHIFT = 16, 4
MASK_UNITS = BLOCK // UNIT_BITS
MOST_WIDTH = 15
LIMIT = 2**14 - 1
"""The largest code: with a sign it fills MOST_WIDTH bits."""

LEAST_MIDDLE = 2.0**-6
"""Of a step: nearer to zero nothing comes that must not be zero."""

MASKED, SIGNED, RAW = 1 << 4, 1 << 5, 1 << 6
SIZE_SHIFT = 7
PREDICTED = 1 << 8

PREDICTIONS = NONE, LORENZO, AUTO = "none", "lorenzo", "auto"
MANTISSA = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Bits of it that are told."""
NOISE_BITS = 22
"""Of the largest magnitude, what arithmetic in float32 may add."""
MOST_ELEMENTS = 2**30
"""More may have places that 32 bits do not tell."""


class Coding(NamedTuple):
    """How values become codes."""

    predict: str = NONE
    zeros: bool = False
    """Whether nothing but zero may become zero."""
    dither: bool = False
    """Whether each element is rounded in a way of its own."""

    @property
    def between(self) -> bool:
        """Whether codes stand for intervals between multiples of a step."""
        return self.zeros or self.dither

    @property
    def tries(self) -> tuple[bool, bool]:
        """Whether codes are tried as they are, and as differences."""
        return self.predict != LORENZO, self.predict != NONE


class Extent(NamedTuple):
    """How many there are of each, for so many elements."""

    elements: int
    itemsize: int

    @property
    def tiles(self) -> int:
        return math.ceil(self.elements / TILE)

    @property
    def heads(self) -> int:
        return self.tiles * (BLOCKS + 1)

    @property
    def places(self) -> int:
        return self.tiles + 1

    @property
    def raw_units(self) -> int:
        """Of a block that is kept as it is."""
        return BLOCK * self.itemsize * 8 // UNIT_BITS

    @property
    def most_units(self) -> int:
        """If all blocks are."""
        return self.tiles * BLOCKS * self.raw_units

    def nbytes(self, units: int) -> int:
        return 2 * units + 2 * self.heads + 4 * self.places + 4
