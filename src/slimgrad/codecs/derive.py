"""Derive: keep nothing, and make it again in backward by running what made it once more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed
from slimgrad.codecs.keep import Keep
from slimgrad.codecs.selection import check_flag
from slimgrad.kernels import Layout
from slimgrad.spec import Need

KEEP = Keep()

SERVED = (Need.DERIVATIVE, Need.OPERAND, Need.VALUES)
"""What asks for less than the tensor has cheaper ways; what must not change is not touched."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Derive(Codec):
    """What a norm, an activation, a dropout, an elementwise product or a sum made, from what that op's own node keeps
    anyway; with `products`, also what a linear layer or a convolution made, which multiplies once more. Exact if the
    sources are.

    By itself, outside a gate, it knows no producer and keeps a copy.
    """

    products: bool = False

    lossy: ClassVar[bool] = False
    holds_values: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_flag("Derive", "products", self.products)

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        derivation = demand.derivation
        if demand.need not in SERVED or derivation is None or not dtype.is_floating_point:
            return False
        return bool(derivation.open_ways(products=self.products))

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        if demand.derivation is None:
            return KEEP.pack(tensor, demand)
        layout = Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return Packed(layout, demand, (), demand.derivation.handle(tensor))

    def unpack(self, packed: Packed) -> Tensor:
        if packed.demand.derivation is None:
            return KEEP.unpack(packed)
        return packed.demand.derivation.again(packed)

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        return 0 if demand.derivation is not None else KEEP.promised(shape, dtype, demand)
