"""Products with a tensor of which some channels are kept: dW is computed for those, and zero for all others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slimgrad.codecs import Channels, Packed
from slimgrad.kernels.channels import Kernels
from slimgrad.ops.operands import Convolution, Operand, aten


class ChannelOperand(Operand):
    """Stands for a tensor of which some channels are kept.

    Autograd sees the shape of what is kept, so that FlopCounterMode, which looks at shapes alone, counts what is really
    multiplied; it compares the shape with nothing, and the gradients have those of the weight and of the tensor itself.
    """

    codec: Channels

    @staticmethod
    def visible(packed: Packed) -> tuple[tuple[int, ...], tuple[int, ...]]:
        kept = packed.payload[0]
        return tuple(kept.shape), kept.stride()

    @property
    def kept(self) -> Tensor:
        return self.packed.payload[0]

    @property
    def places(self) -> Tensor:
        """Which channels are kept."""
        return self.packed.extra.places  # type: ignore[no-any-return]

    def product(self, dy: Tensor, turned: bool = False) -> Any:
        if self.packed.extra.dim != 1:
            return NotImplemented
        channels = self.packed.layout.shape[1]
        if turned:
            return dy.new_zeros(channels, dy.shape[1]).index_copy_(0, self.places, self.kept.t() @ dy)
        return dy.new_zeros(dy.shape[1], channels).index_copy_(1, self.places, dy.t() @ self.kept)

    def kernels(self, dy: Tensor, weight: Tensor, how: Convolution) -> Any:
        if self.packed.extra.dim != 1:
            return NotImplemented
        if not len(self.places):
            return torch.zeros_like(weight)
        of = Kernels(self.packed.layout.shape[1], how.groups, how.transposed)
        if of.per_group == 1 and of.groups > 1 and not how.transposed:
            part = _depthwise(self.kept, dy, weight, how, self.places)
        else:
            part = _by_groups(self.kept, dy, weight, how, self._members(of))
        return of.spread(weight, self.places, part)

    def _members(self, of: Kernels) -> list[int]:
        """How many of the channels each group has; of what the host knows, so that nobody waits for the device."""
        counts = Counter(channel // of.per_group for channel in self.codec.indices)
        return [counts[group] for group in range(of.groups)]


def _by_groups(x: Tensor, dy: Tensor, weight: Tensor, how: Convolution, members: Sequence[int]) -> Tensor:
    """The gradients of the parts of the weight that belong to the channels x: [channels, C_out / groups, *kernel]."""
    groups = zip(x.split(members, 1), dy.chunk(how.groups, 1), strict=True)
    found = [_part(mine, others, weight, how) for mine, others in groups if mine.shape[1]]
    return torch.cat(found) if len(found) > 1 else found[0]


def _part(x: Tensor, dy: Tensor, weight: Tensor, how: Convolution) -> Tensor:
    """The same in one group."""
    channels, outputs, kernel = x.shape[1], dy.shape[1], weight.shape[2:]
    shape = (channels, outputs, *kernel) if how.transposed else (outputs, channels, *kernel)
    found = _gradient(dy, x, weight.new_empty(shape), how._replace(groups=1))
    return found if how.transposed else found.transpose(0, 1)


def _depthwise(x: Tensor, dy: Tensor, weight: Tensor, how: Convolution, index: Tensor) -> Tensor:
    """Each channel has filters of its own, and of dY only theirs are read."""
    each = weight.shape[0] // how.groups
    mine = dy.unflatten(1, (-1, each)).index_select(1, index).flatten(1, 2)
    shape = (len(index) * each, 1, *weight.shape[2:])
    found = _gradient(mine, x, weight.new_empty(shape), how._replace(groups=len(index)))
    return found.view(len(index), each, *weight.shape[2:])


def _gradient(dy: Tensor, x: Tensor, weight: Tensor, how: Convolution) -> Tensor:
    found: Tensor = aten.convolution_backward(dy, x, weight, None, *how, [False, True, False])[1]
    return found
