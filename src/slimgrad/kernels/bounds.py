"""Values within a bound, in as few bits as each chunk of them needs: the format that both twins share.

Elements are taken in the order in which they lie in memory, in chunks of CHUNK and tiles of LANES chunks. Each
becomes a sign and a whole number, |x| = number * step to within the bound. A chunk tells its symbols one behind the
other: of a number other than zero, v = 2 * (number - 1) + sign, or number - 1 if the chunk has no negative one; and
that in Rice's code: v >> k zeros, a one, then the lower k bits of v. With a k that fits the chunk's mean, that is
within a twentieth of the entropy of normal or exponential values. If the chunk has zeros, these are told by a one
alone, and every other symbol by one zero more. No symbol is longer than MOST_BITS.

- A chunk of zeros takes no room.
- A chunk is raw, the elements themselves, where one of them is not finite, where the bound is too small for them or a
  step may lead beyond the largest number there is, or where no less would be kept.
- With PREDICT, a chunk tells the difference of each number (with its sign) to the one before instead, if that
  promises to take less (AUTO) or in any case (LORENZO): smooth maps gain, white noise loses.

What is kept is four tensors:

- `words`, int32: the chunks, each from a whole word on, bits from the lowest on; how many are used is known to the
  device alone.
- `heads`, int16: one for each chunk, see NOTE [Heads].
- `places`, int32: where each tile begins in `words`; then how many words are used. Chunks of a tile lie one behind
  the other. Tiles lie in the order in which they came, which is not always the same on a GPU; what they say is.
- `bound`, float32: the bound.

NOTE [Heads]
k in bits 0 to 3; whether the chunk has negative symbols (4), zeros (5), and is predicted (6); in elements of 16 bits,
by how many 16ths of the bound the step is smaller (7 to 9); then the number of words, all ones for a raw chunk.

NOTE [A bound that holds]
Numbers are rounded in float32, at most six times, by 2^-24 each of at most LIMIT steps: 2^-8.4 of the bound. What is
unpacked is rounded to the dtype, in bfloat16 by up to 2^-9 of its size, more than a small bound leaves room for. So
the step is not twice the bound but less: by 2^-7 of it for the former, and by as many 16ths of the bound as cover
what rounding may do at the chunk's largest magnitude for the latter (the first 16th of a 16th is covered by what is
left of 2^-7). A chunk that would need more than MOST_LEVEL of them is raw.

NOTE [Zeros]
Zero has the number 0 and stays zero. Other values may come to have it too, unless ZEROS says that nothing else may:
then a ReLU's mask can be read from what is unpacked. Numbers then stand for the intervals between the multiples of a
step and not for the ones around them.

NOTE [Errors that do not know each other]
Neighbours in a smooth map are rounded alike: their errors add up in a gradient instead of cancelling, to 1.2 to 5.0
times what independent ones would (convolutions on photographs, bounds of 0.02 and 0.2). With DITHER the intervals of
each element are shifted by a part of a step of its own, which is known again when it is unpacked: errors are then
even, and any two of them independent, whatever the data. A chunk's shifts follow from a hash of where it is, an odd
number, by one multiplication after the other, modulo 2^23; any two of a chunk lie on a lattice whose shortest vector
is 572 at least (the best multiplier of 12000; 2200 were ideal). Zeros have a number of their own as with ZEROS.
Values smaller than a step may change their sign; with ZEROS they come as near to zero as LEAST_MIDDLE instead, which
shifts the mean of those in the first step by a 48th of one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

CHUNK, LANES = 128, 32
TILE = CHUNK * LANES
WORD_BITS = 32
MOST_BITS = 16
"""Of a symbol, so that two fit into a word."""
MOST_K = 13
LIMIT = 4000.0
"""Steps, from which on values are kept as they are: differences of 2 * LIMIT still fit into MOST_BITS."""
MEAN_OFFSET = 0.4
"""k is the exponent of a chunk's mean and so much: within 1 % of the best k for normal and exponential values."""

PLAIN_SPARE, AHEAD_SPARE = 2.0, 5.0
"""Steps that a number, and a difference of two, may have more than the values have."""

LEAST_MIDDLE = 2.0**-6
"""Of a step: nearer to zero nothing comes that must not be zero."""

SIGNED, HAS_ZEROS, PREDICTED = 1 << 4, 1 << 5, 1 << 6
LEVEL_SHIFT = 7
MOST_LEVEL = 7
STEP_OF_BOUND = 2 - 2.0**-6
STEP_OF_LEVEL = 2.0**-3
COVERED_LEVELS = 1 - 2.0**-4

STATE_MASK, ONE_BITS = 2**23 - 1, 0x3F800000
MULTIPLIER = 5806365

PREDICTIONS = NONE, LORENZO, AUTO = "none", "lorenzo", "auto"
MANTISSA = {torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
"""Bits of it that are told."""
LEAST_BOUND = {torch.float32: 2.0**-100, torch.float16: 2.0**-17, torch.bfloat16: 2.0**-100}
"""With smaller ones, steps are lost among subnormal numbers: all chunks are raw."""
LEAST_SLACK = {torch.float32: 0.0, torch.float16: 2.0**-25, torch.bfloat16: 0.0}
"""What rounding does to subnormal numbers."""
MOST_ELEMENTS = 2**30
"""More may have places that 32 bits do not tell."""


class Coding(NamedTuple):
    """How values become numbers."""

    predict: str = NONE
    zeros: bool = False
    """Whether nothing but zero may become zero."""
    dither: bool = False
    """Whether each element is rounded in a way of its own."""

    @property
    def between(self) -> bool:
        """Whether numbers stand for intervals between multiples of a step."""
        return self.zeros or self.dither

    @property
    def tries(self) -> tuple[bool, bool]:
        """Whether numbers are tried as they are, and as differences."""
        return self.predict != LORENZO, self.predict != NONE


class Extent(NamedTuple):
    """How many there are of each, for so many elements."""

    elements: int
    itemsize: int

    @property
    def chunks(self) -> int:
        return math.ceil(self.elements / CHUNK)

    @property
    def tiles(self) -> int:
        return math.ceil(self.elements / TILE)

    @property
    def places(self) -> int:
        return self.tiles + 1

    @property
    def raw_words(self) -> int:
        """Of a chunk that is kept as it is."""
        return CHUNK * self.itemsize * 8 // WORD_BITS

    @property
    def length_shift(self) -> int:
        """Of the number of words, in a head."""
        return LEVEL_SHIFT + (3 if self.itemsize == 2 else 0)

    @property
    def raw_length(self) -> int:
        """What stands there for a raw chunk."""
        return (1 << 16 - self.length_shift) - 1

    @property
    def most_words(self) -> int:
        """If all chunks are raw."""
        return self.chunks * self.raw_words

    def nbytes(self, words: int) -> int:
        return 4 * words + 2 * self.chunks + 4 * self.places + 4
