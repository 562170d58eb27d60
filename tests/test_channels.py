"""Channels: forward and dX exact, dW computed for the channels that are kept, and zero for all others."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import slimgrad as sg
from slimgrad.kernels.channels import Kernels, norms, spread
from slimgrad.ops.channel_operand import ChannelOperand
from tests.models import PRODUCTS, Behind, one_backward

MORE = {
    "conv2d, depthwise, two filters": (lambda: nn.Conv2d(6, 12, 3, groups=6, padding=1), (4, 6, 12, 12)),
    "conv2d, channels_last": (
        lambda: nn.Conv2d(6, 8, 3, padding=1).to(memory_format=torch.channels_last),
        (4, 6, 12, 12),
    ),
    "conv2d, groups, channels_last": (
        lambda: nn.Conv2d(6, 12, 3, groups=3).to(memory_format=torch.channels_last),
        (4, 6, 12, 12),
    ),
    "conv1d, depthwise": (lambda: nn.Conv1d(6, 6, 3, groups=6), (4, 6, 50)),
    "conv3d, groups": (lambda: nn.Conv3d(4, 8, 3, groups=2, padding=1), (2, 4, 6, 8, 8)),
    "conv_transpose2d, groups": (lambda: nn.ConvTranspose2d(6, 9, 3, stride=2, groups=3), (4, 6, 10, 10)),
    "conv2d of one image": (lambda: nn.Conv2d(6, 8, 3), (6, 12, 12)),
}
LAYERS = {**PRODUCTS, **MORE}


@pytest.fixture
def put_together(monkeypatch: pytest.MonkeyPatch) -> list[ChannelOperand]:
    """The operands whose tensor was needed after all."""
    seen: list[ChannelOperand] = []
    whole = ChannelOperand.whole
    monkeypatch.setattr(ChannelOperand, "whole", lambda operand: (seen.append(operand), whole(operand))[1])
    return seen


def channels_of(layer: nn.Module) -> int:
    return getattr(layer, "in_channels", getattr(layer, "in_features", layer.weight.shape[0]))


def kernels_of(layer: nn.Module) -> Kernels:
    first = getattr(layer, "transposed", type(layer).__name__ == "Conv1D")
    return Kernels(channels_of(layer), getattr(layer, "groups", 1), first)


@pytest.mark.parametrize("name", LAYERS)
def test_dw_is_that_of_the_channels_and_dx_sees_everything(
    name: str, put_together: list[ChannelOperand], device: torch.device
) -> None:
    build, shape = LAYERS[name]
    torch.manual_seed(0)
    plain = Behind(build().double()).to(device)
    treated = copy.deepcopy(plain)
    channels = channels_of(plain.layer)
    indices = tuple(range(1, channels, 2))
    run = sg.apply(treated, sg.Channels(indices=indices), min_bytes=0)
    x = torch.randn(shape, dtype=torch.float64).to(device)
    x = x.to(memory_format=torch.channels_last) if "channels_last" in name else x
    of, index = kernels_of(plain.layer), torch.tensor(indices, device=device)
    for _ in range(3):  # watched, counted, worked
        (y, dx, _), (treated_y, treated_dx, _) = one_backward(plain, x), one_backward(treated, x)
        assert torch.equal(y, treated_y), "forward"
        assert torch.equal(dx, treated_dx), "dX"
        dense, found = plain.layer.weight.grad, treated.layer.weight.grad
        parts, others = (
            of.parts(index),
            of.parts(torch.tensor(sorted(set(range(channels)) - set(indices)), device=device)),
        )
        assert torch.allclose(parts.take(found), parts.take(dense), rtol=1e-10, atol=1e-10)
        assert not others.take(found).any()
        assert found.stride() == dense.stride()
        if plain.layer.bias is not None:
            assert torch.equal(treated.layer.bias.grad, plain.layer.bias.grad)
    assert not put_together
    kept = [site for site in run.report().sites if "Channels" in site.codec]
    assert [site.after for site in kept] == [site.before * len(indices) // channels for site in kept] != []


@pytest.mark.parametrize("name", LAYERS)
def test_a_part_of_a_weight_that_is_put_back_is_the_weight(name: str) -> None:
    layer = LAYERS[name][0]()
    of = kernels_of(layer)
    parts = of.parts(torch.arange(of.channels))
    weight = layer.weight.detach()
    part = parts.take(weight)
    assert part.shape[parts.at] == of.channels and part.numel() == weight.numel()
    assert torch.equal(spread(parts, weight, part), weight)
    one = of.parts(torch.tensor([1]))
    alone = spread(one, weight, one.take(weight))
    assert alone.count_nonzero() == weight.numel() // of.channels
    assert torch.allclose(norms(parts, parts.take(alone))[1], alone.norm())


def test_flops_are_those_of_the_channels() -> None:
    model = Behind(nn.Conv2d(16, 32, 3, padding=1))
    x = torch.randn(2, 16, 8, 8)

    def flops() -> dict[object, int]:
        y = model(x)
        counter = FlopCounterMode(display=False)
        with counter:
            y.sum().backward()
        return counter.get_total_flops()

    dense = flops()
    sg.apply(model, sg.Channels(indices=(3, 5)), min_bytes=0)
    flops()
    assert flops() * 8 == dense


def test_no_channels_cost_nothing_and_give_zeros() -> None:
    model = Behind(nn.Linear(24, 8))
    run = sg.apply(model, sg.Channels(), min_bytes=0)
    for _ in range(2):
        one_backward(model, torch.randn(5, 24))
    assert not model.layer.weight.grad.any() and model.layer.weight.grad.shape == (8, 24)
    assert run.report().kept_after == 0


def test_under_autocast_gradients_are_those_of_low_precision() -> None:
    torch.manual_seed(0)
    plain = Behind(nn.Linear(24, 8))
    treated = copy.deepcopy(plain)
    sg.apply(treated, sg.Channels(indices=(2, 20)), min_bytes=0)
    x = torch.randn(64, 24)
    for _ in range(2):
        for model in (plain, treated):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                y = model(x)
            y.float().square().sum().backward()
        dense, found = plain.layer.weight.grad, treated.layer.weight.grad
        assert torch.allclose(found[:, [2, 20]], dense[:, [2, 20]], rtol=2**-6, atol=2**-6 * float(dense.abs().max()))
        assert found.count_nonzero() == 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"indices": (1, 1)}, r"channel numbers from 0 on, each once; found \(1, 1\)"),
        ({"indices": (-1,)}, "from 0 on"),
        ({"indices": 3}, "found 3"),
        ({"indices": (0.5,)}, "from 0 on"),
        ({"dim": -2}, "dim must be a dimension from 0 on, or -1 for the last; found -2"),
    ],
)
def test_what_names_no_channels_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(sg.SpecError, match=message):
        sg.Channels(**settings)


def test_a_channel_that_is_not_there_is_refused() -> None:
    with pytest.raises(sg.SpecError, match=r"channel 9 of a tensor with 4 channels, of shape \(2, 4, 3\)"):
        sg.Channels(indices=(0, 9)).pack(torch.zeros(2, 4, 3))


def test_many_indices_are_not_all_printed_but_all_written() -> None:
    codec = sg.Channels(indices=tuple(range(0, 100, 2)))
    assert repr(codec) == "Channels(<50 indices>)"
    assert sg.Channels.from_json(codec.to_json()) == codec
    assert sg.Channels(indices=(5, 2)).indices == (2, 5)


def test_kept_channels_stay_channels_last() -> None:
    x = torch.randn(2, 8, 5, 5).to(memory_format=torch.channels_last)
    packed = sg.Channels(indices=(1, 3, 4)).pack(x)
    assert packed.payload[0].is_contiguous(memory_format=torch.channels_last)
    assert packed.nbytes == 2 * 3 * 25 * 4


def test_what_a_product_is_handed_can_be_looked_at() -> None:
    codec, x = sg.Channels(indices=(0, 2)), torch.randn(6, 4)
    operand = ChannelOperand(codec, codec.pack(x))
    dense: Tensor = codec.unpack(operand.packed)
    assert torch.equal(operand + 0, dense) and torch.equal(operand.t() + 0, dense.t())
    assert operand.shape == (6, 2)
