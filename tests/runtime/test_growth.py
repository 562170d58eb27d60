"""A small first forward: what is worth packing is decided by the largest that was seen."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import slimgrad as sg


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64),
        nn.LayerNorm(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 8),
    )


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def packed(report: sg.Report) -> set[tuple[tuple[str, int, int], str]]:
    """Which sites, by what."""
    return {(site.site.key, site.codec.partition("(")[0]) for site in report.sites}


LARGE = torch.randn(512, 32, generator=torch.Generator().manual_seed(1))
SMALL = LARGE[:2]


@pytest.mark.parametrize(
    "what",
    [
        "lossless()",
        "quant(bits=4)",
        "dropit(keep=0.1, skip=())",
        "derive(); quant(bits=4)",
        "fewbit(bits=2)",
        "comet()",
    ],
)
def test_what_was_too_small_at_first_is_packed_when_it_is_larger(what: str) -> None:
    grows, large = net(), net()
    after = sg.apply(grows, what)
    for x in (SMALL, SMALL, SMALL, LARGE, LARGE, LARGE):
        gradients(grows, x)
    expected = sg.apply(large, what)
    for _ in range(3):
        gradients(large, LARGE)
    found, wanted = after.report(), expected.report()
    assert found.kept_before == wanted.kept_before
    assert packed(found) == packed(wanted)
    assert found.kept_after < 1.5 * wanted.kept_after  # comet's bounds are others


def test_gradients_are_the_same_bits_through_all_sizes() -> None:
    model = net()
    plain = copy.deepcopy(model)
    run = sg.apply(model, sg.Lossless())
    for x in (SMALL, LARGE, LARGE, SMALL, LARGE[:100], LARGE):
        assert all(torch.equal(*pair) for pair in zip(gradients(model, x), gradients(plain, x), strict=True))
    assert "1 stays: 1:NativeLayerNormBackward0.input (VALUES) keeps it" in str(run.report()), "and not its size"


def test_larger_tensors_that_change_nothing_are_watched_once() -> None:
    model = net()
    run = sg.apply(model, sg.Quant(bits=4))
    for rows in (200, 300, 400, 300, 200):
        gradients(model, LARGE[:rows])
    assert len(run._gate.audits) == 3
    assert list(run._gate.lessons.values()) == [1]


class Switching(nn.Module):
    """Takes another way for large inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.sin()) if len(x) < 10 else self.layer(x).sigmoid().exp()


@pytest.mark.filterwarnings("ignore:a forward took another path")
def test_another_path_is_not_taken_for_the_same_one_in_large() -> None:
    model = Switching()
    plain = copy.deepcopy(model)
    sg.apply(model, sg.Lossless())
    for x in (SMALL, LARGE, SMALL, LARGE):
        assert all(torch.equal(*pair) for pair in zip(gradients(model, x), gradients(plain, x), strict=True))


def test_what_is_learnt_ahead_from_a_small_batch_grows_too() -> None:
    model = net()
    run = sg.apply(model, sg.Quant(bits=4), batch=SMALL)
    for x in (LARGE, LARGE):
        gradients(model, x)
    assert run.report().kept_after < run.report().kept_before / 3
