"""TraDy and what it trains: the weights, the parameters that stand for their channels, and the optimizer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import slimgrad as sg
from tests.models import images
from tests.test_trady import BUDGET, controller, network, train


def test_weights_that_somebody_changes_through_data_stay_changed() -> None:
    """As clamps of critics and moving averages do; that leaves no trace in a tensor's version."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    train(model, optimizer)
    for parameter in model.parameters():
        parameter.data.clamp_(-0.01, 0.01)
    train(model, optimizer)
    assert controller(run).choice.count > 0
    assert all(float(parameter.detach().abs().max()) <= 0.01 for parameter in model.parameters())


def test_a_closure_sees_what_the_optimizer_moved_within_its_step() -> None:
    class Thrice(torch.optim.SGD):
        """Asks for the loss three times in a step, and moves in between."""

        def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
            for _ in range(3):
                losses.append(closure())
                for group in self.param_groups:
                    with torch.no_grad():
                        for parameter in group["params"]:
                            parameter -= group["lr"] * (0 if parameter.grad is None else parameter.grad)

    def trained(model: nn.Module, optimizer: Optimizer, what: Callable[[], object]) -> list[Tensor]:
        losses.clear()
        what()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images(8).double()), torch.arange(8))
            loss.backward()
            return loss.detach()

        for _ in range(2):
            optimizer.step(closure)
        return list(losses)

    losses: list[Tensor] = []
    model, other = network().double().eval(), network().double().eval()
    for each in (model, other):
        for path in ("0", "3", "7", "14"):
            each.get_submodule(path).requires_grad_(False)
    mine, theirs = (Thrice([each[10].weight], lr=0.5) for each in (model, other))
    everything = sg.trady(10**6, coverage=1.0)
    found = trained(model, mine, lambda: sg.apply(model, everything, optimizer=mine))
    expected = trained(other, theirs, lambda: other.requires_grad_(False)[10].weight.requires_grad_(True))
    assert torch.allclose(torch.stack(found), torch.stack(expected), rtol=1e-12)
    assert torch.allclose(model[10].weight, other[10].weight, rtol=1e-9)
    assert len({float(loss) for loss in found}) == 6
