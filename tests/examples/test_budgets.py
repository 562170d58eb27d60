"""The network of TraDy's paper at its budgets: counts as published, and what a measured step keeps and computes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import slimgrad as sg
from slimgrad.recipes.trady import draws
from slimgrad.recipes.trady.controller import TradyController

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))  # a script sees the modules beside it

import finetune_mobilenet
import mobilenets

BUDGETS = (27_946, 66_592, 93_696)
WEIGHTS, ACTIVATIONS = 288_864, 963_456
BATCH = 4


def network() -> nn.Module:
    """MobileNetV2-w0.35 as the paper has it, but with norms, and random weights: sizes are the same."""
    torch.manual_seed(0)
    model = mobilenets.MobileNetV2(10, width=0.35, dropout=0.0)
    model.features[-1] = nn.Sequential(nn.Conv2d(112, 448, 1, bias=False), nn.BatchNorm2d(448), nn.ReLU6())
    model.classifier = nn.Linear(448, 10)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, 3, 128, 128, generator=torch.Generator().manual_seed(0)), torch.arange(BATCH)


def trained(model: nn.Module, what: sg.Trady, optimizer: torch.optim.Optimizer) -> TradyController:
    """The controller after the first step."""
    run = sg.apply(model, what, optimizer=optimizer)
    F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert isinstance(run.controller, TradyController)
    return run.controller


@pytest.mark.parametrize("mode", ["uniform", "full_random"])
def test_a_thousand_draws_stay_within_each_budget(mode: str) -> None:
    assert mobilenets.elements(network()) == mobilenets.Elements(52, WEIGHTS, ACTIVATIONS)
    model = network()
    recipe = sg.trady(BUDGETS[0], "mobilenet_v2_w0.35", mode=mode)
    controller = trained(model, recipe, torch.optim.SGD(model.parameters(), lr=0.0))
    layers = controller.layers
    price = {path: controller._price(path) for path in layers}
    assert sum(price[path] * layer.kernels.channels for path, layer in layers.items()) == WEIGHTS + ACTIVATIONS
    pool = {path: layers[path].kernels.channels for path in controller._pool(price)}
    for budget in BUDGETS:
        spent = []
        for seed in range(1000):
            found = draws.taken(pool, price, budget, draws.uniform(pool, draws.generator(seed, 0)))
            spent.append(sum(len(indices) * price[path] for path, indices in found.items()))
        assert max(spent) <= budget
        if mode == "uniform":  # all the pool's channels are cheap beside the budget
            assert min(spent) > budget - max(price[path] for path in pool)


def test_the_smallest_budget_keeps_and_computes_a_few_percent() -> None:
    model = network().train()
    images, labels = batch()
    full = sg.profile(model, (images, labels), F.cross_entropy).kept_bytes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    dense, _ = finetune_mobilenet.looked(model, optimizer, images, labels)
    run = sg.apply(model, sg.trady(BUDGETS[0], "mobilenet_v2_w0.35"), optimizer=optimizer)
    sparse, _ = finetune_mobilenet.looked(model, optimizer, images, labels)
    report = run.report()
    channels = sum(site.after for site in report.sites if "Channels" in site.codec)
    assert channels <= 0.03 * 4 * BATCH * ACTIVATIONS  # activation sparsity of 97 % and more
    trained = sum(weights.parameter.numel() for weights in run.controller._weights.values())
    assert 0 < trained <= 0.07 * WEIGHTS
    assert 0 < sparse <= 0.05 * dense
    assert 10 * report.kept_after < full
    assert report.kept_after == report.promised
