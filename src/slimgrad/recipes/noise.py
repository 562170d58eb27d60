"""How much noise the gradient of a weight gets from inputs that are off by up to a bound.

NOTE [From a bound to the noise of a gradient]
An element of dW is a sum, over rows or positions, of dY_c times an input. If inputs are off by up to eb, evenly and
independently, and zeros stay zeros, its noise has the variance eb^2 / 3 times the sum of dY_c^2 where the input is
not zero. On average over all elements that is a product of two maps, the sum of dY^2 over output channels and the
number of inputs that are not zero, each at the same place: a gradient of one channel's weight, which costs next to
nothing, and is exact at borders and for strides. The usual formula, eb^2 / 3 * R * ||dY_c||^2 with the part R of
inputs that are not zero, takes the two for independent and leaves borders out; it serves where the layer is no plain
one.

The paper's form is sigma = 0.32 * mean|dY| * sqrt(rows * R) * eb.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import grad

PAPER_CONSTANT = 0.32
BY_RANK: dict[int, Callable[..., Tensor]] = {3: grad.conv1d_weight, 4: grad.conv2d_weight, 5: grad.conv3d_weight}

Variance = Callable[[Tensor], Tensor]
"""From dY to the mean variance of the elements of dW, for a bound of 1."""


def variance_by(module: nn.Module, x: Tensor, *, paper: bool = False) -> Variance:
    """What is to be known of a layer's input, so that dY tells the rest."""
    nonzero = x.detach() != 0
    if paper:
        part = nonzero.float().mean()
        return lambda dy: PAPER_CONSTANT**2 * part * mean_size(dy).square() * (dy.numel() / _channels(module, dy))
    if type(module) is nn.Linear:
        count = nonzero.sum(-1).float()
        return lambda dy: (_squares(dy, -1) * count).sum() / (3 * dy.shape[-1] * x.shape[-1])
    if _is_plain_convolution(module, x):
        return _by_maps(module, nonzero)
    part = nonzero.float().mean()
    return lambda dy: part * norm(dy).square() / (3 * _channels(module, dy))


def _by_maps(module: Any, nonzero: Tensor) -> Variance:
    groups, weight = module.groups, module.weight
    count = _grouped(nonzero, groups).sum(2).float()
    shape = (groups, 1, *weight.shape[2:])
    how = (module.stride, module.padding, module.dilation, groups)

    def variance(dy: Tensor) -> Tensor:
        squares = _squares(_grouped(dy, groups), 2)
        found: Tensor = BY_RANK[dy.dim()](count, shape, squares, *how).sum() / (3 * weight.numel())
        return found

    return variance


def _is_plain_convolution(module: nn.Module, x: Tensor) -> bool:
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or x.dim() != module.weight.dim():
        return False
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _grouped(x: Tensor, groups: int) -> Tensor:
    return x.reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])


def _squares(x: Tensor, dim: int) -> Tensor:
    """Sums of squares, without a copy of x in another precision."""
    found: Tensor = torch.linalg.vector_norm(x.detach(), dim=dim, dtype=_wide(x))
    return found.float().square()


def _wide(x: Tensor) -> torch.dtype:
    """In which sums are taken: in float32 at least."""
    return torch.promote_types(x.dtype, torch.float32)


def _channels(module: nn.Module, dy: Tensor) -> int:
    """Of what a layer puts out: only the layer tells where dY has them."""
    return module.out_channels if isinstance(module, nn.modules.conv._ConvNd) else dy.shape[-1]


def here(x: Tensor) -> Tensor:
    """What this process has of a tensor: a part, if it is sharded. Processes follow bounds of their own, and look at
    different steps, so none may wait for the others' parts.
    """
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


def norm(x: Tensor, order: int = 2) -> Tensor:
    found: Tensor = torch.linalg.vector_norm(here(x.detach()), ord=order, dtype=_wide(x))
    return found.float()


def mean_size(x: Tensor) -> Tensor:
    return norm(x, 1) / here(x).numel()


def allowed_bound(sigma: Tensor, variances: list[Tensor]) -> Tensor:
    """The bound with which the noise of all these together has that deviation."""
    return (sigma / torch.stack(variances).sum().sqrt()).float()
