"""fit: plan, apply, run a real step, and look whether it is true."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimgrad.errors import BatchError, BudgetError, UnsupportedModelError
from slimgrad.planner.bounds import Bound, Budget, Tolerance, bound_of
from slimgrad.planner.calibration import Calibration, Progress
from slimgrad.planner.choices import Choices
from slimgrad.planner.plan import Plan
from slimgrad.planner.planning import Draft
from slimgrad.planner.sensitivity import Sensitivity
from slimgrad.planner.settings import Settings
from slimgrad.planner.timing import calibrated_for
from slimgrad.profiler.meter import measured_step
from slimgrad.profiler.profile import profile, undisturbed
from slimgrad.report.human import human_bytes, plural
from slimgrad.runtime.batches import call, split
from slimgrad.runtime.graph import tensors_in
from slimgrad.runtime.run import Run, apply, check_model

ATTEMPTS = 5

SPARE = 1.1
"""Of what a step was above the budget, how much less the next plan aims for."""

STATE = {"SGD": 1, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adagrad": 1, "Lion": 1}
"""Tensors that optimizers keep for each parameter, once they have taken a step."""


@dataclass(frozen=True)
class Attempt:
    """One plan that was tried."""

    promised: int
    measured: int | None
    """None where the device ran out of memory."""


@dataclass(frozen=True)
class Fitted:
    """A model under a plan that was seen to fit."""

    run: Run
    plan: Plan
    bound: Bound
    attempts: tuple[Attempt, ...]

    @property
    def measured(self) -> int:
        """Bytes that the last step took, as the budget counts them."""
        found = self.attempts[-1].measured
        assert found is not None
        return found

    def __str__(self) -> str:
        what = "at its peak" if self.bound.peak is not None else "for backward"
        last = self.attempts[-1]
        return (
            f"{self.plan}\n\nA real step held {human_bytes(self.measured)} {what}; {human_bytes(last.promised)} were "
            f"promised, {self.bound.text} asked for; {plural(len(self.attempts), 'attempt')}"
        )


def fit(
    model: nn.Module,
    batch: Any,
    budget: Budget,
    loss_fn: Callable[..., Any] | None = None,
    *,
    optimizer: Optimizer | None = None,
    max_slowdown: float | None = None,
    max_error: float | None = None,
    allow: str | Collection[str] | None = None,
    reserve: str | int = 0,
    sensitivity: Sensitivity | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    min_bytes: int | None = None,
) -> Fitted:
    """Put `model` under a plan that keeps a training step within `budget`, and see that it does.

    Profiles on fake tensors, plans, applies, runs one real forward and backward and asks the allocator; a plan that
    takes more than it promised is corrected. Parameters, gradients, buffers and random state are left as they were.
    `budget` and the other settings are those of `plan`; `optimizer` says how much state must fit besides. Call it under
    the same autocast as training. If nothing fits, the model is as it was, and the error says what would.
    """
    check_model(model)
    tolerance = Tolerance.of(max_slowdown, max_error)
    given = Settings.of(allow, reserve, min_bytes, sensitivity, calibration, tolerance)
    bound_of(budget, 1)  # what is wrong with it is said before anything runs
    fitting = Fitting(model, batch, loss_fn, optimizer)
    profiled = profile(model, batch, loss_fn, fake=True)
    if profiled.meta.get("unknown"):
        profiled = profile(model, batch, loss_fn)
    speeds = calibration or calibrated_for(profiled, progress)
    reserved = given.reserve + fitting.state_to_come
    draft = Draft(Choices.of(profiled, given.names, speeds, reserved, given.min_bytes, sensitivity))
    return fitting.tried(draft, bound_of(budget, profiled.kept_bytes), tolerance)


class Fitting:
    """What stays the same from attempt to attempt."""

    def __init__(
        self, model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None, optimizer: Optimizer | None
    ) -> None:
        self._model, self._optimizer = model, optimizer
        _check_trained(model, batch, optimizer)
        self._arguments, self._to_loss = split(batch, loss_fn)
        args, kwargs = self._arguments
        self._inputs = kwargs or args
        """What `apply` learns from: no target."""
        self.device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))

    @property
    def state_to_come(self) -> int:
        """Bytes of the optimizer's state: what there is, or what its first step will make."""
        optimizer = self._optimizer
        if optimizer is None:
            return 0
        there = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        if there:
            return there
        return sum(
            p.nbytes * self._tensors_of_state(group)
            for group in optimizer.param_groups
            for p in group["params"]
            if p.requires_grad
        )

    def _tensors_of_state(self, group: Mapping[str, Any]) -> int:
        name = type(self._optimizer).__name__
        if name == "SGD" and not group.get("momentum"):
            return 0
        return STATE.get(name, 2) + bool(group.get("amsgrad"))

    def tried(self, draft: Draft, bound: Bound, tolerance: Tolerance) -> Fitted:
        asked = bound.peak if bound.peak is not None else bound.kept
        assert asked is not None
        attempts: list[Attempt] = []
        target = asked
        for _ in range(ATTEMPTS):
            aim = Bound(bound.text, *((target, None) if bound.peak is not None else (None, target)))
            try:
                found = draft.plan(aim, tolerance)
            except BudgetError as error:
                raise self._failed(error, bound, attempts) from error
            run = apply(self._model, found, batch=self._inputs, optimizer=self._optimizer)
            measured = self._measured(run, bound, draft)
            promised = found.peak_bytes if bound.peak is not None else found.kept_bytes
            assert promised is not None
            attempts.append(Attempt(promised, measured))
            if measured is not None and measured <= asked:
                return Fitted(run, found, bound, tuple(attempts))
            run.remove()
            over = (promised if measured is None else measured) - asked
            target -= max(int(SPARE * over), asked // 50)
        raise self._failed(None, bound, attempts)

    def _failed(self, error: BudgetError | None, bound: Bound, attempts: list[Attempt]) -> BudgetError:
        seen = [attempt.measured for attempt in attempts if attempt.measured is not None]
        if error is not None and not attempts:
            return error
        least = f"; the least that a real step took was {human_bytes(min(seen))}" if seen else ""
        why = f", and aiming lower, {error}" if error is not None else ""
        return BudgetError(
            f"{bound.text} was not met in {plural(len(attempts), 'attempt')}{least}{why}. The model is as it was",
            smallest=min(seen, default=None),
        )

    def _measured(self, run: Run, bound: Bound, draft: Draft) -> int | None:
        """Bytes of a real step, the second: the first one compiles kernels and is watched. None if memory ran out."""
        try:
            with undisturbed(self._model), _gradients_set_aside(self._model):
                self._step()
                if bound.kept is not None:
                    return run.report().kept_after + draft.choices.left_outside
                _drop_gradients(self._model)
                return self._peak(draft.fixed)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None
        except BaseException:
            run.remove()
            raise

    def _peak(self, fixed: int) -> int:
        if self.device.type != "cuda":
            return fixed + measured_step(self._step, self.device).peak
        before = torch.cuda.memory_allocated(self.device)
        there = sum(t.nbytes for t in tensors_in(list(self._optimizer.state.values()))) if self._optimizer else 0
        missing = self.state_to_come - there  # what the optimizer will have besides
        return before + measured_step(self._step, self.device).peak + missing

    def _step(self) -> None:
        with torch.enable_grad():
            loss = self._to_loss(call(self._model, self._arguments))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise BatchError(
                    f"fit needs a loss to run backward from, one number; found {_described(loss)}. Pass loss_fn=, or a "
                    "batch with labels"
                )
            if not loss.requires_grad:
                raise BatchError(
                    "fit: the loss does not depend on anything that requires a gradient; was it detached, or computed "
                    "under no_grad?"
                )
            loss.backward()


def _check_trained(model: nn.Module, batch: Any, optimizer: Optimizer | None) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UnsupportedModelError(f"optimizer must be a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if not any(tensor.requires_grad for tensor in (*model.parameters(), *tensors_in(batch))):
        raise BatchError(
            "there is nothing to train: all parameters of the model are frozen, and no tensor of the batch requires a "
            "gradient; call requires_grad_() on what should train"
        )


def _described(loss: Any) -> str:
    return f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__


@contextmanager
def _gradients_set_aside(model: nn.Module) -> Iterator[None]:
    """Steps begin without gradients, and those that were there come back."""
    kept = [(parameter, parameter.grad) for parameter in model.parameters()]
    _drop_gradients(model)
    try:
        yield
    finally:
        for parameter, gradient in kept:
            parameter.grad = gradient


def _drop_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
