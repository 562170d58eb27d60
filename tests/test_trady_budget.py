"""TraDy's budget: whatever is given to a model, in whatever order, no forward keeps more than was asked for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import slimgrad as sg
from slimgrad.recipes.trady.costs import layers_of
from slimgrad.spec.budgets import bytes_of
from tests.test_trady import controller, loss_of, network


def drawn(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(seed))


class Two(nn.Module):
    """One sequence for each layer, as encoders and decoders have them."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.head(self.left(x * 1.5).mean(0) + self.right(y * 1.5).mean(0))


def spent(run: sg.Run, inputs: dict[str, int], head: int) -> int:
    """Bytes of channels, where a channel's input has so many elements; with SGD without momentum, and fp32."""
    layers, channels = controller(run).layers, controller(run).choice.channels
    return head + sum(4 * len(mine) * (inputs[path] + 2 * layers[path].weights) for path, mine in channels.items())


def test_no_forward_exceeds_it_whatever_grows() -> None:
    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady("6KiB", coverage=1.0), optimizer=optimizer)
    for x, y in ((40, 4), (4, 40), (30, 30), (50, 9), (9, 50), (4, 60), (50, 40)):
        model(drawn(x), drawn(y, 1)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        used = spent(run, {"left": x, "right": y}, head=4 * (32 + 33 * 4))
        assert 0 < used <= controller(run).choice.bytes <= 6 * 1024, (x, y)
    draws = len(controller(run).path)
    for x, y in ((40, 4), (50, 40), (9, 50), (1, 1)):
        model(drawn(x), drawn(y, 1)).sum().backward()
        optimizer.step()
    assert len(controller(run).path) == draws


def test_what_is_kept_in_full_precision_after_autocast_is_drawn_for_anew() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady("24KiB", coverage=1.0), optimizer=optimizer)
    counts = []
    for enabled in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(drawn(64)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counts.append(controller(run).choice.count)
    assert counts[0] > counts[1] == counts[2] > 0
    assert spent(run, {"0": 64, "2": 64}, head=4 * (64 * 32 + 33 * 4)) <= 24 * 1024


def test_a_larger_batch_in_the_middle_of_accumulation_lets_some_channels_go() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)).double()
    dense = [layer.weight.detach().clone().requires_grad_() for layer in (model[0], model[2])]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = sg.apply(model, sg.trady("20KiB", coverage=1.0), optimizer=optimizer)
    choices = []
    for count in (4, 4, 16):
        model(drawn(count, count).double()).square().sum().backward()
        choices.append(controller(run).choice)
        x = F.linear(drawn(count, count).double(), dense[0], model[0].bias).relu()
        model[4](F.linear(x, dense[1], model[2].bias).relu()).square().sum().backward()
    first, second, last = choices
    assert first is second and 0 < last.count < first.count and last.bytes <= 20 * 1024
    assert all(set(mine) <= set(first.channels[path]) for path, mine in last.channels.items())
    for path, weight in zip(("0", "2"), dense, strict=True):
        if path in last.channels:
            mine = controller(run)._weights[path]
            assert torch.allclose(mine.parameter.grad, mine.parts.take(weight.grad))
        else:
            assert layers_of(model)[path].weight.grad is None
    optimizer.step()
    optimizer.zero_grad()
    model(drawn(4).double()).square().sum().backward()
    assert len(controller(run).path) == 3 and controller(run).choice.count > 0


def test_a_batch_that_is_too_large_is_refused_and_a_smaller_one_goes_on() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = sg.apply(model, sg.trady("16KiB"), optimizer=optimizer)
    with pytest.raises(sg.SpecError, match="use a smaller batch"):
        loss_of(model, batch=200)
    loss_of(model, batch=4).backward()
    optimizer.step()
    choice, states = controller(run).choice, len(optimizer.state)
    with pytest.raises(sg.SpecError, match="use a smaller batch"):
        loss_of(model, batch=200)
    loss_of(model, batch=4).backward()
    optimizer.step()
    assert controller(run).choice is choice and choice.count and len(optimizer.state) == states


PADDED: dict[str, Callable[[], nn.Module]] = {
    "conv1d": lambda: nn.Conv1d(4, 4, 5, padding=3, padding_mode="circular"),
    "conv2d": lambda: nn.Conv2d(4, 4, (3, 5), padding=(1, 4), padding_mode="reflect"),
    "conv3d": lambda: nn.Conv3d(4, 4, 3, padding="same", padding_mode="replicate"),
}


@pytest.mark.parametrize("name", PADDED)
def test_padding_that_is_kept_is_counted(name: str) -> None:
    conv = PADDED[name]()
    x = torch.randn(2, 4, *[8] * len(conv.kernel_size))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved.numel()), lambda saved: saved):
        outputs = conv(x).shape[1:].numel()
    model = nn.Sequential(nn.Sigmoid(), conv, nn.Flatten(), nn.Linear(outputs, 2))
    run = sg.apply(model, sg.trady("10GiB"), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    model(x).sum().backward()
    costs = controller(run)._costs
    assert costs.sizes["1"].bytes == 4 * max(kept) > x.nbytes
    assert costs.inputs(layers_of(model)["1"]) == max(kept) // 2 // 4


def test_all_that_is_trained_whole_is_counted_once() -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 32))
    model = nn.Sequential(nn.Linear(16, 32), nn.Sigmoid(), block, nn.Sigmoid(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = 8 * 4 * (32 + 64 + 64 + 32)  # of the block's three layers with weights, and of the head
    weights = 4 * (33 * 64 + 2 * 64 + 65 * 32 + 33 * 4)
    for train in (("head", "2"), ("head", "2.*"), ("head", "2", "2.0")):
        run = sg.apply(model, sg.trady("64KiB", train=train), optimizer=optimizer)
        model(drawn(8)).sum().backward()
        assert controller(run)._costs.whole(controller(run).always) == inputs + weights
        run.remove()


def test_states_are_counted_by_the_groups_they_are_in() -> None:
    model = network()
    groups = [{"params": model[:4].parameters(), "momentum": 0.9}, {"params": model[4:].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    run = sg.apply(model, sg.trady("64KiB", coverage=1.0), optimizer=optimizer)
    for seed in range(2):
        loss_of(model, seed).backward()
        optimizer.step()
    costs, layers = controller(run)._costs, controller(run).layers
    inputs = {path: costs.sizes[path].bytes // layers[path].kernels.channels for path in layers}
    for path, numbers in (("0", 3), ("3", 3), ("7", 2), ("10", 2)):  # parameter, gradient, momentum
        assert costs.bytes(layers[path]) == inputs[path] + numbers * 4 * layers[path].weights
    for path, mine in controller(run)._weights.items():
        momentum = optimizer.state[mine.parameter].get("momentum_buffer")
        assert (momentum is not None) == (path in ("0", "3"))


def test_layers_that_are_not_called_in_every_forward_may_be_drawn() -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

        def forward(self, x: Tensor, deep: bool) -> Tensor:
            x = self.first(input=x)
            return self.head(input=self.second(input=x) if deep else x)

    model = Sometimes()
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = sg.apply(model, sg.trady("16KiB", coverage=1.0), optimizer=optimizer)
    for count, deep in ((8, True), (16, False), (32, True), (32, False), (0, True)):
        model(drawn(count), deep).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert controller(run).choice.bytes <= bytes_of("16KiB")
    assert set(controller(run).choice.channels) == {"first", "second"}


def test_an_empty_batch_may_come_first() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4))
    run = sg.apply(model, sg.trady(1000), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for count in (0, 8):
        model(drawn(count)).sum().backward()
    assert controller(run).choice.elements <= 1000


def test_a_layer_that_is_called_twice_ranks_by_all_that_it_reads() -> None:
    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(input=self.body(x)))

    model = Again()
    batch = (drawn(8), torch.arange(8) % 4)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    expected = model.body.weight.grad.norm(dim=0) / (16 + 2)
    for at_once in (None, 1):
        (rank,) = sg.trady_rank(model, [batch], F.cross_entropy, steps=1, layers_at_once=at_once).layers
        assert torch.allclose(torch.tensor(rank.by_channel), expected, rtol=1e-3)
