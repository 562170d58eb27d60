"""max_batch: the largest batch for which there is a plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimgrad.errors import BatchError, SpecError
from slimgrad.planner.bounds import Tolerance, bound_of
from slimgrad.planner.calibration import Calibration, Progress
from slimgrad.planner.choices import Choices
from slimgrad.planner.fitting import Fitting
from slimgrad.planner.plan import Plan
from slimgrad.planner.planning import Draft
from slimgrad.planner.sensitivity import Sensitivity
from slimgrad.planner.settings import Settings
from slimgrad.planner.timing import calibrate
from slimgrad.profiler.profile import profile
from slimgrad.runtime.graph import tensors_in
from slimgrad.runtime.run import check_model
from slimgrad.spec.budgets import as_number


@dataclass(frozen=True)
class MaxBatch:
    """The largest batch for which there is a plan."""

    size: int
    plan: Plan
    untouched: int
    """The largest without a plan; 0 if not even one example fits."""
    most: int
    """Larger ones were not tried."""

    def __str__(self) -> str:
        found = f"the largest batch is {self.size}"
        if self.size == self.most:
            found = f"a batch of {self.size} fits, and larger ones were not tried (most={self.most})"
        return f"{found}; {self._beside()}\n\n{self.plan}"

    def _beside(self) -> str:
        if not self.untouched:
            return "untouched not even one example fits"
        if self.untouched == self.size:
            return "it fits untouched, too"
        return f"{self.size / self.untouched:.1f}x of what fits untouched ({self.untouched})"


def max_batch(
    model: nn.Module,
    batch: Any,
    budget: str | int,
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
    most: int = 4096,
) -> MaxBatch:
    """The largest batch, up to `most` examples, for which a plan keeps a step within `budget` bytes.

    `batch` is an example, whose tensors have the examples along their first dimension; or a function from a size to a
    batch. It is searched on fake tensors, so that nothing need fit; `fit` with a batch of that size makes sure.
    """
    check_model(model, meta_allowed=True)
    tolerance = Tolerance.of(max_slowdown, max_error)
    given, bound = Settings.of(allow, reserve, min_bytes, sensitivity, calibration, tolerance), bound_of(budget, 0)
    if bound.peak is None:
        raise SpecError(f"max_batch: the budget must be bytes, such as '16GiB'; found {budget!r}")
    limit = as_number(most)
    if limit is None or limit < 1:
        raise SpecError(f"max_batch: most is a number of examples, 1 or more; found {most!r}")
    most_bytes, make = bound.peak, batch if callable(batch) else _resizer(batch)
    fitting = Fitting(model, make(1), loss_fn, optimizer)
    speeds = calibration or calibrate(fitting.device, progress=progress)
    reserved = given.reserve + fitting.state_to_come
    known: dict[int, Draft] = {}
    tell: Progress = progress or (lambda *_: None)

    def draft(size: int) -> Draft:
        if size not in known:
            tell(len(known), len(known) + 1, f"a batch of {size}")
            found = profile(model, make(size), loss_fn, fake=True)
            known[size] = Draft(Choices.of(found, given.names, speeds, reserved, given.min_bytes, sensitivity))
        return known[size]

    def fits(size: int) -> bool:
        return draft(size).meets(bound, tolerance)

    def fits_untouched(size: int) -> bool:
        untouched = draft(size).choices.untouched
        return bool(untouched) and draft(size).fixed + max(untouched) <= most_bytes

    size = _largest(fits, int(limit))
    best = draft(size or 1).plan(bound, tolerance)  # where not even one example fits, this says why
    found = MaxBatch(size, best, _largest(fits_untouched, size), int(limit))
    tell(len(known), len(known), "done")
    return found


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, by doubling and halving; 0 if none does."""
    good, bad = 0, 1
    while bad <= most and fits(bad):
        good, bad = bad, bad * 2
    bad = min(bad, most + 1)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _resizer(batch: Any) -> Callable[[int], Any]:
    """From a size to a batch like this one, its examples repeated or cut."""
    sizes = {tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()}
    if len(sizes) != 1:
        raise BatchError(
            f"max_batch: the tensors of the batch have {sorted(sizes) or 'no'} examples along their first dimension; "
            "expected one number for all. Pass a function from a size to a batch instead"
        )
    (before,) = sizes
    if not before:
        raise BatchError("max_batch: the batch is empty; expected an example or more")

    def resized(value: Any, size: int) -> Any:
        if isinstance(value, Tensor):
            return value[torch.arange(size, device=value.device) % before] if value.dim() else value
        if isinstance(value, Mapping):
            return {key: resized(item, size) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            items = [resized(item, size) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return value

    return lambda size: resized(batch, size)
