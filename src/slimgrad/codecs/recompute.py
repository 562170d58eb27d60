"""Recompute: a module keeps its inputs alone and runs once more in backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed
from slimgrad.codecs.keep import Keep

KEEP = Keep()


@dataclass(frozen=True, kw_only=True, repr=False)
class Recompute(Codec):
    """For whole modules, by path or class: what they save is not kept, and `torch.utils.checkpoint` runs them again.

    Their inputs are kept, or packed by whatever other rule fits them. By itself it keeps a copy.
    """

    lossy: ClassVar[bool] = False

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        return False

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        return KEEP.pack(tensor, demand)

    def unpack(self, packed: Packed) -> Tensor:
        return KEEP.unpack(packed)

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        return KEEP.promised(shape, dtype, demand)
