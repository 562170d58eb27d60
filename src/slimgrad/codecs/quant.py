"""Quant: keep every value in a few bits, with an offset and a step per group of values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed, Treatment, per_layout, values_and_masks
from slimgrad.codecs.selection import check_flag
from slimgrad.errors import SpecError
from slimgrad.kernels.groups import DTYPES, GROUP_SIZES, PLANES, Groups
from slimgrad.spec import Need

SERVED = (Need.DERIVATIVE, Need.OPERAND, Need.VALUES)
"""What values that are nearly right can serve; f'(x) of a pointwise f is one of them."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Quant(Codec):
    """Values in 8, 4, 3 or 2 bits, each off by half a step of its group at most; by a step if rounding is stochastic.

    Stochastic rounding has no bias; it depends on `seed` and the data alone and takes nothing from torch's generators.
    With `fused`, modules that are a GELU or SiLU are computed by an op that packs what it is given while it reads it,
    goes back by those bits, and can tell from them what it made: `"derive(); quant(fused=True)"` keeps nothing else.
    """

    holds_values: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    bits: int = 4
    group: int = 128
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    fused: bool = False

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in PLANES:
            raise SpecError(f"Quant: bits must be one of {sorted(PLANES)}, found {self.bits!r}")
        if type(self.group) is not int or self.group not in GROUP_SIZES:
            raise SpecError(f"Quant: group must be one of {', '.join(map(str, GROUP_SIZES))}, found {self.group!r}")
        if self.rounding not in ("nearest", "stochastic"):
            raise SpecError(f"Quant: rounding must be 'nearest' or 'stochastic', found {self.rounding!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**31:
            raise SpecError(f"Quant: seed must be an integer from 0 to 2**31 - 1, found {self.seed!r}")
        check_flag("Quant", "fused", self.fused)
        for name, zeros in (("_plain", False), ("_zeros", True)):  # made once, because every pack asks
            how = Groups(self.bits, self.group, zeros, self.rounding == "stochastic", self.seed)
            object.__setattr__(self, name, how)

    def groups(self, demand: Demand) -> Groups:
        """The format in which a tensor is kept for this demand."""
        return self._zeros if demand.zeros else self._plain  # type: ignore[attr-defined, no-any-return]

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        return demand.need in SERVED and dtype in DTYPES

    def joint(self, demands: Sequence[Demand]) -> Demand | None:
        """All values by one Packed; with code 0 for exact zeros, the mask of the ReLU that made them too."""
        return values_and_masks(demands, SERVED)

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        return _treatment(tensor, self.groups(demand)).pack(tensor, demand)

    def unpack(self, packed: Packed) -> Tensor:
        return Treatment.unpack(packed)

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        return self.groups(demand).nbytes(math.prod(shape))


_treatment = per_layout(kernels.group_packer)
