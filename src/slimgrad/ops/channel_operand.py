"""Products with a tensor of which some channels are kept: dW is computed for those, and zero for all others."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from slimgrad.codecs import Channels, Packed
from slimgrad.kernels.channels import Kernels, spread
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
        if not self.codec.indices:
            return torch.zeros_like(weight)
        of = Kernels(self.packed.layout.shape[1], how.groups, how.transposed)
        if of.groups == 1:
            part = _part(self.kept, dy, weight, how)
        elif of.per_group == 1 and not how.transposed:
            part = _depthwise(self.kept, dy, weight, how, self.places)
        else:
            part = self._by_groups(dy, weight, how, of)
        return spread(of.parts(self.places), weight, part)

    def _by_groups(self, dy: Tensor, weight: Tensor, how: Convolution, of: Kernels) -> Tensor:
        """How many channels each group has follows from what the host knows, so that nobody waits for the device."""
        counts = Counter(channel // of.per_group for channel in self.codec.indices)
        groups = zip(self.kept.split([counts[g] for g in range(of.groups)], 1), dy.chunk(of.groups, 1), strict=True)
        found = [_part(mine, others, weight, how) for mine, others in groups if mine.shape[1]]
        return torch.cat([part if how.transposed else part.transpose(0, 1) for part in found])


def _part(x: Tensor, dy: Tensor, weight: Tensor, how: Convolution) -> Tensor:
    """dW of a convolution in one group."""
    channels, outputs, kernel = x.shape[1], dy.shape[1], weight.shape[2:]
    shape = (channels, outputs, *kernel) if how.transposed else (outputs, channels, *kernel)
    return _gradient(dy, x, weight.new_empty(shape), how._replace(groups=1))


def _depthwise(x: Tensor, dy: Tensor, weight: Tensor, how: Convolution, places: Tensor) -> Tensor:
    """Each channel has filters of its own, and of dY only theirs are read."""
    each = weight.shape[0] // how.groups
    mine = dy.unflatten(1, (-1, each)).index_select(1, places).flatten(1, 2)
    shape = (len(places) * each, 1, *weight.shape[2:])
    found = _gradient(mine, x, weight.new_empty(shape), how._replace(groups=len(places)))
    return found.view(len(places), each, *weight.shape[1:])


def _gradient(dy: Tensor, x: Tensor, weight: Tensor, how: Convolution) -> Tensor:
    found: Tensor = aten.convolution_backward(dy, x, weight, None, *how, [False, True, False])[1]
    return found
