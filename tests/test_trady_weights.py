"""TraDy and what it trains: the weights, the parameters that stand for their channels, and the optimizer."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import slimgrad as sg
from slimgrad.recipes.trady.costs import layers_of
from tests.models import hook_count, images
from tests.test_trady import BUDGET, OPTIMIZERS, channel_parts, controller, loss_of, network, train


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


@pytest.mark.parametrize("make", [OPTIMIZERS["sgd, momentum, decay"], OPTIMIZERS["adamw"]], ids=["sgd", "adamw"])
def test_an_optimizer_that_trained_everything_before_can_still_be_saved(make: Callable[[nn.Module], Optimizer]) -> None:
    model = network()
    optimizer = make(model)
    train(model, optimizer)
    kept = copy.deepcopy(optimizer.state_dict()["state"])
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    train(model, optimizer)
    mine = [each.parameter for each in controller(run)._weights.values()]
    saved = optimizer.state_dict()["state"]
    for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
        if any(parameter is each for each in mine):
            assert all(v.shape == parameter.shape for v in saved[number].values() if isinstance(v, Tensor) and v.dim())
    run.epoch()
    train(model, optimizer)
    run.remove()
    after = optimizer.state_dict()["state"]
    numbers = {id(parameter): number for number, parameter in enumerate(model.parameters())}
    for parameter in (layer.weight for path, layer in layers_of(model).items() if path != "14"):
        state = after[numbers[id(parameter)]]
        assert state.keys() == kept[numbers[id(parameter)]].keys()
        assert all(_same(value, kept[numbers[id(parameter)]][key]) for key, value in state.items())
    train(model, optimizer)


def _same(one: object, other: object) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.parametrize("order", list(itertools.permutations(("model", "optimizer", "run"))), ids="-".join)
def test_a_checkpoint_may_be_loaded_in_any_order(order: tuple[str, ...], tmp_path: Path) -> None:
    def begin(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = network() if not seed else network().apply(lambda m: getattr(m, "reset_parameters", lambda: None)())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        return {
            "model": model,
            "optimizer": optimizer,
            "run": sg.apply(model, sg.trady(BUDGET), optimizer=optimizer),
        }

    straight = begin(0)
    train(straight["model"], straight["optimizer"])
    straight["run"].epoch()
    train(straight["model"], straight["optimizer"], first=2)
    torch.save({name: each.state_dict() for name, each in straight.items()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed = begin(1)
    for name in order:
        resumed[name].load_state_dict(saved[name])
    for each in (straight, resumed):
        train(each["model"], each["optimizer"], first=4)
        each["run"].remove()
        train(each["model"], each["optimizer"], first=6)
    for name, value in straight["model"].state_dict().items():
        assert torch.equal(value, resumed["model"].state_dict()[name]), name


def test_gradients_go_along_when_channels_take_the_place_of_a_weight_and_when_they_leave() -> None:
    model = network().double().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def backward() -> None:
        F.cross_entropy(model(images(8).double()), torch.arange(8)).backward()

    backward()  # somebody's, who has not zeroed them yet
    dense = {path: layer.weight.grad.clone() for path, layer in layers_of(model).items()}
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    loss = F.cross_entropy(model(images(8).double()), torch.arange(8))
    optimizer.zero_grad()  # between forward and backward, as many do
    loss.backward()
    chosen = controller(run)._weights
    for path, each in chosen.items():
        assert torch.allclose(each.parameter.grad, each.parts.take(dense[path]), rtol=1e-9, atol=1e-12)
    run.remove()
    for path, each in chosen.items():
        assert torch.allclose(each.parts.take(each.layer.weight.grad), each.parts.take(dense[path]), rtol=1e-9)
        assert each.layer.weight.grad.count_nonzero() <= each.parameter.numel()
    before = model[10].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[10].weight, before)


def test_a_block_that_is_left_undoes_it_and_the_next_one_goes_on_where_it_stopped() -> None:
    def begin() -> tuple[nn.Module, Optimizer, sg.Run]:
        model = network().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        return model, optimizer, sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)

    straight, optimizer, _ = begin()
    train(straight, optimizer, steps=4)
    model, optimizer, run = begin()
    parameters = list(model.parameters())
    run.remove()
    for number in range(2):
        with run:
            train(model, optimizer, steps=2, first=2 * number)
        assert not run.active and hook_count(model) == 0
        assert all(mine is given for mine, given in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
        assert all(parameter.requires_grad for parameter in parameters) and model[1].training
        optimizer.state_dict()
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in straight.state_dict().items())
    train(model, optimizer)
    with sg.apply(model, sg.trady(BUDGET)) as other:
        loss_of(model).backward()
    assert not other.active and all(parameter.requires_grad for parameter in parameters)


def test_a_step_after_a_block_is_the_same_as_one_inside() -> None:
    def trained(after: bool) -> tuple[nn.Module, Optimizer, sg.Run]:
        model = network().train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
        run.remove()
        for number in range(3):
            with run:
                loss = loss_of(model, number)
                if not after:
                    loss.backward()
                    optimizer.step()
            if after:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        return model, optimizer, run

    inside, _, _ = trained(after=False)
    model, optimizer, run = trained(after=True)
    assert all(torch.equal(value, inside.state_dict()[name]) for name, value in model.state_dict().items())
    with pytest.raises(sg.SlimgradError, match="still under a run that was left by `with run:`"):
        sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    run.remove()
    assert hook_count(model) == 0 and all(parameter.requires_grad for parameter in model.parameters())


def test_what_is_frozen_stays_so_in_loops_that_switch_a_whole_network_off_and_on() -> None:
    """As those of two networks do, where one is only looked through while the other is trained."""
    model = network().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    for number in range(3):
        before = channel_parts(model)
        biases = {
            name: value.clone() for name, value in model.state_dict().items() if "14" not in name and "bias" in name
        }
        model.requires_grad_(False)
        x = images(8, seed=number).requires_grad_()
        model(x).sum().backward()
        assert x.grad is not None
        model.requires_grad_(True)
        train(model, optimizer, steps=1, first=number)
        chosen = controller(run).choice.channels
        for path, after in channel_parts(model).items():
            changed = {c for c, part in enumerate(after) if not torch.equal(part, before[path][c])}
            assert path == "14" or changed == set(chosen.get(path, ()))
        assert all(torch.equal(value, model.state_dict()[name]) for name, value in biases.items())
