"""Plans: what they promise is what the allocator says, and they are values that one can read, edit and compare."""

from __future__ import annotations

import copy
import json
import math
import re
import warnings
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.codecs import Demand
from slimgrad.planner.bounds import bound_of
from slimgrad.planner.calibration import Rate
from slimgrad.planner.costs import NOISE, noise_key
from slimgrad.planner.offers import CHOICES
from slimgrad.planner.program import Program
from slimgrad.profiler.meter import measured_step
from tests.models import hook_count
from tests.planner.models import FAST_GROUPS, FAST_OPS, MODELS, SPEEDS, Case, made


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    model(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def step(model: nn.Module, batch: dict[str, Tensor]) -> None:
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()


@pytest.mark.parametrize(("speeds", "ops"), [(SPEEDS, ""), (FAST_OPS, "fewbit"), (FAST_GROUPS, "quant")])
@pytest.mark.parametrize("budget", ["1.5x", "3x", "6x"])
@pytest.mark.parametrize("name", MODELS)
def test_what_a_plan_promises_is_what_a_step_takes(name: str, budget: str, speeds: sg.Calibration, ops: str) -> None:
    """On a CPU, by the allocator's own account. What oneDNN lays out anew for convolutions is not foreseen."""
    model, batch = made(name)
    plan = sg.plan(sg.profile(model, batch, fake=True), budget, calibration=speeds)
    assert {what.partition("(")[0] for _, what in plan.fused} == ({ops} - {""} if name != "resnet" else set())
    run = sg.apply(model, plan, batch=batch)
    step(model, batch)
    kept = run.report().kept_after
    assert abs(kept / plan.kept_bytes - 1) <= 0.02
    assert kept <= plan.kept_before / float(budget[:-1]) * 1.03
    model.zero_grad(set_to_none=True)
    peak = measured_step(lambda: step(model, batch), "cpu").peak
    promised = plan.peak_bytes - plan.fixed_bytes
    assert peak <= 1.03 * promised, (peak, promised)
    assert promised <= 1.08 * peak, (peak, promised)


@pytest.mark.parametrize("name", ["gpt2", "bert", "resnet"])
def test_a_plan_of_exact_actions_alone_leaves_every_gradient_as_it_was(name: str) -> None:
    model, batch = made(name)
    plain = copy.deepcopy(model)
    plan = sg.plan(sg.profile(model, batch, fake=True), "2.5x", allow="exact", calibration=SPEEDS)
    assert plan.error == 0
    run = sg.apply(model, plan)
    for _ in range(3):
        for one, two in zip(gradients(model, batch), gradients(plain, batch), strict=True):
            assert torch.equal(one, two)
    assert run.report().kept_after <= plan.kept_before / 2.5 * 1.02


@pytest.fixture(scope="module")
def case() -> tuple[Case, sg.Profile]:
    model, batch = made("gpt2")
    return (model, batch), sg.profile(model, batch, fake=True)


def test_a_budget_in_bytes_bounds_the_peak_with_all_that_is_there(case: tuple[Case, sg.Profile]) -> None:
    (model, batch), profile = case
    plan = sg.plan(profile, "12MiB", calibration=SPEEDS)
    fixed = sum(p.nbytes for p in (*model.parameters(), *model.buffers())) + sum(t.nbytes for t in batch.values())
    tied = model.transformer.wte.weight.nbytes
    assert fixed - tied <= plan.fixed_bytes <= fixed
    assert plan.peak_bytes <= 12 * 2**20 < plan.peak_before
    reserved = sg.plan(profile, "12MiB", reserve="1MiB", calibration=SPEEDS)
    assert reserved.fixed_bytes == plan.fixed_bytes + 2**20
    assert reserved.peak_bytes <= 12 * 2**20 and reserved.seconds >= plan.seconds


def test_bounds_on_time_and_error_are_kept(case: tuple[Case, sg.Profile]) -> None:
    _, profile = case
    free = sg.plan(profile, "2x", calibration=SPEEDS)
    bounded = sg.plan(profile, "2x", max_slowdown=free.slowdown + 0.01, calibration=SPEEDS)
    assert bounded.slowdown <= free.slowdown + 0.01
    for wrong in ({"max_slowdown": 0.9}, {"max_error": -1}, {"reserve": -5}, {"reserve": "2 spoons"}):
        with pytest.raises(sg.SpecError, match="expected"):
            sg.plan(profile, "2x", calibration=SPEEDS, **wrong)
    assert sg.plan(profile, "4x", max_error=0.01, calibration=SPEEDS).error <= 0.01
    with pytest.raises(sg.BudgetError, match="smallest reachable kept"):
        sg.plan(profile, "8x", max_slowdown=1.01, calibration=SPEEDS)


def test_a_budget_that_nothing_meets_says_what_would_and_what_weighs_most(case: tuple[Case, sg.Profile]) -> None:
    _, profile = case
    with pytest.raises(
        sg.BudgetError, match=r"smallest reachable peak is .* What weighs most there: .* with "
    ) as found:
        sg.plan(profile, "2MiB", calibration=SPEEDS)
    least = found.value.smallest
    assert least is not None
    assert sg.plan(profile, least, calibration=SPEEDS).peak_bytes == least
    with pytest.raises(sg.BudgetError):
        sg.plan(profile, least - 1, calibration=SPEEDS)


def test_more_budget_never_means_a_slower_plan(case: tuple[Case, sg.Profile]) -> None:
    _, profile = case
    plans = [sg.plan(profile, f"{ratio}x", calibration=SPEEDS) for ratio in (1, 1.3, 1.7, 2.2, 3, 4, 6)]
    assert plans[0].seconds <= 0
    for more, less in pairwise(plans):
        assert more.seconds <= less.seconds + 1e-9


@pytest.mark.parametrize("budget", ["8 parsecs", "", "0x", "-1x", "0.5x", 0, -3, True, None, "x", math.inf])
def test_a_budget_that_is_none_is_refused(case: tuple[Case, sg.Profile], budget: object) -> None:
    with pytest.raises(sg.SpecError, match="expected"):
        sg.plan(case[1], budget, calibration=SPEEDS)


def test_budgets_are_read_as_people_write_them() -> None:
    assert bound_of("12GiB", 0).peak == 12 * 2**30
    assert bound_of(5_000_000, 0).peak == 5_000_000
    assert bound_of(0.25, 1000).kept == bound_of("4x", 1000).kept == 250


def test_what_may_be_done_is_checked(case: tuple[Case, sg.Profile]) -> None:
    with pytest.raises(sg.SpecError, match="found 'magic'"):
        sg.plan(case[1], "2x", allow=["derive", "magic"], calibration=SPEEDS)
    plan = sg.plan(case[1], "1.2x", allow=["derive", "lossless"], calibration=SPEEDS)
    derived = {"derive(); lossless()", "derive(products=True); lossless()"}
    assert {action.what for action in plan.actions} <= {"keep", "lossless()", *derived}
    assert not plan.recompute


def test_a_profile_without_a_timeline_takes_ratios_alone(case: tuple[Case, sg.Profile]) -> None:
    profile = replace(case[1], timeline=None, meta={**case[1].meta, "no_timeline": "it was told so"})
    plan = sg.plan(profile, "3x", calibration=SPEEDS)
    assert plan.peak_bytes is None and plan.kept_bytes <= plan.kept_before / 3
    with pytest.raises(sg.BudgetError, match="it was told so"):
        sg.plan(profile, "12MiB", calibration=SPEEDS)


def test_without_a_timeline_a_plan_says_what_it_adds_and_cannot_bound_it(case: tuple[Case, sg.Profile]) -> None:
    """How long an untouched step takes is not known then, so that 1.00x of it would be made up."""
    profile = replace(case[1], timeline=None, meta={**case[1].meta, "no_timeline": "it was told so"})
    plan = sg.plan(profile, "3x", calibration=SPEEDS)
    assert plan.seconds > 0 and not plan.step_seconds
    assert re.search(r"^step [0-9.]+ ms longer than the untouched one, gradient error", str(plan), re.MULTILINE)
    with pytest.raises(sg.BudgetError, match=r"max_slowdown needs the profile's timeline.*it was told so"):
        sg.plan(profile, "3x", max_slowdown=5, calibration=SPEEDS)


def test_plans_survive_json_and_can_be_edited_there(case: tuple[Case, sg.Profile]) -> None:
    (model, batch), profile = case
    plan = sg.plan(profile, "3x", allow=["quant", "lossless"], calibration=SPEEDS)
    assert sg.Plan.from_json(plan.to_json()) == plan
    data = json.loads(plan.to_json())
    edited = next(a for a in data["actions"] if a["what"].startswith("quant"))
    edited["what"] = "quant(bits=2); lossless()"
    other = sg.Plan.from_json(json.dumps(data))
    run = sg.apply(model, other)
    step(model, batch)
    run.remove()
    assert repr(sg.Quant(bits=2)) in {site.codec for site in run.report().sites}
    assert "-> quant(bits=2); lossless()" in plan.diff(other)
    edited["what"] = "quant(bits=5)"
    with pytest.raises(sg.SlimgradError, match="bits"):
        sg.Plan.from_json(json.dumps(data))


def test_a_plan_that_is_not_found_in_time_is_an_error_of_ours(
    case: tuple[Case, sg.Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(*_: Any) -> None:
        raise TimeoutError("no choice was found in time")

    monkeypatch.setattr(Program, "answer", answer)
    for ask in (sg.plan, lambda profile, budget, **rest: sg.frontier(profile, **rest)):
        with pytest.raises(sg.BudgetError, match="was found in time, nor was it shown that there is none"):
            ask(case[1], "3x", calibration=SPEEDS)


def test_a_plan_compared_with_itself_says_so(case: tuple[Case, sg.Profile]) -> None:
    plan = sg.plan(case[1], "2x", calibration=SPEEDS)
    assert "all actions are the same" in plan.diff(plan)


def test_a_difference_tells_what_is_promised_and_names_a_single_site(case: tuple[Case, sg.Profile]) -> None:
    plan = sg.plan(case[1], "3x", allow=["quant", "lossless"], calibration=SPEEDS)
    sites = [k for k, action in enumerate(plan.actions) if action.site.startswith("transformer.h.1.mlp.c_proj:")]
    actions = [replace(a, what="keep") if k in sites else a for k, a in enumerate(plan.actions)]
    told = plan.diff(replace(plan, actions=tuple(actions), peak_bytes=2 * plan.peak_bytes, error=0.0)).splitlines()
    assert told[0] == "budget 3x less kept -> 3x less kept"
    assert [line.split(" ")[0] for line in told[1:5]] == ["kept", "peak", "step", "gradient"]
    assert told[4].endswith("% -> none: all of it is exact")
    assert told[5:] == [f"transformer.h.1.mlp.c_proj Addmm.mat1: {plan.actions[sites[0]].what} -> keep"]


def test_layers_of_a_model_that_is_a_sequential_share_a_line() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(4)))
    profile = sg.profile(model, torch.randn(128, 64), lambda out: out.sum(), fake=True)
    told = str(sg.plan(profile, "1x", allow="exact", calibration=SPEEDS))
    assert re.search(r" 4  \*\.\* Gelu\.self +keep$", told, re.MULTILINE)


def test_a_module_may_have_any_name() -> None:
    model = nn.Sequential()
    for name in ("a[/b]", ":smile:", "<i>"):
        model.add_module(name, nn.Linear(64, 64))
    plan = sg.plan(sg.profile(model, torch.randn(128, 64), lambda out: out.sum(), fake=True), "1x", calibration=SPEEDS)
    other = replace(plan, actions=tuple(replace(action, what="lossless()") for action in plan.actions))
    for told in (str(plan), plan.explain(), plan.diff(other)):
        assert ":smile: Addmm.mat1" in told and "<i> Addmm.mat1" in told


def test_what_an_explanation_or_a_table_leaves_out_is_counted(case: tuple[Case, sg.Profile]) -> None:
    plan = sg.plan(case[1], "3x", calibration=SPEEDS)
    whole = len(plan.explain(limit=1000).splitlines())
    for told in (plan.explain(limit=2), plan.table(limit=2)):
        assert re.search(r"^… and [0-9]+ more kinds of storage, .* -> .*B$", told, re.MULTILINE)
    assert "more kind" not in plan.explain(limit=1000) and "more kind" not in plan.table(limit=None)
    assert len(plan.explain(limit=2).splitlines()) < whole


def test_a_plan_for_a_model_that_keeps_nothing_has_no_table() -> None:
    model = nn.Linear(4, 4).requires_grad_(False)
    told = str(sg.plan(sg.profile(model, torch.ones(2, 4), fake=True), "2x", calibration=SPEEDS))
    assert "kept 0 B -> 0 B" in told and "where" not in told


def test_a_plan_prints_its_promises_and_explains_each_big_site(case: tuple[Case, sg.Profile]) -> None:
    plan = sg.plan(case[1], "3x", calibration=SPEEDS)
    text = str(plan)
    assert "budget 3x less kept" in text and "of the untouched time" in text and "there before the step" in text
    told = plan.explain()
    assert "runs again in backward" in told and "become" in told


def test_plans_work_with_other_batch_sizes(case: tuple[Case, sg.Profile]) -> None:
    (model, batch), profile = case
    plan = sg.plan(profile, "3x", calibration=SPEEDS)
    run = sg.apply(model, plan)
    for size in (8, 3, 5):
        step(model, {name: tensor[:size] for name, tensor in batch.items()})
    report = run.report()
    run.remove()
    assert report.kept_after < 0.3 * plan.kept_before


@pytest.mark.parametrize("allow", [["derive", "quant"], "recompute", ["fewbit", "lossless"]])
def test_a_plan_for_another_model_is_refused(case: tuple[Case, sg.Profile], allow: str | list[str]) -> None:
    plan = sg.plan(case[1], "1.2x", allow=allow, calibration=FAST_OPS)
    model, batch = made("vit")
    message = r"made for GPT2LMHeadModel, and is not for this ViT\w+, which has no module 'transformer\."
    with pytest.raises(sg.RuleError, match=message):
        sg.apply(model, plan, batch=batch)
    assert hook_count(model) == 0 and not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("edit", [{"recompute": ("transformer.h.7",)}, {"boundaries": (("transformer.h.7", "keep"),)}])
def test_a_plan_that_names_a_module_that_is_not_there_is_refused(
    case: tuple[Case, sg.Profile], edit: dict[str, Any]
) -> None:
    plan = sg.plan(case[1], "2x", calibration=SPEEDS)
    with pytest.raises(sg.RuleError, match=r"no module 'transformer\.h\.7'"):
        sg.apply(made("gpt2")[0], replace(plan, **edit))


def test_modules_that_an_op_computes_faster_are_computed_by_it(case: tuple[Case, sg.Profile]) -> None:
    (model, batch), profile = case
    plan = sg.plan(profile, "1.5x", calibration=FAST_OPS)
    assert [path for path, _ in plan.fused] == [f"transformer.h.{layer}.mlp.act" for layer in range(3)]
    assert plan.slowdown < 1 and 0 < plan.error < 0.1
    told = plan.explain()
    assert "3 modules computed by fused ops" in told and "which keep a derivative in 3 bits" in told
    fused = [action for action in plan.actions if action.what == "fused"]
    assert len(fused) == 3 * 4 and sum(action.after for action in fused) == 3 * 8 * 128 * 256 * 3 // 8
    assert sg.Plan.from_json(plan.to_json()) == plan
    assert "no longer computed by a fused op" in plan.diff(
        sg.plan(profile, "1.1x", allow="exact", calibration=FAST_OPS)
    )
    for allow in ("exact", ["quant", "derive", "lossless"]):
        assert not sg.plan(profile, "1.5x", allow=allow, calibration=FAST_OPS).fused
    with warnings.catch_warnings():
        warnings.simplefilter("error", sg.SlimgradWarning)
        treated = copy.deepcopy(model)
        run = sg.apply(treated, plan, batch=batch)
        for _ in range(3):
            step(treated, batch)
    run.remove()


def test_a_formula_that_an_op_computes_makes_nothing_that_could_be_derived(case: tuple[Case, sg.Profile]) -> None:
    plan = sg.plan(case[1], "6x", allow=["fewbit", "derive", "lossless", "quant"], calibration=FAST_OPS)
    derived = {action.path for action in plan.actions if action.what.startswith("derive")}
    assert plan.fused and not any(path.replace(".act", ".c_proj") in derived for path, _ in plan.fused)


def test_what_a_module_made_is_derived_of_the_groups_that_an_op_keeps(case: tuple[Case, sg.Profile]) -> None:
    plan = sg.plan(case[1], "3x", allow=["derive", "lossless", "quant"], calibration=FAST_GROUPS)
    assert plan.fused == tuple((f"transformer.h.{n}.mlp.act", "quant(bits=4, fused=True)") for n in range(3))
    derived = {action.path for action in plan.actions if action.what.startswith("derive")}
    assert derived >= {f"transformer.h.{n}.mlp.c_proj" for n in range(3)}
    fused = [action for action in plan.actions if action.what == "fused"]
    assert sum(action.after for action in fused) == 3 * (8 * 128 * 256) * (4 + 32 / 128) / 8
    assert "which keep what they are given in 4 bits" in plan.explain()
    for allow in (["derive", "lossless", "fewbit"], ["lossless", "quant"]):
        without = sg.plan(case[1], "1.5x", allow=allow, calibration=FAST_GROUPS)
        assert not any(what.startswith("quant") for _, what in without.fused)


class Positioned(nn.Module):
    """A block that adds to what it is given before anybody saves it; or does so in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.zeros(64))
        self.layers = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2) if self.in_place else x + self.position
        return x + self.layers(x)


@pytest.mark.parametrize("in_place", [False, True])
def test_what_regions_are_given_is_held_for_them_and_none_runs_again_that_changed_it(in_place: bool) -> None:
    torch.manual_seed(0)
    blocks = [Positioned(in_place) for _ in range(6)]
    model, batch = nn.Sequential(nn.Linear(64, 64), *blocks, nn.Linear(64, 8)), torch.randn(512, 64)
    plain, profile = copy.deepcopy(model), sg.profile(model, batch, lambda y: y.square().mean(), fake=True)
    allow = ["recompute", "derive"] if in_place else ["recompute"]
    plan = sg.plan(profile, "1.5x" if in_place else "3x", allow=allow, calibration=SPEEDS)
    assert bool(plan.recompute) is not in_place
    held = [action for action in plan.actions if not action.keys]
    assert sum(action.after for action in held) == len(plan.recompute) * batch.nbytes
    run = sg.apply(model, plan, batch=batch)
    for _ in range(2):
        for one in (model, plain):
            one.zero_grad()
            one(batch).square().mean().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad) if q.grad is not None else p.grad is None
    assert run.report().kept_after == pytest.approx(plan.kept_bytes, rel=0.02)


def rows() -> Tensor:
    return torch.randn(512, 64)


def promised_and_measured(model: nn.Module, batch: Tensor, budget: str, **how: Any) -> tuple[sg.Plan, int, int]:
    """A plan, and what a step under it keeps and holds at its peak."""
    profile = sg.profile(model, batch, Tensor.sum, fake=True)
    plan = sg.plan(profile, budget, **{"calibration": SPEEDS, **how})
    run = sg.apply(model, plan, batch=batch)
    model(batch).sum().backward()
    model.zero_grad(set_to_none=True)
    peak = measured_step(lambda: model(batch).sum().backward(), "cpu").peak
    return plan, run.report().kept_after, peak


def check_promise(plan: sg.Plan, kept: int, peak: int) -> None:
    assert kept == pytest.approx(plan.kept_bytes, rel=0.02)
    assert plan.peak_bytes is not None
    assert peak / 1.03 <= plan.peak_bytes - plan.fixed_bytes <= 1.08 * peak


def test_temporaries_of_packing_are_gone_before_the_next_op_begins() -> None:
    """The scratch of Quant is a CPU's; what backward's products make is larger."""
    torch.manual_seed(0)
    quant = Rate(call=1e-6, pack=1e-10, unpack=1e-10, pack_scratch=1.766, unpack_scratch=1.268)
    speeds = replace(SPEEDS, rates={"Quant(8)": quant, "Quant(4)": quant})
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))
    check_promise(*promised_and_measured(model, rows(), "4x", allow=["quant"], calibration=speeds))


def test_what_a_region_is_given_in_few_bits_is_whole_again_while_it_runs_again() -> None:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()) for _ in range(3))
    model = nn.Sequential(nn.Linear(64, 64), nn.Sequential(*blocks), nn.Linear(64, 8))
    plan, kept, peak = promised_and_measured(model, rows(), "6x", allow=["recompute", "quant"])
    assert any(what.startswith("quant") for _, what in plan.boundaries)
    check_promise(plan, kept, peak)


class Borrowed(nn.Module):
    """Blocks whose norms are called once more, from outside of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(64, 64), nn.Linear(64, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        y, x = torch.tanh(x), self.embed(x)
        for block in self.blocks:
            x = block(x) + block[0](y * x)
        return self.head(x)


def test_what_a_module_in_a_region_saves_when_others_call_it_is_kept() -> None:
    torch.manual_seed(0)
    plan, kept, peak = promised_and_measured(Borrowed(), rows(), "1.5x", allow=["recompute"])
    assert plan.recompute
    check_promise(plan, kept, peak)


class Rectified(nn.Module):
    """Frozen, but for what is before it; what it ends with is saved behind it too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
        self.norm = nn.BatchNorm2d(8)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.norm(self.layers(x)))


def test_frozen_blocks_that_run_again_are_given_values_even_if_backward_reads_none_of_them() -> None:
    torch.manual_seed(0)
    first, second = Rectified(), Rectified()
    model = nn.Sequential(nn.Conv2d(3, 8, 1), first, nn.MaxPool2d(2), second, nn.Flatten(), nn.Linear(2048, 8))
    plan, kept, _ = promised_and_measured(model, torch.randn(16, 3, 32, 32), "4x", allow="exact")
    assert plan.recompute
    assert kept == pytest.approx(plan.kept_bytes, rel=0.02)


def test_a_loss_outside_of_the_model_is_left_alone_unless_it_is_said_to_be_reached() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(500, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 500))
    batch = torch.randint(0, 500, (512,)), torch.randint(0, 500, (512,))
    profile = sg.profile(model, batch, F.cross_entropy, fake=True)
    with pytest.raises(sg.BudgetError, match=r"saved outside of the model.*outside=True"):
        sg.plan(profile, "4x", calibration=SPEEDS)
    plain = sg.plan(profile, "1.2x", calibration=SPEEDS)
    assert not [action for action in plain.actions if action.path == "<outside>"]
    with pytest.raises(sg.BudgetError, match="no plan meets 4x"):
        sg.fit(model, batch, "4x", F.cross_entropy, calibration=SPEEDS)
    fitted = sg.fit(model, batch, "1.2x", F.cross_entropy, calibration=SPEEDS)

    def kept() -> int:
        held: list[Tensor] = []
        return measured_step(lambda: held.append(F.cross_entropy(model(batch[0]), batch[1])), "cpu").kept

    assert kept() == pytest.approx(fitted.measured, rel=0.02)
    fitted.run.remove()
    plan = sg.plan(profile, "4x", calibration=SPEEDS, outside=True)
    run = sg.apply(model, plan)
    for _ in range(2):
        with run:
            loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
    with run:
        assert kept() == pytest.approx(plan.kept_bytes, rel=0.05)


@pytest.mark.parametrize(("name", "near"), [("topk", 0.02), ("blocks", 0.02), ("bounded", 0.3), ("quant-low", 0.02)])
def test_what_is_allowed_on_demand_can_be_planned_and_applied(
    case: tuple[Case, sg.Profile], name: str, near: float
) -> None:
    (model, batch), profile = case
    plan = sg.plan(profile, "1.1x", allow=[name, "lossless"], max_error=10, calibration=SPEEDS)
    treated = copy.deepcopy(model)
    run = sg.apply(treated, plan, batch=batch)
    for _ in range(2):
        step(treated, batch)
    assert plan.error > 0 and run.report().kept_after == pytest.approx(plan.kept_bytes, rel=near)
    treated_kinds = {site.codec.partition("(")[0].lower() for site in run.report().sites}
    assert name.partition("-")[0] in treated_kinds
    assert all(parameter.grad.isfinite().all() for parameter in treated.parameters() if parameter.grad is not None)


@pytest.mark.parametrize("codecs", [one for group in CHOICES.values() for one in group], ids=str)
def test_what_codecs_lose_is_what_costs_say(codecs: tuple[sg.Codec, ...]) -> None:
    """Of normal values, as far as a codec says it loses any; few-bit is about slopes, and measured elsewhere."""
    codec, said = codecs[0], NOISE.get(noise_key(codecs[0]))
    if said is None or isinstance(codec, sg.FewBit):
        pytest.skip("exact, or of slopes")
    x = torch.randn(4096, 768, generator=torch.Generator().manual_seed(0))
    found = codec.unpack(codec.pack(x, Demand(need=sg.Need.OPERAND)))
    noise = float((found - x).square().sum() / x.square().sum())
    assert noise == pytest.approx(said, rel=0.35)
