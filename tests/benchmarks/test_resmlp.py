"""The reference ResMLP has the sizes of the paper, and trains under block pruning."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import slimgrad as sg

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from tasks.resmlp import S12, S24, SMALL, ResMLP, Shape


def parameters(shape: Shape) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in ResMLP(shape).parameters())


def test_it_has_as_many_parameters_as_in_the_paper() -> None:
    assert round(parameters(S12) / 1e6, 1) == 15.4  # the paper says 15 and 30 million
    assert round(parameters(S24) / 1e6, 1) == 30.0


def test_a_class_is_told_of_every_image() -> None:
    shape = replace(S12, depth=1, width=32, side=64)
    assert ResMLP(shape)(torch.randn(3, 3, 64, 64)).shape == (3, 1000)


def test_it_learns_under_block_pruning_with_less() -> None:
    torch.manual_seed(0)
    model = ResMLP(replace(SMALL, width=64, depth=2))
    images, labels = torch.randn(32, 3, 32, 32), torch.arange(32) % 10
    run = sg.apply(model, sg.block_pruning(keep=0.1, block=(16, 16), means=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # with 1e-2 the loss jumps about, on each CPU otherwise
    losses = []
    for _ in range(40):
        loss = nn.functional.cross_entropy(model(images), labels)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    pruned = [site for site in run.report().sites if "Blocks" in site.codec]
    assert losses[-1] < 0.3 * losses[0]
    assert len(pruned) == 2 * 3
    assert sum(site.after for site in pruned) < 0.2 * sum(site.before for site in pruned)
