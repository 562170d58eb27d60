"""Settings: what plan, fit, max_batch and frontier are given beside a budget, checked before anything runs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from slimgrad.errors import SpecError
from slimgrad.planner.bounds import Tolerance
from slimgrad.planner.calibration import Calibration
from slimgrad.planner.offers import allowed, exact_of
from slimgrad.planner.sensitivity import Sensitivity
from slimgrad.spec import Profile
from slimgrad.spec.budgets import as_bytes

KINDS = {
    Profile: "what sg.profile(model, batch) returns",
    Calibration: "what sg.calibrate() returns, or None",
    Sensitivity: "what sg.sensitivity(model, batch) returns, or None",
}


@dataclass(frozen=True)
class Settings:
    """As the planner takes them."""

    names: tuple[str, ...]
    """What may be done."""
    reserve: int
    min_bytes: int | None

    @classmethod
    def of(
        cls,
        allow: str | Collection[str] | None,
        reserve: str | int,
        min_bytes: int | None,
        sensitivity: Sensitivity | None,
        calibration: Calibration | None,
        tolerance: Tolerance,
    ) -> Settings:
        for name, given, kind in (("sensitivity", sensitivity, Sensitivity), ("calibration", calibration, Calibration)):
            if given is not None:
                check_kind(name, given, kind)
        least = None if min_bytes is None else as_bytes(min_bytes, "min_bytes")
        names = allowed(allow)
        # Errors are estimates: what loses something is not offered where none is borne, whatever is expected of it.
        return cls(names if tolerance.max_error else exact_of(names), as_bytes(reserve, "reserve"), least)


def check_kind(name: str, given: Any, kind: type[Profile | Calibration | Sensitivity]) -> None:
    if not isinstance(given, kind):
        raise SpecError(f"{name}: expected {KINDS[kind]}; found {type(given).__name__}")
