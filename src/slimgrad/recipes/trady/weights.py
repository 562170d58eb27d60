"""Some channels of a weight as a parameter of their own.

NOTE [Why a parameter of its own]
An optimizer that holds a whole weight moves all of it: momentum, weight decay and Adam change entries whose gradient is
zero. So the channels that are trained become a small parameter, which takes the weight's place in the optimizer's
groups; gradients, momentum and clipping see nothing else, and entries that are not trained cannot change. After each
step it is written into the weight, which is what the forward reads.

NOTE [Two copies of the same numbers]
Anybody may change the weight: checkpoints, clamps, averages, many of them through `.data`, which leaves no trace. An
optimizer may move its parameter in the middle of a step and ask for the loss there, by a closure. So the two are made
the same before each forward: the parameter is written where it has moved, and read again where it has not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimgrad.kernels.channels import norms, spread
from slimgrad.recipes.trady.costs import Layer


class ChannelWeights:
    """The channels of one layer that are trained."""

    def __init__(self, layer: Layer, indices: Sequence[int], optimizer: Optimizer | None, *, looks: bool) -> None:
        self.layer = layer
        self.optimizer = optimizer
        self.looks = looks
        self.index = torch.tensor(indices, dtype=torch.int64, device=layer.weight.device)
        self.parts = layer.kernels.parts(self.index)
        self.parameter = nn.Parameter(self.parts.take(layer.weight.detach()))
        self._version = self.parameter._version
        self._of_channels: dict[str, Any] | None = None
        """What the optimizer keeps for these channels, while they are not in it."""
        self._of_weight: dict[str, Any] | None = None
        """The same of the whole weight: an optimizer cannot save what it keeps for parameters that it does not have."""
        self.seen: Tensor | None = None
        """Sums over steps of the norms of each channel's gradient."""

    def enter(self, *, adopt: bool = False) -> None:
        """Take the weight's place in the optimizer, with its gradient. An optimizer that loaded its state before there
        were channels has theirs under the weight: `adopt` says that it may be so.
        """
        if self.optimizer is None:
            return
        weight = self.layer.weight
        state = self.optimizer.state.pop(weight, None)
        if adopt and state and self._is_of_channels(state):
            self._of_channels = state
        else:
            self._of_weight = state
        if self._of_channels is not None:
            self.optimizer.state[self.parameter] = self._of_channels
        _replace(self.optimizer, weight, self.parameter)
        if weight.grad is not None:
            self.parameter.grad = self.parts.take(weight.grad)
            weight.grad = None

    def leave(self) -> None:
        """Give the weight its place in the optimizer back, and its gradient. What the optimizer kept for these channels
        goes with them: momentum of channels that are drawn again much later is of no use, and Adam would take too large
        first steps without its correction for a start.
        """
        if self.optimizer is None:
            return
        weight = self.layer.weight
        self._of_channels = self.optimizer.state.pop(self.parameter, None)
        if self._of_weight is not None:
            self.optimizer.state[weight] = self._of_weight
        _replace(self.optimizer, self.parameter, weight)
        if self.parameter.grad is not None:
            weight.grad = spread(self.parts, weight, self.parameter.grad)
            self.parameter.grad = None

    def _is_of_channels(self, state: Mapping[str, Any]) -> bool:
        tensors = [value for value in state.values() if isinstance(value, Tensor) and value.dim()]
        return all(tensor.shape == self.parameter.shape for tensor in tensors)

    @property
    def is_pending(self) -> bool:
        """Whether there is a gradient that no step has taken yet."""
        return self.parameter.grad is not None

    def follow(self) -> None:
        """Before a forward: see NOTE [Two copies of the same numbers]."""
        if self.optimizer is None:
            return
        if self.parameter._version != self._version:
            self._write()
            return
        with torch.no_grad():
            self.parameter.copy_(self.parts.take(self.layer.weight))
        self._version = self.parameter._version

    def gather(self) -> None:
        """The weight has a gradient: keep what belongs to these channels."""
        weight = self.layer.weight
        assert weight.grad is not None
        part = self.parts.take(weight.grad)
        if self.optimizer is None:
            weight.grad = spread(self.parts, weight, part)
            self._look(part)
            return
        weight.grad = None
        if self.parameter.grad is None:
            self.parameter.grad = part
        else:
            self.parameter.grad += part

    def _look(self, gradient: Tensor) -> None:
        """Remember how large the gradients of the channels are, if somebody wants to know."""
        if self.looks:
            found = norms(self.parts, gradient)
            self.seen = found if self.seen is None else self.seen + found

    def stepped(self) -> None:
        """The optimizer took a step."""
        if self.parameter.grad is not None:
            self._look(self.parameter.grad)
            self.parameter.grad = None
        self._write()

    def _write(self) -> None:
        with torch.no_grad():
            self.parts.put(self.layer.weight.detach(), self.parameter)
        self._version = self.parameter._version

    def norms(self) -> Tensor:
        """Of all channels; NaN for those not seen. The host waits here."""
        found = torch.full((self.layer.kernels.channels,), torch.nan)
        if self.seen is not None:
            found[self.index.cpu()] = self.seen.float().cpu()
        return found


def _replace(optimizer: Optimizer, old: nn.Parameter, new: nn.Parameter) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [new if each is old else each for each in group["params"]]


def held_by(optimizer: Optimizer) -> set[int]:
    """id of each parameter that the optimizer trains."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
