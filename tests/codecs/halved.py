"""A lossy codec for tests of the gate: keeps every value in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimgrad.codecs import ITSELF, Codec, Demand, Layout, Packed
from slimgrad.spec import Need


@dataclass(frozen=True, kw_only=True, repr=False)
class Halved(Codec):
    """float32 values rounded to bfloat16."""

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        return demand.need in (Need.OPERAND, Need.VALUES) and dtype == torch.float32

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        layout = Layout.of(tensor)
        return Packed(layout, demand, (layout.flat(tensor).to(torch.bfloat16),))

    def unpack(self, packed: Packed) -> Tensor:
        return packed.layout.restore(packed.payload[0].to(packed.layout.dtype))

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        return torch.Size(shape).numel() * 2
