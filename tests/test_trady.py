"""TraDy: other channels in each epoch, never over the budget, and nothing else changes."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import slimgrad as sg
from slimgrad.recipes.trady import draws
from slimgrad.recipes.trady.controller import TradyController
from slimgrad.recipes.trady.costs import Layer, layers_of, states_of
from slimgrad.recipes.trady.ranking import LayerRank, pool
from slimgrad.spec.budgets import bytes_of
from tests.models import hook_count, images

BUDGET = 1500


def network() -> nn.Sequential:
    """Convolutions of all kinds with norms between, and a head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU6(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU6(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, groups=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 32, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def loss_of(model: nn.Module, seed: int = 0, batch: int = 8) -> Tensor:
    device = next(model.parameters()).device
    x = images(batch, seed=seed).to(device)
    return F.cross_entropy(model(x), torch.arange(batch, device=device) % 10)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2, first: int = 0) -> None:
    for number in range(first, first + steps):
        loss_of(model, number).backward()
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "sgd, momentum, decay": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, weight_decay=0.1),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=0.01, momentum=0.5),
}


def controller(run: sg.Run) -> TradyController:
    assert isinstance(run.controller, TradyController)
    return run.controller


def channel_parts(model: nn.Module) -> dict[str, Tensor]:
    """The part of each weight that belongs to each channel."""
    return {path: by_channel(layer, layer.weight.detach()) for path, layer in layers_of(model).items()}


def by_channel(layer: Layer, weight: Tensor) -> Tensor:
    """Channels first."""
    parts = layer.kernels.parts(torch.arange(layer.kernels.channels, device=weight.device))
    return parts.take(weight).movedim(parts.at, 0)


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_what_is_not_chosen_does_not_change_by_a_bit(
    make: Callable[[nn.Module], Optimizer], device: torch.device
) -> None:
    model = network().train().to(device)
    optimizer = make(model)
    train(model, optimizer)  # so that there are momenta of everything
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    everything, moved = set(), set()
    for epoch in range(3):
        before = channel_parts(model)
        others = {name: value.clone() for name, value in model.state_dict().items() if "weight" not in name}
        states = {
            id(p): {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
            for p, state in optimizer.state.items()
            if any(p is mine for mine in model.parameters())
        }
        train(model, optimizer, first=10 * epoch)
        chosen = controller(run).choice.channels
        after = channel_parts(model)
        for path in before:
            changed = {c for c in range(len(before[path])) if not torch.equal(before[path][c], after[path][c])}
            if path != "14":
                assert changed <= set(chosen.get(path, ()))
                moved |= {(path, c) for c in changed}
                everything |= {(path, c) for c in chosen.get(path, ())}
        for name, value in others.items():
            if name != "14.bias" and "running" not in name:
                assert torch.equal(value, model.state_dict()[name]), name
        for parameter, state in optimizer.state.items():
            if id(parameter) in states and parameter is not model[14].weight and parameter is not model[14].bias:
                assert all(torch.equal(state[key], value) for key, value in states[id(parameter)].items())
        run.epoch()
    assert len(moved) > 0.9 * len(everything) > 10


def test_running_statistics_stand_still_and_move_again_afterwards() -> None:
    model = network().train()
    run = sg.apply(model, sg.trady(BUDGET), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    before = model[1].running_mean.clone()
    loss_of(model).backward()
    assert torch.equal(before, model[1].running_mean) and model[1].training
    run.remove()
    loss_of(model)
    assert not torch.equal(before, model[1].running_mean)


def test_gradients_are_those_of_the_dense_model_for_the_channels() -> None:
    model = network().double().eval()
    dense = copy.deepcopy(model)
    x, y = images(8).double(), torch.arange(8)
    F.cross_entropy(dense(x), y).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = channel_parts(model)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    for number in range(3):  # watched, worked, worked
        F.cross_entropy(model(x), y).backward()
        if number < 2:
            optimizer.zero_grad()
    assert all(layer.weight.grad is None for path, layer in layers_of(model).items() if path != "14")
    optimizer.step()
    after = channel_parts(model)
    for path, indices in controller(run).choice.channels.items():
        layer = layers_of(dense)[path]
        index = torch.tensor(indices)
        expected = by_channel(layer, layer.weight.grad)[index]
        assert torch.allclose((before[path] - after[path])[index], expected, rtol=1e-9, atol=1e-12)
    assert torch.allclose(dense[14].weight.grad, model[14].weight.grad)


def test_gradients_accumulate_over_batches_and_a_draw_waits_for_the_step() -> None:
    model = network().double().eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    halves, y = images(8).double().split(4), torch.arange(8).split(4)
    for x, labels in zip(halves, y, strict=True):
        F.cross_entropy(model(x), labels, reduction="sum").backward()
        chosen = controller(run).choice
        run.epoch()
    pending = {path: w.parameter.grad.clone() for path, w in controller(run)._weights.items()}
    optimizer.zero_grad()
    whole = sg.apply(copy.deepcopy(model), sg.trady(BUDGET))  # a copy of a model under a run is free
    whole.remove()
    assert controller(run).choice is chosen
    other = copy.deepcopy(network()).double().eval()
    F.cross_entropy(other(images(8).double()), torch.arange(8), reduction="sum").backward()
    for path, indices in chosen.channels.items():
        layer = layers_of(other)[path]
        parts = layer.kernels.parts(torch.tensor(indices))
        assert torch.allclose(pending[path], parts.take(layer.weight.grad))
    loss_of(model.float())
    assert controller(run).choice is not chosen


def test_backward_ends_below_the_first_layer_that_is_trained() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET, coverage=0.1), optimizer=optimizer)
    seen: dict[int, bool] = {}
    for number in (0, 3, 7, 10, 14):
        model[number].register_forward_hook(lambda m, a, y, number=number: seen.update({number: y.requires_grad}))
    loss_of(model).backward()
    (path,) = controller(run).choice.channels
    assert seen == {number: number >= int(path) for number in seen} and path in ("7", "10")


def test_several_processes_are_refused_before_anything_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = network()
    with pytest.raises(sg.UnsupportedModelError, match="trains in one process so far"):
        sg.apply(model, sg.trady(BUDGET))
    assert all(p.requires_grad for p in model.parameters())


def test_what_cannot_be_trained_is_refused_before_anything_is_changed(tmp_path) -> None:
    def refused(model: nn.Module, optimizer: Optimizer, message: str) -> None:
        before = hook_count(model)
        with pytest.raises(sg.UnsupportedModelError, match=message):
            sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
        assert all(p.requires_grad for p in model.parameters()) and hook_count(model) == before

    model = network()
    refused(model, torch.optim.LBFGS(model.parameters()), "LBFGS keeps vectors of all that it trains together")
    fused = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    refused(model, fused, "make it with fused=False")
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    refused(nn.DataParallel(model), plain, "this one is wrapped in DataParallel")
    lazy = nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 8), nn.Linear(8, 4))
    refused(lazy, torch.optim.SGD(lazy[1:].parameters(), lr=0.1), r"'0\.weight' has no shape yet; run the model once")
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, init_method=f"file://{tmp_path / 'store'}")
    try:
        refused(nn.parallel.DistributedDataParallel(model), plain, "this one is wrapped in DistributedDataParallel")
    finally:
        torch.distributed.destroy_process_group()


def test_no_draw_exceeds_the_budget_and_all_channels_come() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    train(model, optimizer, steps=1)
    costs = controller(run)._costs
    layers = layers_of(model)
    prices = {path: costs.elements(layer) for path, layer in layers.items() if path != "14"}
    # C^W + C^A: 16 filters of 9 and 16 x 16 inputs; one filter of 9; 16 filters of 9 and 8 x 8 inputs; 32 and 64.
    assert prices == {"0": 144 + 256, "3": 9 + 256, "7": 144 + 64, "10": 32 + 64}
    for epoch in range(30):
        run.epoch()
        train(model, optimizer, steps=1, first=epoch)
        choice = controller(run).choice
        spent = sum(len(indices) * prices[path] for path, indices in choice.channels.items())
        assert choice.elements == spent <= BUDGET < spent + max(prices.values())
    drawn = {(path, c) for choice in controller(run).path for path, found in choice.channels.items() for c in found}
    assert {path for path, _ in drawn} <= set(prices)
    assert len(controller(run).path) == 31


def test_draws_follow_from_seed_and_epoch() -> None:
    def choices(seed: int) -> list[sg.ChannelChoice]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = sg.apply(model, sg.trady(BUDGET, seed=seed), optimizer=optimizer)
        for epoch in range(3):
            train(model, optimizer, steps=1, first=epoch)
            run.epoch()
        return controller(run).path

    assert choices(0) == choices(0) != choices(1)
    assert len({str(choice.channels) for choice in choices(0)}) == 3


@pytest.mark.parametrize("mode", ["static", "deterministic"])
def test_modes_that_draw_once_keep_their_channels(mode: str) -> None:
    model = network()
    ranking = sg.trady_rank(model, [(images(8), torch.arange(8))], F.cross_entropy, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET, ranking, mode=mode), optimizer=optimizer)
    for epoch in range(3):
        train(model, optimizer, first=epoch)
        run.epoch()
    assert len(controller(run).path) == 1
    if mode == "deterministic":
        channels = controller(run).choice.channels
        for path, indices in channels.items():
            scores = next(rank.by_channel for rank in ranking.layers if rank.path == path)
            dropped = [s for c, s in enumerate(scores) if c not in indices]
            assert min(scores[c] for c in indices) >= max(dropped, default=0)


def test_full_random_draws_from_all_layers_and_others_from_the_pool() -> None:
    model = network()
    for mode, coverage, paths in (("full_random", 0.1, 4), ("uniform", 0.1, 1), ("uniform", 1.0, 4)):
        run = sg.apply(model, sg.trady(BUDGET, mode=mode, coverage=coverage))
        for _ in range(12):
            loss_of(model).backward()
            run.epoch()
        drawn = {path for choice in controller(run).path for path in choice.channels}
        assert len(drawn) == paths
        run.remove()


def test_weighted_draws_prefer_channels_whose_gradients_are_large() -> None:
    norms = {"a": torch.tensor([1.0, 8.0, torch.nan, 0.0])}
    first = [int(draws.weighted({"a": 4}, norms, draws.generator(seed, 1))[0]) for seed in range(2000)]
    shares = [first.count(c) / 2000 for c in range(4)]
    for share, expected in zip(shares, (1 / 17, 8 / 17, 8 / 17, 0.0), strict=True):
        assert abs(share - expected) < 4 * math.sqrt(0.25 / 2000)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET, mode="weighted"), optimizer=optimizer)
    for epoch in range(3):
        train(model, optimizer, first=epoch)
        run.epoch()
    train(model, optimizer)
    seen = controller(run)._gradients
    drawn = {(path, c) for choice in controller(run).path[:3] for path, found in choice.channels.items() for c in found}
    assert drawn == {(path, c) for path, norms in seen.items() for c in range(len(norms)) if not norms[c].isnan()}


def test_a_uniform_draw_covers_the_pool_as_arithmetic_has_it() -> None:
    channels = {"a": 300, "b": 200, "c": 500}
    price, budget, epochs = dict.fromkeys(channels, 7), 700, 15  # a tenth of them
    covered = torch.zeros(1000)
    shares = []
    for epoch in range(epochs):
        found = draws.taken(channels, price, budget, draws.uniform(channels, draws.generator(3, epoch)))
        assert sum(map(len, found.values())) == 100
        for start, path in ((0, "a"), (300, "b"), (500, "c")):
            covered[[start + c for c in found.get(path, ())]] = 1
        shares.append(float(covered.mean()))
    for epoch, share in enumerate(shares, 1):
        expected = 1 - 0.9**epoch
        assert abs(share - expected) < 4 * math.sqrt(expected * (1 - expected) / 1000) + 1e-9


def test_what_does_not_fit_alone_is_never_drawn_and_does_not_end_a_draw() -> None:
    channels, price = {"large": 50, "small": 50}, {"large": 100, "small": 1}
    for seed in range(20):
        found = draws.taken(channels, price, 50, draws.uniform(channels, draws.generator(seed, 0)))
        assert found == {"small": tuple(range(50))}


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_a_budget_in_bytes_counts_batch_gradients_and_states() -> None:
    model = network()
    for name, states in (("sgd", 0), ("sgd, momentum, decay", 1), ("adamw", 2), ("rmsprop", 2)):
        optimizer = OPTIMIZERS[name](model)
        assert states_of(optimizer) == states
        run = sg.apply(model, sg.trady("64KiB"), optimizer=optimizer)
        train(model, optimizer)
        choice = controller(run).choice
        layers, costs = layers_of(model), controller(run)._costs
        rows = {path: costs.elements(layers[path]) - layers[path].weights for path in choice.channels}
        inputs = sum(8 * 4 * len(c) * rows[path] for path, c in choice.channels.items())
        weights = sum(4 * len(c) * layers[path].weights for path, c in choice.channels.items())
        head = 8 * 32 * 4 + (1 + states) * (320 + 10) * 4
        assert choice.bytes == inputs + (2 + states) * weights + head <= 64 * 1024
        held = [w.parameter for w in controller(run)._weights.values()]
        assert sum(p.nbytes for p in held) == weights
        kept = sum(v.nbytes for p in held for v in optimizer.state[p].values() if isinstance(v, Tensor) and v.dim())
        assert kept == states * weights
        report = run.report()
        channels = [site for site in report.sites if "Channels" in site.codec]
        first = 8 * 4 * len(choice.channels.get("0", ())) * 256  # what the first layer reads is the model's input
        assert sum(site.after for site in channels) == inputs - first
        assert "the budget is '64KiB'" in report.notes[0]
        run.remove()


def test_a_larger_batch_is_drawn_for_anew_and_a_smaller_one_is_not() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady("64KiB"), optimizer=optimizer)
    for batch, draws_so_far in ((8, 1), (8, 1), (3, 1), (16, 2), (16, 2), (8, 2)):
        loss_of(model, batch=batch).backward()
        optimizer.step()
        assert len(controller(run).path) == draws_so_far
    assert controller(run).choice.bytes <= 64 * 1024


def test_a_budget_below_the_head_is_refused() -> None:
    model = network()
    run = sg.apply(model, sg.trady("1KiB"), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(sg.SpecError, match=r"less than what is trained whole takes alone \(14: 2344 bytes"):
        loss_of(model)
    run.remove()


def test_what_was_drawn_can_be_plotted(tmp_path) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    with pytest.raises(sg.SpecError, match="no channels were drawn yet"):
        controller(run).plot(tmp_path / "channels.png")
    for epoch in range(3):
        train(model, optimizer, steps=1, first=epoch)
        run.epoch()
    assert controller(run).plot(tmp_path / "channels.png").stat().st_size > 10_000


def test_no_budget_trains_the_head_alone_and_keeps_nothing_else() -> None:
    model = network()
    run = sg.apply(model, sg.trady(0), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        loss_of(model).backward()
    assert run.report().kept_after == 8 * 32 * 4
    assert [name for name, p in model.named_parameters() if p.grad is not None] == ["14.weight", "14.bias"]


def test_not_even_the_first_forward_holds_everything() -> None:
    model = network()
    run = sg.apply(model, sg.trady(BUDGET), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    kept = []
    for _ in range(3):
        held: list[weakref.ref[Tensor]] = []
        handle = model[3].register_forward_pre_hook(lambda m, args, held=held: held.append(weakref.ref(args[0])))
        loss = loss_of(model)
        gc.collect()
        kept.append(run.report().kept_after)
        handle.remove()
        assert held[-1]() is None
        loss.backward()
        run.epoch()
    full = sg.profile(network(), images(8)).kept_bytes
    assert max(kept) < full / 5


# --- rankings ---------------------------------------------------------------------------------------------------------


def test_before_is_what_training_everything_keeps(device: torch.device) -> None:
    """And counting it moves no statistics, of batches neither."""
    model = network().train().to(device)
    model[3].requires_grad_(False)  # by the user, which is not undone for that
    batches = [images(count).to(device) for count in (8, 5)]
    expected = [sg.profile(model, x).kept_bytes for x in batches]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    for _ in range(2):
        for x, before in zip(batches, expected, strict=True):
            model(x).sum().backward()
            report = run.report()
            assert report.kept_before == before and report.kept_after < before / 4
            optimizer.step()
            optimizer.zero_grad()
        run.epoch()
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert not model[3].weight.requires_grad


def test_a_single_sample_is_trained_though_norms_that_are_not_frozen_would_refuse_it() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    for count in (4, 1, 1):
        model(torch.randn(count, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    report = run.report()
    assert report.kept_before >= report.kept_after > 0 and model[1].training


def test_rgn_is_the_norm_of_each_channels_gradient_over_its_cost() -> None:
    model = network().eval()
    x, y = images(8), torch.arange(8)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)  # somebody's, who goes on with them
    ranking = sg.trady_rank(model, [(x, y)], F.cross_entropy, steps=3)
    assert all(p.requires_grad and torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    model.zero_grad()
    dense = copy.deepcopy(model)
    F.cross_entropy(dense(x), y).backward()
    costs = {"0": 400, "3": 265, "7": 208, "10": 96}
    assert [rank.path for rank in ranking.layers] == list(costs)
    for rank in ranking.layers:
        layer = layers_of(dense)[rank.path]
        part = by_channel(layer, layer.weight.grad)
        expected = 3 * part.flatten(1).norm(dim=1) / costs[rank.path]
        assert torch.allclose(torch.tensor(rank.by_channel), expected, rtol=1e-3)
        assert abs(rank.rgn - float(expected.sum())) < 1e-3 * rank.rgn


def test_a_ranking_layer_by_layer_is_the_same() -> None:
    model = network().train()
    loader = [(images(4, seed=seed), torch.arange(4)) for seed in range(2)]
    at_once = sg.trady_rank(model, loader, F.cross_entropy, steps=3)
    statistics = model[1].running_mean.clone()
    by_one = sg.trady_rank(model, loader, F.cross_entropy, steps=3, layers_at_once=1)
    assert torch.equal(statistics, model[1].running_mean) and model[1].training
    for one, other in zip(at_once.layers, by_one.layers, strict=True):
        assert one.path == other.path and abs(one.rgn - other.rgn) <= 1e-3 * one.rgn


def test_the_head_may_learn_while_ranks_are_taken() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model[14].parameters(), lr=0.1)
    done: list[int] = []
    loader = [(images(8), torch.arange(8))]
    sg.trady_rank(model, loader, F.cross_entropy, steps=3, optimizer=optimizer, layers_at_once=2, each_step=done.append)
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["14.weight", "14.bias"] and done == [1, 2, 3]


def test_a_ranking_goes_to_a_file_and_to_other_names(tmp_path) -> None:
    model = network()
    ranking = sg.trady_rank(model, [(images(8), torch.arange(8))], F.cross_entropy, steps=1)
    path = ranking.save(tmp_path / "ranking.json")
    assert sg.Ranking.load(path) == ranking == sg.Ranking.from_json(ranking.to_json())
    wrapped = nn.Sequential(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    run = sg.apply(wrapped, sg.trady(BUDGET, str(path)), optimizer=optimizer)
    loss_of(wrapped).backward()
    assert all(name.startswith("0.") for name in controller(run).choice.channels)
    assert ranking.without_channels().layers[0].by_channel == ()
    with pytest.raises(sg.SpecError, match="has none for '0'"):
        sg.apply(network(), sg.trady(BUDGET, ranking.without_channels(), mode="deterministic"))


def test_the_ranking_of_another_model_is_refused() -> None:
    ranking = sg.trady_rank(network(), [(images(8), torch.arange(8))], F.cross_entropy, steps=1)
    with pytest.raises(sg.SpecError, match=r"of Sequential \(4 layers\) is of another model: '1' with 8 channels"):
        sg.apply(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 2)), sg.trady(BUDGET, ranking))


def test_the_pool_has_the_layers_that_come_first() -> None:
    rgn = {"a": 1.0, "b": 50.0, "c": 30.0, "d": 19.0}
    assert pool(rgn, 0.5) == ["b"]
    assert pool(rgn, 0.8) == ["b", "c"]
    assert pool(rgn, 0.97) == ["b", "c", "d"]
    assert pool(rgn, 1.0) == ["a", "b", "c", "d"]


# --- how users train --------------------------------------------------------------------------------------------------


def test_remove_leaves_no_trace() -> None:
    model = network()
    model[7].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    flags = [p.requires_grad for p in model.parameters()]
    groups = [list(map(id, group["params"])) for group in optimizer.param_groups]
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    train(model, optimizer)
    state = copy.deepcopy(model.state_dict())
    run.remove()
    assert [p.requires_grad for p in model.parameters()] == flags
    assert [list(map(id, group["params"])) for group in optimizer.param_groups] == groups
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert set(map(id, optimizer.state)) <= set(groups[0])
    train(model, optimizer)


def test_training_goes_on_where_it_stopped() -> None:
    def begin() -> tuple[nn.Module, Optimizer, sg.Run]:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, sg.apply(model, sg.trady(BUDGET, mode="weighted"), optimizer=optimizer)

    def epochs(model: nn.Module, optimizer: Optimizer, run: sg.Run, numbers: range) -> None:
        for number in numbers:
            train(model, optimizer, steps=1, first=2 * number)
            if number < 3:
                train(model, optimizer, steps=1, first=2 * number + 1)
            run.epoch()

    straight = begin()
    epochs(*straight, range(4))
    before = begin()
    epochs(*before, range(2))
    after = begin()
    after[0].load_state_dict(before[0].state_dict())
    after[2].load_state_dict(before[2].state_dict())
    after[1].load_state_dict(before[1].state_dict())
    epochs(*after, range(2, 4))
    for name, value in straight[0].state_dict().items():
        assert torch.equal(value, after[0].state_dict()[name]), name
    other = sg.apply(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), sg.trady(9, mode="weighted"))
    with pytest.raises(sg.SpecError, match="the state has channels of 10, 3, which the model does not have"):
        other.load_state_dict(before[2].state_dict())


def test_weights_that_are_loaded_meanwhile_are_trained_from_there() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    train(model, optimizer)
    loaded = {
        name: value * 0.5 if value.is_floating_point() else value for name, value in network().state_dict().items()
    }
    model.load_state_dict(loaded)
    frozen = copy.deepcopy(model.state_dict())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    train(model, optimizer)
    assert all(torch.equal(value, frozen[name]) for name, value in model.state_dict().items())


def test_without_an_optimizer_gradients_are_zeros_for_other_channels_and_the_report_says_so() -> None:
    model = network()
    run = sg.apply(model, sg.trady(BUDGET))
    for number in range(3):
        loss_of(model, number).backward()
    for path, layer in layers_of(model).items():
        if path == "14":
            continue
        chosen = controller(run).choice.channels.get(path)
        if chosen is None:
            assert layer.weight.grad is None
            continue
        part = by_channel(layer, layer.weight.grad)
        others = [c for c in range(layer.kernels.channels) if c not in chosen]
        assert not part[others].any() and part[list(chosen)].any()
    assert "was given no optimizer" in run.report().notes[1]


def test_under_autocast_and_with_a_scaler(device: torch.device) -> None:
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    scaler = torch.amp.GradScaler(device.type, init_scale=16.0)
    before = channel_parts(model)
    for number in range(3):
        with torch.autocast(device.type, torch.bfloat16):
            loss = F.cross_entropy(model(images(8, seed=number).to(device)), torch.arange(8, device=device))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    chosen = controller(run).choice.channels
    after = channel_parts(model)
    for path, parts in before.items():
        changed = {c for c in range(len(parts)) if not torch.equal(parts[c], after[path][c])}
        assert path == "14" or changed <= set(chosen.get(path, ()))
    assert all(w.parameter.grad is None for w in controller(run)._weights.values())


def test_inside_a_checkpoint_gradients_are_still_those_of_the_channels() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = network()[:14], nn.Linear(32, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(checkpoint(self.body, x, use_reentrant=False))

    model = Checkpointed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    before = channel_parts(model)
    train(model, optimizer, steps=3)
    chosen, after = controller(run).choice.channels, channel_parts(model)
    for path in chosen:
        changed = {c for c in range(len(before[path])) if not torch.equal(before[path][c], after[path][c])}
        assert changed <= set(chosen[path]) and changed


def test_a_copy_of_the_model_is_free_of_the_run() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    train(model, optimizer)
    other = copy.deepcopy(model)
    other.train()
    before = other[1].running_mean.clone()
    loss_of(other).backward()
    assert not torch.equal(before, other[1].running_mean)
    assert isinstance(sg.apply(other, sg.trady(BUDGET)), sg.Run)


def test_a_run_that_is_removed_lets_go_of_the_model() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    train(model, optimizer)
    run.remove()
    gone = weakref.ref(model)
    del model, run, optimizer
    gc.collect()
    assert gone() is None


def test_modules_in_train_are_trained_whole() -> None:
    model = network().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET, train=("head", "8")), optimizer=optimizer)
    before = copy.deepcopy(model.state_dict())
    train(model, optimizer)
    after = model.state_dict()
    assert not torch.equal(before["8.weight"], after["8.weight"])
    assert not torch.equal(before["8.running_mean"], after["8.running_mean"])
    assert torch.equal(before["4.weight"], after["4.weight"])
    assert list(controller(run).always) == ["14", "8"]


def test_frozen_layers_and_those_the_optimizer_has_not_are_not_drawn() -> None:
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD([*model[7].parameters(), *model[14].parameters()], lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    assert list(controller(run).layers) == ["7"]
    run.remove()
    assert not model[0].weight.requires_grad
    with pytest.raises(sg.UnsupportedModelError, match="and of those that do, the optimizer has none"):
        sg.apply(model, sg.trady(BUDGET), optimizer=torch.optim.SGD(model[14].parameters(), lr=0.1))


def test_weights_that_modules_share_are_left_alone() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
            self.down.weight = self.up.weight
            self.mid, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.mid(self.down(self.up(x))))

    assert list(layers_of(Tied())) == ["mid", "head"]


def test_transformers_train_channels_of_their_products() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = sg.apply(model, sg.trady(2000, train=("transformer.ln_f",)), optimizer=optimizer)
    ids = torch.arange(32).view(2, 16)
    before = channel_parts(model)
    for _ in range(2):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.epoch()
    chosen = [choice.channels for choice in controller(run).path]
    after = channel_parts(model)
    assert len(chosen) == 2
    assert all(layer.kernels.inputs_first for path, layer in layers_of(model).items() if ".c_" in path)
    for path, parts in before.items():
        changed = {c for c in range(len(parts)) if not torch.equal(parts[c], after[path][c])}
        assert changed == {c for each in chosen for c in each.get(path, ())}


def test_a_step_without_a_forward_that_was_seen_is_warned_of_once() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sg.apply(model, sg.trady(BUDGET), optimizer=optimizer)
    checkpoint(model, images(8).requires_grad_(), use_reentrant=False).sum().backward()
    with pytest.warns(sg.SlimgradWarning, match="no channels are drawn"):
        optimizer.step()
    optimizer.step()


def test_grad_error_takes_it() -> None:
    everything = sg.trady(10**9, coverage=1.0)
    found = sg.grad_error(network().eval(), (images(8), torch.arange(8)), everything, F.cross_entropy)
    errors = {parameter.name: parameter.relative for parameter in found.parameters}
    assert errors["14.weight"] == errors["0.weight"] == 0.0 and errors["0.bias"] == errors["1.weight"] == 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": -1}, "elements per sample, as 27946, or bytes, as '2MiB'; found -1"),
        ({"budget": 1.5}, "found 1.5"),
        ({"budget": True}, "found True"),
        ({"budget": "much"}, "expected bytes such as '512KiB', '2MiB' or '12GB', found 'much'"),
        ({"ranking": 3}, "trady: ranking must be a Ranking"),
        ({"ranking": "nowhere.json"}, "no ranking 'nowhere.json': it is no file"),
        ({"coverage": 0}, "coverage must be a number above 0 and at most 1, found 0"),
        ({"seed": -1}, "seed must be a number from 0 on, found -1"),
        ({"mode": "best"}, "trady: mode must be one of uniform, weighted, static, full_random, deterministic; found"),
        ({"rest": "quant"}, "trady: rest must be a codec such as"),
        ({"train": (3,)}, "trady: train must name layers"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(sg.SpecError, match=message):
        sg.trady(**{"budget": 100, **settings})


BROKEN = {
    "comet": "expected a state with epoch, due, choice, norms; found {'bounds': {}}",
    "none": "expected a state with epoch, due, choice, norms; found null",
    "wider": "more or fewer channels than 16 in '7'",
    "norms": "more or fewer channels than 16 in '7'",
}


def test_a_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(sg.RuleError, match="train='classifier' is no module of the model"):
        sg.apply(network(), sg.trady(100, train=("classifier",)))
    with pytest.raises(sg.SpecError, match="so it needs a ranking"):
        sg.apply(network(), sg.trady(100, mode="deterministic"))
    assert all(p.requires_grad for p in network().parameters())


@pytest.mark.parametrize(("broken", "message"), BROKEN.items(), ids=BROKEN.keys())
def test_a_state_of_something_else_is_refused_and_changes_nothing(broken: str, message: str) -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady(BUDGET, mode="weighted"), optimizer=optimizer)
    train(model, optimizer)
    before = copy.deepcopy(run.state_dict())
    with pytest.raises(sg.SpecError, match=message):
        run.load_state_dict(_broken(copy.deepcopy(before), broken))
    assert str(run.state_dict()) == str(before)
    train(model, optimizer)


def _broken(state: dict[str, Any], how: str) -> dict[str, Any]:
    state["step"] += 5
    if how == "comet":
        state["controller"] = {"bounds": {}}
    elif how == "none":
        state["controller"] = None
    elif how == "wider":
        state["controller"]["choice"]["channels"]["7"] = [99]
    elif how == "norms":
        state["controller"]["norms"]["7"] = [1.0, 2.0]
    return state


def test_seeds_and_budgets_may_be_of_any_size() -> None:
    """Torch's generator looks at no more than 32 bits."""
    seeds = (3, 259, 515, 2**31 + 3, 2**40, 2**63 - 1, 2**64 - 1)
    first = [draws.uniform({"a": 100}, draws.generator(seed, epoch)).tolist() for seed in seeds for epoch in range(3)]
    assert all(one != other for one, other in itertools.combinations(first, 2))
    assert first[2] == torch.randperm(100, generator=torch.Generator().manual_seed((3 << 24) + 2)).tolist()
    for budget in (2**62, 2**63, 10**30):
        model = network()
        run = sg.apply(model, sg.trady(budget, coverage=1.0))
        loss_of(model)
        assert controller(run).choice.count == 3 + 16 + 16 + 32


def test_ranks_need_batches_and_numbers(tmp_path) -> None:
    with pytest.raises(sg.UnsupportedModelError, match="no linear layer or convolution is left to rank"):
        sg.trady_rank(nn.Linear(4, 2), [torch.randn(2, 4)])
    with pytest.raises(sg.SpecError, match="'0' has an RGN that is no number from 0 on; were all gradients finite"):
        sg.trady_rank(network(), [(images(2) * math.inf, torch.arange(2))], F.cross_entropy, steps=1)
    ranking = sg.trady_rank(network(), [(images(8), torch.arange(8))], F.cross_entropy, steps=1)
    assert sg.trady(BUDGET, ranking.save(tmp_path / "ranking.json")).measured() == ranking
    with pytest.raises(sg.SpecError, match="'a' has 3 channels, and the RGN of 2 of them; expected all or none"):
        LayerRank(path="a", channels=3, rgn=1.0, by_channel=(0.5, 0.5))
    with pytest.raises(sg.BatchError, match="the loader has no batches"):
        sg.trady_rank(network(), iter(()), F.cross_entropy)
    with pytest.raises(sg.SpecError, match="steps must be a number from 1 on, found 0"):
        sg.trady_rank(network(), [], F.cross_entropy, steps=0)
    with pytest.raises(sg.BatchError, match="expected a loss of one number"):
        sg.trady_rank(network(), [images(2)], steps=1)


RECIPES = {
    "plain": lambda: sg.trady(27946),
    "bytes": lambda: sg.trady(
        "2MiB", mode="weighted", seed=3, coverage=0.9, rest=sg.Quant(bits=4), train=("head", "x")
    ),
}


@pytest.mark.parametrize("make", RECIPES.values(), ids=RECIPES.keys())
def test_recipes_print_as_typed_and_round_trip_through_json(make: Callable[[], sg.Trady]) -> None:
    recipe = make()
    assert eval(repr(recipe), vars(sg)) == recipe
    assert sg.Trady.from_json(recipe.to_json()) == recipe


def test_a_text_names_it() -> None:
    model = network()
    run = sg.apply(model, "trady(budget='64KiB', seed=5)", optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert controller(run).recipe == sg.trady("64KiB", seed=5)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("12GiB", 12 * 2**30), ("1.5 MiB", 3 * 2**19), ("500kB", 500_000), ("7B", 7), ("2gb", 2 * 10**9)],
)
def test_bytes_are_read_as_people_write_them(text: str, expected: int) -> None:
    assert bytes_of(text) == expected
