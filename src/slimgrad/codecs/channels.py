"""Channels: keep some channels of what a product reads; the gradient of its weight is computed for those alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed, per_layout
from slimgrad.errors import SpecError
from slimgrad.kernels import Layout
from slimgrad.kernels.channels import select
from slimgrad.spec import Need

LAST = -1
SHOWN = 8
"""Indices that are printed; of more, how many there are."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Channels(Codec):
    """Channels with these indices, of dimension `dim` (the last, where that is -1 or there are not as many); the others
    become zero. The gradient of a weight is computed from what is kept itself (ops/channel_operand.py), and is zero for
    all other channels.
    """

    indices: tuple[int, ...] = ()
    dim: int = 1

    def __post_init__(self) -> None:
        found = tuple(self.indices) if isinstance(self.indices, Sequence) else (None,)
        if any(type(i) is not int or i < 0 for i in found) or len(set(found)) != len(found):
            raise SpecError(f"Channels: indices must be channel numbers from 0 on, each once; found {self.indices!r}")
        if type(self.dim) is not int or self.dim < LAST:
            raise SpecError(f"Channels: dim must be a dimension from 0 on, or -1 for the last; found {self.dim!r}")
        object.__setattr__(self, "indices", tuple(sorted(found)))
        object.__setattr__(self, "_hash", hash((self.indices, self.dim)))  # thousands of indices take 10 us each time

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined, no-any-return]

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        return demand.need is Need.OPERAND and dtype.is_floating_point

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        found = _treatment(tensor, self)
        return Packed(found.layout, demand, (found.packer.keep(tensor.detach()),), found.packer)

    def unpack(self, packed: Packed) -> Tensor:
        return packed.extra.put_back(packed.payload[0], packed.layout)  # type: ignore[no-any-return]

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        n = math.prod(shape)
        return n // self.channels(shape) * len(self.indices) * dtype.itemsize if n else 0

    def channels(self, shape: Sequence[int]) -> int:
        """How many channels such a tensor has; or an error, if that is too few."""
        count = shape[self.dimension(shape)] if shape else 1
        if math.prod(shape) and self.indices and self.indices[-1] >= count:
            raise SpecError(
                f"{self!r}: channel {self.indices[-1]} of a tensor with {count} channels, of shape {tuple(shape)}; "
                "take indices below that, or another dim"
            )
        return count

    def dimension(self, shape: Sequence[int]) -> int:
        last = max(len(shape) - 1, 0)
        return last if self.dim == LAST else min(self.dim, last)

    def __repr__(self) -> str:
        if len(self.indices) <= SHOWN:
            return super().__repr__()
        return f"Channels(<{len(self.indices)} indices>)"


class Selection(NamedTuple):
    """Channels of tensors of one layout."""

    dim: int
    places: Tensor
    """On the tensors' device, for all of them: no part of what each holds."""

    def keep(self, x: Tensor) -> Tensor:
        return select(x if x.dim() else x.view(1), self.dim, self.places)

    def put_back(self, kept: Tensor, layout: Layout) -> Tensor:
        found = layout.empty().zero_()
        (found if found.dim() else found.view(1)).index_copy_(self.dim, self.places, kept)
        return found


@per_layout
def _treatment(layout: Layout, codec: Channels) -> Selection:
    codec.channels(layout.shape)
    indices = codec.indices if math.prod(layout.shape) else ()
    return Selection(codec.dimension(layout.shape), torch.tensor(indices, dtype=torch.int64, device=layout.device))
