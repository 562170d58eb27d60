"""Modules that are one nonlinearity, computed by a fused op while a run is active: same values, levels as gradients."""

from __future__ import annotations

import copy
import importlib
import io
import math
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slimgrad as sg
from slimgrad.tables.functions import FOREIGN, MODULES, function_of
from tests.models import Twice

TILE = 1024


def codes(elements: int, bits: int) -> int:
    return bits * 128 * math.ceil(elements / TILE)


class Block(nn.Module):
    """What goes into the activation is nobody else's, and neither is what comes out of it."""

    def __init__(self, act: nn.Module, width: int = 48) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(16, width), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.up(x)) * 1.0


def foreign(name: str) -> nn.Module:
    module, _, kind = name.rpartition(".")
    library = pytest.importorskip(module)
    if not hasattr(library, kind):
        pytest.skip(f"this version has no {name}")
    return getattr(importlib.import_module(module), kind)()


def stepped(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output, and the gradient of the first weight."""
    model.zero_grad()
    output = model(x)
    output.backward(torch.linspace(-1, 1, output.numel(), device=x.device).view_as(output))
    return output.detach(), next(model.parameters()).grad.clone()


def batch(device: torch.device, rows: int = 128, seed: int = 0) -> Tensor:
    return torch.randn(rows, 16, generator=torch.Generator().manual_seed(seed)).to(device)


def expected_gradient(act: nn.Module, bits: int, model: Block, x: Tensor, **settings: object) -> Tensor:
    """The gradient of the weight below, with levels in the place of slopes."""
    table = sg.fewbit_table(act, bits, **settings)
    inner = model.up(x).detach()
    dy = torch.linspace(-1, 1, inner.numel(), device=x.device).view_as(inner)
    levels = torch.tensor(table.levels, device=x.device)[table.codes(inner)]
    return (levels * dy).t() @ x


@pytest.mark.parametrize("name", [*(kind.__name__ for kind in MODULES), *FOREIGN])
def test_every_module_known_keeps_its_codes_alone(name: str, device: torch.device) -> None:
    kinds = {kind.__name__: kind for kind in MODULES}
    act = kinds[name]() if name in kinds else foreign(name)
    torch.manual_seed(0)
    model = Block(act).to(device)
    x = batch(device)
    before = sg.profile(model, x).kept_bytes
    own, _ = stepped(model, x)
    run = sg.apply(model, sg.FewBit(bits=3), min_bytes=64)
    for _ in range(3):  # its own forward, counted, worked
        output, gradient = stepped(model, x)
        assert torch.allclose(output, own, atol=1e-5)
    assert torch.allclose(gradient, expected_gradient(act, 3, model, x), rtol=1e-4, atol=1e-4)
    report = run.report()
    assert report.kept_before == before
    assert report.kept_after == report.promised == codes(128 * 48, 3)
    assert [site.site.path for site in report.sites] == ["act"]


def test_a_formula_that_keeps_six_tensors_comes_down_to_one(device: torch.device) -> None:
    pytest.importorskip("transformers")
    model = Block(foreign("transformers.activations.NewGELUActivation")).to(device)
    run = sg.apply(model, sg.FewBit(bits=3), min_bytes=64)
    for _ in range(2):
        stepped(model, batch(device))
    (site,) = run.report().sites
    assert site.before >= 4 * 128 * 48 * 4 and site.after == codes(128 * 48, 3)


def test_new_shapes_are_counted_as_they_are(device: torch.device) -> None:
    model = Block(nn.GELU()).to(device)
    run = sg.apply(model, sg.FewBit(bits=2), min_bytes=64)
    for rows in (64, 96, 32, 96):
        stepped(model, batch(device, rows))
    for rows in (64, 96, 32):
        stepped(model, batch(device, rows))
        report = run.report()
        assert (report.kept_before, report.kept_after) == (rows * 48 * 4, codes(rows * 48, 2)), rows


def test_a_batch_given_ahead_has_the_ops_in_the_first_step(device: torch.device) -> None:
    model = Block(nn.SiLU()).to(device)
    run = sg.apply(model, sg.FewBit(bits=3), batch=batch(device), min_bytes=64)
    _, gradient = stepped(model, batch(device))
    assert torch.allclose(gradient, expected_gradient(nn.SiLU(), 3, model, batch(device)), rtol=1e-4, atol=1e-4)
    assert run.report().kept_after == codes(128 * 48, 3) and run.report().kept_before == 128 * 48 * 4


def test_bits_may_differ_from_layer_to_layer() -> None:
    model = nn.Sequential(Block(nn.GELU(), 16), Block(nn.GELU(), 16), Block(nn.GELU(), 16))
    rules = [sg.Rule("1.*", sg.Keep()), *sg.fewbit(bits=2, layers={"0.*": 4})]
    run = sg.apply(model, rules, min_bytes=64)
    for _ in range(3):
        stepped(model, batch(torch.device("cpu")))
    found = {site.site.path: site.after for site in run.report().sites if "FewBit" in site.codec}
    assert found == {"0.act": codes(128 * 16, 4), "2.act": codes(128 * 16, 2)}


def test_with_quant_on_the_rest_both_are_counted() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
    run = sg.apply(model, "fewbit(bits=3); quant(bits=4)", min_bytes=64)
    for _ in range(3):
        stepped(model, batch(torch.device("cpu")))
    report = run.report()
    codecs = {site.site.path: site.codec.split("(")[0] for site in report.sites}
    assert codecs == {"1": "FewBit", "2": "Quant"} and report.kept_after == report.promised


def test_a_result_that_the_next_product_keeps_anyway_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    run = sg.apply(model, sg.FewBit(bits=3), min_bytes=64)
    for _ in range(3):
        stepped(model, batch(torch.device("cpu")))
    report = run.report()
    assert report.kept_after == report.kept_before and not report.sites


def test_an_input_that_two_modules_share_is_counted_once() -> None:
    class Both(Block):
        def __init__(self) -> None:
            super().__init__(nn.GELU())
            self.other = nn.SiLU()

        def forward(self, x: Tensor) -> Tensor:
            inner = self.up(x)
            return self.act(inner) + self.other(inner)

    model, x = Both(), batch(torch.device("cpu"))
    before = sg.profile(model, x).kept_bytes
    run = sg.apply(model, sg.FewBit(bits=3), min_bytes=64)
    for _ in range(3):
        stepped(model, x)
    report = run.report()
    assert report.kept_before == before == 128 * 48 * 4
    assert report.kept_after == report.promised < before


def test_less_than_the_least_is_left_alone() -> None:
    model = Block(nn.GELU())
    run = sg.apply(model, sg.FewBit(bits=3), min_bytes=10**6)
    plain = copy.deepcopy(model)
    for _ in range(3):
        assert torch.equal(stepped(model, batch(torch.device("cpu")))[1], stepped(plain, batch(torch.device("cpu")))[1])
    assert not run.report().sites


def test_a_table_for_the_data_is_made_from_the_first_forward() -> None:
    torch.manual_seed(0)
    model, x = Block(nn.GELU()), 0.2 * batch(torch.device("cpu"), 512)
    run = sg.apply(model, sg.FewBit(bits=2, weight="data"), min_bytes=64)
    stepped(model, x)
    _, found = stepped(model, x)
    run.remove()
    counts, edges = torch.histc(model.up(x), 512, -10, 10), torch.linspace(-10, 10, 513)
    expected = expected_gradient(nn.GELU(), 2, model, x, weight=(edges, counts))
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-3)
    inner = model.up(x).detach().double()
    slope = function_of(nn.GELU(), {}).slope(inner)
    data, general = (sg.fewbit_table("gelu", 2, weight=weight) for weight in ((edges, counts), "uniform"))
    assert (data.slope(inner) - slope).norm() < 0.5 * (general.slope(inner) - slope).norm()


def test_a_module_called_twice_and_one_in_place() -> None:
    torch.manual_seed(0)
    model = Twice(16)
    plain = copy.deepcopy(model)
    run = sg.apply(model, sg.FewBit(bits=6), min_bytes=64)
    for seed in range(4):
        x = batch(torch.device("cpu"), seed=seed)
        (output, gradient), (expected, exact) = stepped(model, x), stepped(plain, x)
        assert torch.allclose(output, expected, atol=1e-5)
        assert (gradient - exact).norm() <= 0.05 * exact.norm()
    assert len(run.report().sites) == 2 and run.report().kept_after == run.report().promised


def test_a_parameter_that_changes_is_honoured() -> None:
    model, x = Block(nn.ELU(alpha=1.0)), batch(torch.device("cpu"))
    sg.apply(model, sg.FewBit(bits=4), min_bytes=64)
    for alpha in (1.0, 1.0, 0.5, 2.0):
        model.act.alpha = alpha
        _, gradient = stepped(model, x)
    assert torch.allclose(gradient, expected_gradient(nn.ELU(alpha=2.0), 4, model, x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_compute_the_same_again(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.block = nn.Linear(16, 16), Block(nn.GELU(), 16)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.block, self.first(x), use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Checkpointed()
    plain = copy.deepcopy(model)
    sg.apply(model, sg.FewBit(bits=6), min_bytes=64)
    for seed in range(3):
        x = batch(torch.device("cpu"), seed=seed)
        gradient, exact = stepped(model, x)[1], stepped(plain, x)[1]
        assert (gradient - exact).norm() <= 0.05 * exact.norm()


def test_evaluation_runs_the_modules_own_forward() -> None:
    model, x = Block(nn.GELU()), batch(torch.device("cpu"))
    sg.apply(model, sg.FewBit(bits=1), min_bytes=64)
    for _ in range(2):
        stepped(model, x)
    with torch.no_grad():
        assert torch.equal(model(x), nn.functional.gelu(model.up(x)))


def test_copies_and_pickles_are_untouched_and_removal_leaves_no_trace() -> None:
    model, x = Block(nn.GELU()), batch(torch.device("cpu"))
    plain = copy.deepcopy(model)
    state = dict(model.act.__dict__)
    run = sg.apply(model, sg.FewBit(bits=1), min_bytes=64)
    for _ in range(2):
        stepped(model, x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    exact = stepped(plain, x)[1]
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(stepped(other, x)[1], exact)
        again = sg.apply(other, sg.Keep())
        assert "forward" not in other.act.__dict__
        again.remove()
    assert not torch.equal(stepped(model, x)[1], exact)
    run.remove()
    assert torch.equal(stepped(model, x)[1], exact)
    assert model.act.__dict__.keys() == state.keys()


def test_a_module_put_in_later_is_treated_and_one_taken_out_is_let_go() -> None:
    model, x = Block(nn.GELU()), batch(torch.device("cpu"))
    run = sg.apply(model, sg.FewBit(bits=3), min_bytes=64)
    for _ in range(2):
        stepped(model, x)
    old, model.act = model.act, nn.SiLU()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", sg.SlimgradWarning)  # another path than the one learnt
        for _ in range(5):
            _, gradient = stepped(model, x)
    assert torch.allclose(gradient, expected_gradient(nn.SiLU(), 3, model, x), rtol=1e-4, atol=1e-4)
    run.remove()
    assert "forward" not in model.act.__dict__ and "forward" not in old.__dict__


def test_a_compiler_takes_a_treated_block_whole() -> None:
    torch.manual_seed(0)
    model, x = Block(nn.GELU()), batch(torch.device("cpu"))
    run = sg.apply(model, sg.FewBit(bits=3), min_bytes=64)
    for _ in range(3):
        _, expected = stepped(model, x)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    model.zero_grad()
    output = compiled(x)
    output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
    assert torch.allclose(model.up.weight.grad, expected, rtol=1e-4, atol=1e-5)
    assert run.active


def test_names_of_other_libraries_are_functions_too() -> None:
    pytest.importorskip("transformers")
    act = foreign("transformers.activations.NewGELUActivation")
    assert str(function_of(act, {})) == "gelu(approximate=tanh)"
    x = torch.linspace(-5, 5, 101, dtype=torch.float64)
    assert torch.allclose(act(x), function_of(act, {}).f(x))
