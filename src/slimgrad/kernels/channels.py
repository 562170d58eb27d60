"""Input channels of a weight, in plain torch: the part of it that reads some channels, taken out and put back.

NOTE [The part of a weight that reads a channel]
Input channel c of a convolution in g groups belongs to group c // (C_in / g), and is read by the C_out / g filters of
that group, by one kernel in each. Where there is one group that is weight[:, c]; where each channel has a group of its
own, or where weights count inputs first (transposed convolutions, Conv1D of transformers), a part lies in one piece.
Linear layers are convolutions with a kernel of no dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
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

    def parts(self, index: Tensor) -> Parts:
        """What belongs to these channels."""
        if self.inputs_first:
            return Slices(index, 0)
        if self.groups == 1:
            return Slices(index, 1)
        if self.per_group == 1:
            return Slices(index, 0, self.groups)
        return Scattered(self.groups, index // self.per_group, index % self.per_group)


@dataclass(frozen=True, eq=False)
class Slices:
    """Parts along one dimension."""

    index: Tensor
    at: int
    """Which dimension of a part counts channels."""
    groups: int = 0
    """Into how many the first dimension is cut before; 0 for none."""

    def take(self, weight: Tensor) -> Tensor:
        """A copy of the parts."""
        return self._cut(weight).index_select(self.at, self.index)

    def put(self, weight: Tensor, part: Tensor) -> None:
        """Write the parts into the weight."""
        self._cut(weight).index_copy_(self.at, self.index, part)

    def _cut(self, weight: Tensor) -> Tensor:
        return weight.view(self.groups, -1, *weight.shape[1:]) if self.groups else weight


@dataclass(frozen=True, eq=False)
class Scattered:
    """Parts of several groups: [channels, C_out / groups, *kernel]."""

    groups: int
    rows: Tensor
    columns: Tensor
    at: int = 0

    def take(self, weight: Tensor) -> Tensor:
        return self._cut(weight)[self.rows, :, self.columns]

    def put(self, weight: Tensor, part: Tensor) -> None:
        self._cut(weight)[self.rows, :, self.columns] = part

    def _cut(self, weight: Tensor) -> Tensor:
        return weight.view(self.groups, -1, *weight.shape[1:])


Parts = Slices | Scattered


def spread(parts: Parts, weight: Tensor, part: Tensor) -> Tensor:
    """A tensor like the weight, zero but for these parts."""
    found = torch.zeros_like(weight)
    parts.put(found, part.to(weight.dtype))
    return found


def norms(parts: Parts, part: Tensor) -> Tensor:
    """Of what belongs to each channel."""
    dtype = torch.promote_types(part.dtype, torch.float32)
    others = [dim for dim in range(part.dim()) if dim != parts.at]
    found: Tensor = torch.linalg.vector_norm(part.detach(), dim=others, dtype=dtype)
    return found


def select(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """These channels of x, in its order of dimensions, so that channels_last stays channels_last."""
    found = torch.empty_like(x.narrow(dim, 0, len(index)))
    return torch.index_select(x, dim, index, out=found)
