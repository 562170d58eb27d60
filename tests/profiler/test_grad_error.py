"""grad_error: gradients with and without what is applied, and nothing left behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import slimgrad as sg


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()
    )


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


BATCH = torch.randn(4, 3, 12, 12, generator=torch.Generator().manual_seed(1))


def test_only_what_a_codec_touches_is_off() -> None:
    found = sg.grad_error(model(), BATCH, sg.Bounded(bound=0.05), loss_fn, min_bytes=0)
    by_name = {parameter.name: parameter for parameter in found.parameters}
    assert 0 < by_name["4.weight"].relative < 0.1
    assert 0.99 < by_name["4.weight"].cosine < 1
    assert by_name["4.bias"].error == by_name["4.bias"].relative == 0
    assert found.worst.relative >= found.relative > 0
    text = str(found)
    assert text.startswith("Bounded(bound=0.05") and ": gradients are off by " in text
    assert "4.weight" in text and "4.bias" not in text


def test_lossless_is_exact_under_dropout_too() -> None:
    found = sg.grad_error(model(), BATCH, "lossless()", loss_fn, min_bytes=0)
    assert found.relative == 0
    assert str(found) == "lossless(): gradients are off by 0.00% in all; 6 of 6 are exact"


def test_recipes_with_a_controller_are_looked_at_from_their_start() -> None:
    assert sg.grad_error(model(), BATCH, sg.comet(), loss_fn, min_bytes=0).relative < 0.02


def test_buffers_gradients_and_random_state_are_left_as_they_were() -> None:
    it = model()
    it(BATCH).sum().backward()
    before = {name: tensor.clone() for name, tensor in it.state_dict().items()}
    gradients = [p.grad.clone() for p in it.parameters()]
    state = torch.random.get_rng_state()
    sg.grad_error(it, BATCH, sg.Quant(bits=4), loss_fn, min_bytes=0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in it.state_dict().items())
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(it.parameters(), gradients, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in it.modules())


class Counting(nn.Module):
    """Has another tensor for a buffer after each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + 1
        self.last = x.detach()
        return self.layer(x.sin())


def test_buffers_that_forward_replaces_are_the_same_tensors_again() -> None:
    it = Counting()
    seen = it.seen
    sg.grad_error(it, BATCH, sg.Quant(bits=4), loss_fn, min_bytes=0)
    sg.profile(it, BATCH, loss_fn=loss_fn)
    assert it.seen is seen and it.seen == 0 and it.last is None


def test_it_round_trips_through_json_and_can_be_drawn(tmp_path: Path) -> None:
    found = sg.grad_error(model(), BATCH, sg.Quant(bits=4), loss_fn, min_bytes=0)
    assert sg.GradError.from_json(found.to_json()) == found
    assert found.plot(tmp_path / "errors.png").stat().st_size > 1000


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(sg.BatchError, match=r"a loss of one number .*, found shape \(4, 512\); give a loss_fn"):
        sg.grad_error(model(), BATCH, sg.Quant(bits=4))
    with pytest.raises(sg.UnsupportedModelError, match="no parameter of the model requires a gradient"):
        sg.grad_error(model().requires_grad_(False), BATCH, sg.Quant(bits=4), loss_fn)
