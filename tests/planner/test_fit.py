"""fit: a model under a plan that was seen to fit, or as it was before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.planner import fitting
from slimgrad.planner.largest import _largest, _resizer
from slimgrad.profiler.meter import Measured, measured_step
from tests.models import hook_count
from tests.planner.models import SPEEDS, Case, made


@pytest.fixture
def case() -> Case:
    return made("gpt2")


def step(model: nn.Module, batch: dict[str, Tensor]) -> None:
    model(**batch).loss.backward()


def test_a_step_is_within_the_budget_and_the_promise_is_what_it_takes(case: Case) -> None:
    model, batch = case
    fitted = sg.fit(model, batch, "12MiB", calibration=SPEEDS)
    assert fitted.run.active
    assert abs(fitted.measured / fitted.plan.peak_bytes - 1) < 0.01
    step(model, batch)
    model.zero_grad(set_to_none=True)
    assert fitted.plan.fixed_bytes + measured_step(lambda: step(model, batch), "cpu").peak <= 12 * 2**20
    assert "A real step held" in str(fitted) and "1 attempt" in str(fitted)


def test_a_pair_is_inputs_and_target() -> None:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    batch = torch.randn(512, 64), torch.randint(0, 8, (512,))
    fitted = sg.fit(model, batch, "2x", nn.functional.cross_entropy, calibration=SPEEDS)
    assert fitted.measured <= fitted.plan.kept_before / 2


def test_a_ratio_is_of_what_is_kept(case: Case) -> None:
    model, batch = case
    fitted = sg.fit(model, batch, "4x", calibration=SPEEDS)
    step(model, batch)
    assert fitted.measured <= fitted.plan.kept_before / 4
    assert fitted.run.report().kept_after == fitted.measured


def test_nothing_is_left_behind_but_the_run(case: Case) -> None:
    model, batch = case
    step(model, batch)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    gradients = [p.grad for p in model.parameters()]
    values = [None if g is None else g.clone() for g in gradients]
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    sg.fit(model, batch, "3x", calibration=SPEEDS)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    for parameter, gradient, value in zip(model.parameters(), gradients, values, strict=True):
        assert parameter.grad is gradient
        assert value is None or torch.equal(gradient, value)


def test_a_plan_that_takes_more_than_it_promised_is_corrected(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the device needed a tenth more than the timeline knows."""
    model, batch = case

    def more(run: Any, device: Any) -> Measured:
        found = measured_step(run, device)
        return Measured(peak=int(1.1 * found.peak), kept=found.kept)

    monkeypatch.setattr(fitting, "measured_step", more)
    fitted = sg.fit(model, batch, "14MiB", calibration=SPEEDS)
    assert len(fitted.attempts) > 1 and fitted.measured <= 14 * 2**20
    first, last = fitted.attempts[0], fitted.attempts[-1]
    assert first.measured > 14 * 2**20 and last.promised < first.promised


def test_what_never_fits_is_said_with_what_a_step_took(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = case
    monkeypatch.setattr(fitting, "measured_step", lambda run, device: Measured(peak=2**30, kept=0))
    with pytest.raises(sg.BudgetError, match="the least that a real step took was") as found:
        sg.fit(model, batch, "14MiB", calibration=SPEEDS)
    assert found.value.smallest > 2**30
    assert hook_count(model) == 0


def test_an_impossible_budget_leaves_the_model_as_it_was(case: Case) -> None:
    model, batch = case
    with pytest.raises(sg.BudgetError, match="smallest reachable peak"):
        sg.fit(model, batch, "1MiB", calibration=SPEEDS)
    assert hook_count(model) == 0


def test_memory_that_runs_out_in_the_step_counts_as_too_much(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = case
    calls = []

    def scarce(run: Any, device: Any) -> Measured:
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("no memory")
        return measured_step(run, device)

    monkeypatch.setattr(fitting, "measured_step", scarce)
    fitted = sg.fit(model, batch, "14MiB", calibration=SPEEDS)
    assert fitted.attempts[0].measured is None and fitted.measured <= 14 * 2**20


def test_a_step_that_fails_leaves_the_model_as_it_was(case: Case) -> None:
    model, batch = case
    with pytest.raises(sg.BatchError, match="needs a loss"):
        sg.fit(model, {"input_ids": batch["input_ids"]}, "2x", calibration=SPEEDS)
    assert hook_count(model) == 0


@pytest.mark.parametrize(
    ("make", "tensors"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
        (lambda p: torch.optim.AdamW(p), 2),
        (lambda p: torch.optim.Adam(p, amsgrad=True), 3),
    ],
)
def test_room_is_left_for_what_the_optimizer_will_keep(case: Case, make: Any, tensors: int) -> None:
    model, batch = case
    optimizer = make(model.parameters())
    weights = sum(p.nbytes for p in model.parameters())
    with_state = sg.fit(model, batch, "16MiB", optimizer=optimizer, calibration=SPEEDS)
    with_state.run.remove()
    without = sg.fit(model, batch, "16MiB", calibration=SPEEDS)
    without.run.remove()
    assert with_state.plan.fixed_bytes - without.plan.fixed_bytes == tensors * weights
    step(model, batch)
    optimizer.step()
    state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim())
    assert state == tensors * weights  # the estimate is what it really keeps


def test_the_largest_batch_fits_and_one_more_does_not(case: Case) -> None:
    model, batch = case
    found = sg.max_batch(model, batch, "12MiB", allow=["derive", "lossless"], calibration=SPEEDS)
    assert found.size > found.untouched >= 1
    resized = _resizer(batch)
    fitted = sg.fit(model, resized(found.size), "12MiB", allow=["derive", "lossless"], calibration=SPEEDS)
    fitted.run.remove()
    with pytest.raises(sg.BudgetError):
        sg.fit(model, resized(found.size + 1), "12MiB", allow=["derive", "lossless"], calibration=SPEEDS)
    assert f"the largest batch is {found.size}; " in str(found) and "of what fits untouched" in str(found)


def test_a_batch_at_the_end_of_the_search_is_not_called_the_largest(case: Case) -> None:
    model, batch = case
    found = str(sg.max_batch(model, batch, "1GiB", most=2, calibration=SPEEDS))
    told = "a batch of 2 fits, and larger ones were not tried (most=2); it fits untouched, too"
    assert found.splitlines()[0] == told


def test_no_batch_at_all_is_an_error(case: Case) -> None:
    model, batch = case
    with pytest.raises(sg.BudgetError):
        sg.max_batch(model, batch, "700KiB", calibration=SPEEDS)
    with pytest.raises(sg.SpecError, match="must be bytes"):
        sg.max_batch(model, batch, "4x", calibration=SPEEDS)
    with pytest.raises(sg.BatchError, match=r"\[4, 8\]"):
        sg.max_batch(model, {**batch, "labels": batch["labels"][:4]}, "12MiB", calibration=SPEEDS)


def test_the_largest_number_is_found() -> None:
    for largest in (0, 1, 2, 3, 7, 8, 100):
        assert _largest(lambda n, largest=largest: n <= largest, 1000) == largest
    assert _largest(lambda n: True, 100) == 100


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm = nn.LSTM(32, 64, batch_first=True), nn.LayerNorm(64)
        self.head = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.lstm(x)[0])).mean(1)


def test_what_only_a_real_step_tells_the_size_of_is_looked_at_and_never_planned_with_unseen() -> None:
    model, batch = Recurrent(), (torch.randn(16, 32, 32), torch.randint(0, 8, (16,)))
    loss = nn.functional.cross_entropy
    fake, real = (sg.profile(model, batch, loss, fake=fake) for fake in (True, False))
    assert fake.kept_bytes < real.kept_bytes and "MkldnnRnnLayer" in fake.meta["unknown"] and "unknown" not in real.meta
    assert "only a real step tells" in str(fake)
    with pytest.raises(sg.BudgetError, match="fake=False"):
        sg.plan(fake, "1.1x", calibration=SPEEDS)
    fitted = sg.fit(model, batch, "1.1x", loss, calibration=SPEEDS)
    assert fitted.plan.kept_before == real.kept_bytes
    assert fitted.measured == pytest.approx(fitted.plan.kept_bytes, rel=0.02)
