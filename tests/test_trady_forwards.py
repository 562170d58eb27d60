"""TraDy and modules with forwards of their own: gradients are those of the channels however a product is written."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.recipes.trady.costs import layers_of
from slimgrad.rules import ChannelsOf
from tests.test_trady import controller

SIDE = 6


class Written(nn.Linear):
    """A linear layer whose product is written in another way."""

    def __init__(self, product: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__(16, 16)
        self.product = product

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight)


class Windows(nn.Conv2d):
    """A convolution as a product with windows beside each other."""

    def forward(self, x: Tensor) -> Tensor:
        windows = F.unfold(x, self.kernel_size, padding=1)
        return (self.weight.flatten(1) @ windows).view(len(x), -1, *x.shape[2:])


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "from the other side": lambda x, w: (w @ x.t()).t(),
    "from the other side, with a bias": lambda x, w: torch.addmm(torch.ones(16, 1, dtype=x.dtype), w, x.t()).t(),
    "in batches": lambda x, w: torch.bmm(w[None], x.t()[None])[0].t(),
    "as einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "as a convolution": lambda x, w: F.conv1d(x.t()[None], w[:, :, None])[0].t(),
    "as a convolution, few positions": lambda x, w: F.conv1d(x[:, :, None], w[:, :, None])[:, :, 0],
    "backwards": lambda x, w: F.linear(x.flip(1), w),
    "twice": lambda x, w: F.linear(F.linear(x, w).relu(), w),
}


def dense(product: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), Written(product), nn.ReLU(), nn.Linear(16, 4))


def convolutions() -> nn.Module:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(8 * SIDE * SIDE, 4))
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), Windows(8, 8, 3, padding=1), nn.ReLU(), *flat)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (lambda product=product: dense(product), (20, 16)) for name, product in PRODUCTS.items()},
    "windows": (convolutions, (4, 3, SIDE, SIDE)),
}


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_channels(name: str) -> None:
    build, shape = MODELS[name]
    torch.manual_seed(0)
    model = build().double()
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(600, coverage=1.0), optimizer=optimizer)
    drawn = set()
    for number in range(4):
        x = torch.randn(shape, dtype=torch.float64)
        optimizer.zero_grad()
        other.zero_grad()
        for each in (model, other):
            each(x).square().sum().backward()
        for path, mine in controller(run)._weights.items():
            expected = mine.parts.take(layers_of(other)[path].weight.grad)
            assert torch.allclose(mine.parameter.grad, expected, rtol=1e-9, atol=1e-12), path
            drawn.add(path)
        optimizer.zero_grad()
        if number % 2:
            run.epoch()
    assert drawn == {"0", "2"}


def test_where_channels_are_read_can_be_written_down() -> None:
    rule = sg.Rule(ChannelsOf("a.b", 16, -1), sg.Channels(indices=(1, 2), dim=-1))
    assert sg.Rule.from_json(rule.to_json()) == rule
