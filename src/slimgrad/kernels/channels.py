"""Input channels of a weight, in plain torch: the part of it that reads some channels, taken out and put back.

NOTE [The part of a weight that reads a channel]
Input channel c of a convolution in g groups belongs to group c // (C_in / g), and is read by the C_out / g filters of
that group, by one kernel in each. So the part that belongs to one channel always has C_out / g kernels: all filters
where g is 1, the channel's own where the convolution is depthwise. Parts are told as [channels, C_out / g, *kernel].
Linear layers are convolutions with a kernel of no dimensions. Weights that count inputs first (transposed convolutions,
Conv1D of transformers) have a channel's part in one piece.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Kernels(NamedTuple):
    """How a weight counts its input channels."""

    channels: int
    groups: int = 1
    inputs_first: bool = False

    @property
    def per_group(self) -> int:
        return self.channels // self.groups

    def part(self, weight: Tensor, index: Tensor) -> Tensor:
        """What belongs to these channels, copied."""
        if self.inputs_first:
            return weight.index_select(0, index)
        return self._grouped(weight)[index // self.per_group, :, index % self.per_group]

    def put(self, weight: Tensor, index: Tensor, part: Tensor) -> None:
        """Write what belongs to these channels."""
        if self.inputs_first:
            weight.index_copy_(0, index, part)
        else:
            self._grouped(weight)[index // self.per_group, :, index % self.per_group] = part

    def spread(self, weight: Tensor, index: Tensor, part: Tensor) -> Tensor:
        """A tensor like the weight, zero but for these channels."""
        found = torch.zeros_like(weight)
        self.put(found, index, part.to(weight.dtype))
        return found

    def _grouped(self, weight: Tensor) -> Tensor:
        """[groups, C_out / groups, C_in / groups, *kernel], a view."""
        return weight.view(self.groups, -1, *weight.shape[1:])


def norms(part: Tensor) -> Tensor:
    """Of what belongs to each channel."""
    dtype = torch.promote_types(part.dtype, torch.float32)
    found: Tensor = torch.linalg.vector_norm(part.detach().flatten(1), dim=1, dtype=dtype)
    return found


def select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """These channels of x, in its order of dimensions, so that channels_last stays channels_last."""
    found = torch.empty_like(x.narrow(dim, 0, len(index)))
    return torch.index_select(x, dim, index, out=found)
