"""Group quantization: what a packed buffer holds, and the checks that both twins make before they read memory.

The flat tensor is cut into groups. Each group has an offset and a step, both bfloat16 (all of float32's range in 16
bits), and each element the code of the nearest multiple: x ~ offset + code * step. The offset is rounded down and the
step up, so that every element lies between two codes and is off by half a step at most.

One buffer holds it all: for each plane of code bits the codes of all groups, low bits first, then per group one 32-bit
word, offset below and step above. Three bits are a plane of two and a plane of one.

NOTE [Tiles]
Elements are taken in the order in which a warp of a GPU holds them: a tile of 1024 is read in 4 rounds, in each of
which 32 threads read 8 consecutive elements, and the 32 elements of a thread come one after another. So a group of 128
is 4 runs of 32 elements, 256 apart. A thread then finds most of a group in its own registers and writes its codes as
one piece: with groups of consecutive elements, exchanging minima and maxima took a third of the time, and packing bf16
to 4 bits reached 70 % of the copy bandwidth of an H200. The last tile is filled up.

NOTE [Wild groups]
A group with NaN, infinity or a number so large that sums of two may overflow is wild: its step carries a minus sign,
its first three codes stand for NaN, -inf and +inf, and the numbers share the codes that are left. Groups without them
never pay for it.

NOTE [Exact zeros]
With `zeros`, for what a ReLU returns, code 0 is zero, exactly and only, so that the mask of the ReLU can be read off
its quantized output. The other codes are the middles of equal parts of what lies between zero and the largest number,
so that a positive number stays positive and is off by half a step at most; the offset is half a step. In wild groups
code 1 is then NaN; -inf becomes NaN and other negative numbers the least positive one, which no ReLU returns.
Stochastic rounding is not without bias here below half a step, for zero cannot stand in.

NOTE [Random numbers without a state]
Stochastic rounding adds a fraction in [0, 1) and rounds down. The fraction is 16 bits of a hash of the seed, the
group's number, the group's own offset and step, and the element's place. No generator is advanced, nothing is kept for
it, recomputing gives the same bits; and because offset and step follow the data, the next step of a training draws
anew. One hash, with one multiplication, serves two elements: arithmetic on integers is what bounds the kernel. Draws of
one group then correlate by 0.015 at most, and the bias is 2**-17 of a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels.geometry import TILE

PLANES: dict[int, tuple[int, ...]] = {8: (8,), 4: (4,), 3: (2, 1), 2: (2,)}
"""Bits per code -> widths of the planes that hold them, the low bits first."""

GROUP_SIZES = (32, 64, 128, 256, 512, 1024)
SCALE_BYTES = 4
"""Offset and step of one group."""

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

SPECIALS = 3
"""Codes of a wild group that stand for no number."""
TAME = {torch.float32: 2.0**125, torch.bfloat16: 2.0**125, torch.float16: 2.0**15}
"""Groups with larger numbers are wild."""
WILD_PART = 2.0**-2
"""What places and values are multiplied with in wild groups while they are found: the range itself may overflow."""
LEAST_STEP = 2.0**-126
"""Smaller steps have no finite reciprocal."""
LEAST_STEP_OF_HALF = 2.0**-23
"""With `zeros` in float16, so that half a step is not zero there."""
MARGIN = 1 / 64
"""With `zeros`, how much of a part is left over above the largest number, which must not be rounded into the next."""


class Groups(NamedTuple):
    """How a tensor is quantized."""

    bits: int
    group: int
    zeros: bool = False
    """Whether code 0 is exact zero."""
    stochastic: bool = False
    seed: int = 0

    @property
    def first(self) -> int:
        """The code of a group's smallest number."""
        return int(self.zeros)

    def last(self, *, wild: bool) -> int:
        """The number of a group's largest number, counted from its smallest as 0."""
        return (1 << self.bits) - 1 - (SPECIALS if wild else self.first)

    def factor(self, *, wild: bool) -> float:
        """Half a group's range times this is its step. Where one number stands for all, half a step is the range."""
        last = self.last(wild=wild)
        if self.zeros:
            return 2.0 / (last + 1 - MARGIN)
        return 2.0 / last if last else 4.0

    def least_step(self, dtype: torch.dtype) -> float:
        return LEAST_STEP_OF_HALF if self.zeros and dtype == torch.float16 else LEAST_STEP

    def count(self, n: int) -> int:
        """Groups in the tiles of n elements."""
        return -(-n // TILE) * (TILE // self.group)

    def plane_bytes(self, width: int) -> int:
        """Bytes of one group in a plane."""
        return self.group * width // 8

    def scales_at(self, n: int) -> int:
        """Where the offsets and steps begin: after the codes, which fill whole tiles."""
        return self.count(n) * self.plane_bytes(self.bits)

    def nbytes(self, n: int) -> int:
        """Bytes of the whole buffer."""
        return self.scales_at(n) + self.count(n) * SCALE_BYTES


def check_groups(how: Groups, dtype: torch.dtype) -> None:
    if how.bits not in PLANES or how.group not in GROUP_SIZES or dtype not in DTYPES:
        raise SpecError(
            f"group quantization: expected bits from {sorted(PLANES)}, a group from {GROUP_SIZES}, and float32, "
            f"bfloat16 or float16; found bits={how.bits}, group={how.group} and {dtype}"
        )


def check_packed(packed: Tensor, n: int, nbytes: int) -> None:
    if packed.dtype != torch.uint8 or packed.numel() != nbytes or packed.dim() != 1:
        raise SpecError(
            f"unpack_groups: expected {nbytes} bytes (uint8) for {n} elements, "
            f"found {packed.dtype}, shape {tuple(packed.shape)}"
        )
