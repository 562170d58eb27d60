"""Modules that are a nonlinearity, computed by an op that packs what it is given: gradients are those of the bits."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slimgrad as sg
from slimgrad import kernels
from slimgrad.kernels import Groups
from tests.models import Twice
from tests.zoo import ZOO, Entry, fresh, gradients, relative_error

HAVING_ONE = ("medley", "detector", "hf-vit", "hf-swin", "hf-bert", "hf-gpt2", "hf-llama")
"""Of the zoo: a GELU or SiLU that is a module."""
FOUR = "derive(); quant(bits=4, fused=True); lossless()"


class Feed(nn.Module):
    """A feed-forward block as transformers have it."""

    def __init__(self, act: nn.Module, width: int = 96) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(32, width), act, nn.Linear(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Gated(nn.Module):
    """As in a Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(32, 96), nn.Linear(32, 96), nn.Linear(96, 32)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


def batch(device: torch.device, rows: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(seed)).to(device)


def stepped(model: nn.Module, x: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    output = model(x)
    output.backward(torch.linspace(-1, 1, output.numel(), device=x.device).view_as(output))
    return output.detach(), [parameter.grad.clone() for parameter in model.parameters()]


def seen_through_groups(model: Feed, x: Tensor, bits: int) -> list[Tensor]:
    """The gradients of a block whose activation was given what groups of so many bits give back, in float64."""
    inner = model.up(x).detach()
    how = Groups(bits, 128)
    again = kernels.unpack_groups(kernels.pack_groups(inner, how), inner.shape, inner.stride(), how, inner.dtype)
    given = again.double().requires_grad_()
    value = copy.deepcopy(model.act).double()(given)
    output = model(x)
    dy = torch.linspace(-1, 1, output.numel(), device=x.device).view_as(output).double()
    below = dy @ model.down.weight.double()
    (slope,) = torch.autograd.grad(value, given, below)
    return [slope.t() @ x.double(), slope.sum(0), dy.t() @ value.detach(), dy.sum(0)]


ACTIVATIONS = {"gelu": nn.GELU(), "tanh": nn.GELU(approximate="tanh"), "silu": nn.SiLU()}


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_are_those_of_what_the_bits_say(name: str, bits: int, device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Feed(copy.deepcopy(ACTIVATIONS[name])).to(device), batch(device)
    own, _ = stepped(model, x)
    expected = seen_through_groups(model, x, bits)
    run = sg.apply(model, f"derive(); quant(bits={bits}, fused=True); lossless()", min_bytes=64)
    for _ in range(3):  # its own forward, counted, worked
        output, found = stepped(model, x)
        torch.testing.assert_close(output, own, rtol=1e-5, atol=1e-5)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    report = run.report()
    groups = math.ceil(64 * 96 / 1024) * 1024 * (bits / 8 + 4 / 128)
    assert report.kept_after == report.promised == groups  # nothing of what the activation made
    assert report.kept_before == 2 * 64 * 96 * 4
    run.remove()
    assert torch.equal(stepped(model, x)[0], own)


def test_what_a_gated_unit_makes_is_derived_of_two_packed_tensors(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Gated().to(device), batch(device)
    _, exact = stepped(model, x)
    run = sg.apply(model, "derive(); quant(bits=8, fused=True); lossless()", min_bytes=64)
    for _ in range(3):
        _, found = stepped(model, x)
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()
    report = run.report()
    assert report.kept_after == report.promised == 2 * 6 * 1024 * (1 + 4 / 128)  # of four tensors two are packed
    assert {site.codec.partition("(")[0] for site in report.sites} == {"Quant", "Derive"}


def test_a_batch_given_ahead_has_the_op_in_the_first_step() -> None:
    torch.manual_seed(0)
    model, x = Feed(nn.GELU()), batch(torch.device("cpu"))
    run = sg.apply(model, FOUR, batch=x, min_bytes=64)
    stepped(model, x)
    assert run.report().kept_after == 6 * 1024 * (1 / 2 + 4 / 128) and not run.report().notes


@pytest.mark.parametrize("rule", ["quant(bits=4)", "derive(); quant(bits=4); lossless()"])
def test_without_being_asked_for_no_module_is_computed_by_it(rule: str) -> None:
    torch.manual_seed(0)
    model, x = Feed(nn.GELU()), batch(torch.device("cpu"))
    run = sg.apply(model, rule, min_bytes=64)
    stepped(model, x)
    stepped(model, x)
    assert "act forward.input" not in str(run.report()) and "forward" not in model.act.__dict__


def test_functions_without_a_kernel_are_packed_as_without_it() -> None:
    torch.manual_seed(0)
    model, x = Feed(nn.Mish()), batch(torch.device("cpu"))
    kept = []
    for rule in ("derive(); quant(bits=8, fused=True); lossless()", "derive(); quant(bits=8); lossless()"):
        run = sg.apply(model, rule, min_bytes=64)
        gradient = [stepped(model, x)[1] for _ in range(2)][-1]
        kept.append((run.report().kept_after, gradient))
        run.remove()
    assert kept[0][0] == kept[1][0]
    assert all(torch.equal(one, other) for one, other in zip(kept[0][1], kept[1][1], strict=True))


def test_in_place_and_under_a_loop_that_calls_it_twice(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Twice(32).to(device)
    plain = copy.deepcopy(model)
    run = sg.apply(model, "quant(bits=8, fused=True)", min_bytes=64)
    for seed in range(4):
        x = batch(device, seed=seed)
        (output, found), (expected, exact) = stepped(model, x), stepped(plain, x)
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
        assert (found[0] - exact[0]).norm() <= 0.05 * exact[0].norm()
    assert run.report().kept_after == run.report().promised


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_a_checkpoint_the_op_computes_the_same_again(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(32, 32), Feed(nn.GELU())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=reentrant)

    torch.manual_seed(0)
    model, x = Checkpointed(), batch(torch.device("cpu"))
    _, exact = stepped(model, x)
    sg.apply(model, FOUR, min_bytes=64)
    for _ in range(3):
        _, found = stepped(model, x)
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() <= 0.2 * other.norm()


def test_last_small_batches_strided_inputs_and_autocast(device: torch.device) -> None:
    torch.manual_seed(0)
    model = Feed(nn.GELU()).to(device)
    plain = copy.deepcopy(model)
    run = sg.apply(model, "derive(); quant(bits=8, fused=True); lossless()", min_bytes=64)
    with torch.autocast(device.type, torch.bfloat16):
        for rows in (64, 64, 7, 64, 1):
            x = batch(device, 2 * rows)[::2]
            (_, found), (_, exact) = stepped(model, x), stepped(plain, x)
            for one, other in zip(found, exact, strict=True):
                assert (one - other).norm() <= 0.05 * other.norm()
    assert "act forward.input" in str(run.report())


def test_gradients_add_up_over_steps_and_evaluation_is_its_own_forward(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Feed(nn.GELU()).to(device), batch(device)
    _, exact = stepped(model, x)
    run = sg.apply(model, "derive(); quant(bits=8, fused=True); lossless()", min_bytes=64)
    model.zero_grad()
    for _ in range(4):
        output = model(x)
        output.backward(torch.linspace(-1, 1, output.numel(), device=device).view_as(output))
    for parameter, other in zip(model.parameters(), exact, strict=True):
        assert (parameter.grad / 4 - other).norm() <= 0.02 * other.norm()
    with torch.no_grad():
        assert torch.equal(model.eval()(x), copy.deepcopy(model)(x))
    run.remove()


def test_a_compiler_takes_the_modules_own_forward() -> None:
    torch.manual_seed(0)
    model, x = Feed(nn.GELU()), batch(torch.device("cpu"))
    sg.apply(model, FOUR, batch=x, min_bytes=64)
    compiled = torch.compile(model.act, backend="eager", fullgraph=True)
    inner = model.up(x).detach().requires_grad_()
    assert torch.equal(compiled(inner), nn.GELU()(inner))


def test_a_second_order_gradient_is_refused() -> None:
    torch.manual_seed(0)
    model, x = Feed(nn.GELU()), batch(torch.device("cpu"))
    sg.apply(model, "quant(bits=4, fused=True)", min_bytes=64)
    model(x)
    with pytest.raises(sg.DoubleBackwardError):
        torch.autograd.grad(model(x).sum(), list(model.parameters()), create_graph=True)


def test_nan_stays_nan(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Feed(nn.GELU()).to(device), batch(device)
    sg.apply(model, FOUR, min_bytes=64)
    x[3, 3] = math.nan
    for _ in range(3):
        output, found = stepped(model, x)
    assert output[3].isnan().all() and not output[:3].isnan().any()
    assert all(gradient.isnan().any() for gradient in found[:3])


def test_the_setting_is_checked() -> None:
    with pytest.raises(sg.SpecError, match="fused"):
        sg.Quant(bits=4, fused="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize("entry", [entry for entry in ZOO if entry.name in HAVING_ONE], ids=str)
def test_models_learn_as_they_do_where_hooks_pack_the_same(entry: Entry, device: torch.device) -> None:
    """Their gradients are off from the exact ones as much, and no more than what was promised is kept."""
    errors = []
    exact = gradients(entry, fresh(entry, device), device)
    for rules in ("derive(); quant(bits=8, fused=True); lossless()", "derive(); quant(bits=8); lossless()"):
        model = fresh(entry, device)
        run = sg.apply(model, rules, min_bytes=64)
        for _ in range(2):
            found = gradients(entry, model, device)
        errors.append(relative_error(exact, found))
        report = run.report()
        assert any(site.site.node == "forward" for site in report.sites) is ("fused" in rules)
        assert report.kept_after <= report.promised * 1.02
    assert errors[0] <= 1.2 * errors[1] + 1e-3


@pytest.mark.parametrize("codec", ["fewbit(bits=3)", "quant(bits=4, fused=True)"])
def test_the_first_rule_that_fits_wins_over_an_op_too(codec: str) -> None:
    """What a norm made is derived for the activation behind it, where the rules say so before they name an op."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 96), nn.LayerNorm(96), nn.SiLU(), nn.Linear(96, 32)), torch.randn(64, 32)
    for rules, is_fused in ((f"derive(); {codec}; lossless()", False), (f"{codec}; derive(); lossless()", True)):
        run = sg.apply(model, rules, min_bytes=64)
        for _ in range(3):
            stepped(model, x)
        nodes = {site.site.path: site.site.node for site in run.report().sites}
        assert nodes["2"] == ("forward" if is_fused else "SiluBackward0")
        assert not run.report().notes
        run.remove()
