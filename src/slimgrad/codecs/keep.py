"""Keep: leave it as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed
from slimgrad.kernels import Layout


@dataclass(frozen=True, kw_only=True, repr=False)
class Keep(Codec):
    """The tensor itself. As a rule's codec it exempts sites: the gate leaves them to autograd."""

    lossy: ClassVar[bool] = False

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        return True

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        layout = Layout.of(tensor)
        return Packed(layout, demand, (layout.flat(tensor).clone(),))

    def unpack(self, packed: Packed) -> Tensor:
        return packed.layout.restore(packed.payload[0])

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        return math.prod(shape) * dtype.itemsize
