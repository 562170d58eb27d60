"""Offload: keep it in the host's memory, and copy it there and back while the device computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.compiler import is_compiling

from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed, values_and_masks
from slimgrad.codecs.keep import Keep
from slimgrad.errors import SpecError
from slimgrad.kernels import Layout, Parcel, lane_of
from slimgrad.spec import Need

KEEP = Keep()

SERVED = (Need.DERIVATIVE, Need.OPERAND, Need.VALUES, Need.EXACT)
"""What asks for less than the tensor has cheaper ways."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Offload(Codec):
    """Values in pinned memory of the host, bit for bit. The device holds none of them but the last few, which backward
    reads at once.

    It is fast as long as the link carries everything while the device computes. On a CPU there is nowhere else to go:
    by itself it keeps a copy there, and the gate leaves the tensor alone.
    """

    lossy: ClassVar[bool] = False
    holds_values: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    sized: ClassVar[bool] = False
    device_wanted: ClassVar[str | None] = "cuda"

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        return demand.need in SERVED and dtype.is_floating_point

    def joint(self, demands: Sequence[Demand]) -> Demand | None:
        """All values by one copy; the mask of the ReLU that made them is read off it too."""
        return values_and_masks(demands, SERVED)

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        packed = self.start(tensor, demand)
        packed.settle()
        return packed

    def start(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        if not self.works_on(tensor.device):
            return KEEP.pack(tensor, demand)
        if is_compiling():
            raise SpecError(f"{self!r}: copies beside what the device computes cannot be compiled; pack outside")
        layout = Layout.of(tensor)
        parcel = lane_of(tensor.device).send(layout.flat(tensor.detach()))
        return Packed(layout, demand, (), parcel, parcel)

    def unpack(self, packed: Packed) -> Tensor:
        if not isinstance(packed.extra, Parcel):
            return KEEP.unpack(packed)
        return packed.layout.restore(packed.extra.open())

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        """On the device; on a CPU it is a copy."""
        return 0
