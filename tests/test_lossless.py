"""Lossless means `torch.equal` on every gradient, over the zoo, from the first step on."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimgrad as sg
from tests.models import hook_count
from tests.zoo import ZOO, Entry, assert_same_gradients, call, fresh, gradients

DTYPES = pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
SMALL = 4096
"""The zoo is tiny: by the default on a GPU hardly anything of it would be packed."""

PACKED = {"resnet", "resnet-inplace", "vgg", "mobilenet", "unet", "frozen", "medley", "hf-resnet"}
"""Entries in which something is packed on every device and in every dtype."""

ENTRIES = pytest.mark.parametrize("entry", ZOO, ids=str)


@DTYPES
@ENTRIES
def test_every_gradient_of_the_zoo_is_bit_equal_under_lossless(
    entry: Entry, autocast: torch.dtype | None, device: torch.device
) -> None:
    plain = fresh(entry, device)
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, sg.Lossless(), min_bytes=SMALL)
    for seed in range(3):  # watched, counted, worked
        expected = gradients(entry, plain, device, autocast=autocast, seed=seed)
        assert_same_gradients(expected, gradients(entry, treated, device, autocast=autocast, seed=seed))
    report = run.report()
    assert report.kept_after <= report.kept_before
    assert report.kept_after == report.promised, report
    assert report.sites or entry.name not in PACKED  # otherwise equal gradients would prove nothing


@ENTRIES
def test_removing_leaves_no_trace_on_the_zoo(entry: Entry) -> None:
    model = fresh(entry, "cpu")
    before = _appearance(model)
    run = sg.apply(model, sg.Lossless())
    gradients(entry, model, "cpu")
    run.remove()
    after = _appearance(model)
    assert hook_count(model) == 0 and before[0] == after[0]
    assert before[1].keys() == after[1].keys()
    expected = gradients(entry, fresh(entry, "cpu"), "cpu")
    fresh_state = fresh(entry, "cpu").state_dict()
    model.load_state_dict(fresh_state)
    assert_same_gradients(expected, gradients(entry, model, "cpu"))


def _appearance(model: nn.Module) -> tuple[list[tuple[str, type, list[str]]], dict[str, torch.Tensor]]:
    """What a user can see of the modules: names, classes, attributes, state."""
    seen = [(path, type(module), sorted(vars(module))) for path, module in model.named_modules()]
    return seen, model.state_dict()


@DTYPES
@ENTRIES
def test_a_batch_given_to_apply_teaches_the_sites_before_the_first_step(
    entry: Entry, autocast: torch.dtype | None
) -> None:
    plain = fresh(entry, "cpu")
    treated = copy.deepcopy(plain)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast is not None):
        run = sg.apply(treated, sg.Lossless(), batch=entry.batch("cpu"))
    assert run._gate.structures
    expected = gradients(entry, plain, "cpu", autocast=autocast)
    assert_same_gradients(expected, gradients(entry, treated, "cpu", autocast=autocast))
    assert run.report().kept_after == run.report().promised


def test_the_ratio_of_a_body_that_is_frozen_over_a_trained_stem_is_at_least_five() -> None:
    """Gradients flow through the frozen body to the stem, as in prompt or adapter tuning, and the head is trained."""
    torch.manual_seed(0)
    body = nn.Sequential(
        *[m for _ in range(4) for m in (nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())]
    )
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    )
    body.requires_grad_(False)
    body.eval()
    run = sg.apply(model, sg.Lossless())
    model(torch.randn(4, 3, 32, 32)).sum().backward()
    assert run.report().ratio >= 5


@pytest.mark.parametrize("name", ["hf-resnet", "hf-vit"])
def test_training_only_the_head_keeps_at_least_five_times_less_than_training_all(name: str) -> None:
    entry = next(entry for entry in ZOO if entry.name == name)
    full = sg.profile(fresh(entry, "cpu"), entry.batch("cpu")).kept_bytes
    model = fresh(entry, "cpu")
    model.requires_grad_(False)
    model.classifier.requires_grad_(True)
    run = sg.apply(model, sg.Lossless())
    entry.loss(call(model, entry.batch("cpu"))).backward()
    assert run.report().kept_after * 5 <= full


class Weighted(nn.Module):
    """A product or a convolution with what becomes of a parameter on its way there."""

    def __init__(self, kind: str, *size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.become = BECOMES[kind]
        self.weight, self.scale = nn.Parameter(torch.randn(size)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.become(self.weight)
        x = (x * self.scale).to(weight.dtype)
        return F.conv2d(x, weight) if weight.dim() == 4 else x @ weight


BECOMES: dict[str, Callable[[Tensor], Tensor]] = {
    "copied": lambda weight: weight.bfloat16(),
    "copied in another order": lambda weight: weight.to(torch.bfloat16, memory_format=torch.channels_last),
    "put in another order": lambda weight: weight.to(memory_format=torch.channels_last),
    "rounded and widened": lambda weight: weight.bfloat16().float(),
    "rounded twice": lambda weight: weight.to(torch.float8_e4m3fn).bfloat16(),
    "turned and copied in the new order": lambda weight: weight.t().to(torch.bfloat16, memory_format=CONTIGUOUS),
    "repeated and copied": lambda weight: weight.expand(4, 16, 16).bfloat16(),
}
CONTIGUOUS = torch.contiguous_format


@pytest.mark.parametrize("kind", BECOMES)
def test_what_becomes_of_a_parameter_is_made_again_of_it_only_if_it_has_the_same_bits(kind: str) -> None:
    matrix = "order" not in kind or "turned" in kind
    plain = Weighted(kind, 16, 16) if matrix else Weighted(kind, 8, 3, 5, 5)
    treated, x = copy.deepcopy(plain), torch.randn(4, 16, 16) if matrix else torch.randn(4, 3, 16, 16)
    sg.apply(treated, sg.Lossless(), min_bytes=0)
    for _ in range(3):
        for model in (plain, treated):
            model.zero_grad()
            model(x).float().square().mean().backward()
        for one, two in zip(plain.parameters(), treated.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
