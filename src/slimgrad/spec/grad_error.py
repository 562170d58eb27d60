"""GradError: how far the gradients of each parameter are from the exact ones."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from slimgrad.report import errors
from slimgrad.spec.values import Value


@dataclass(frozen=True, kw_only=True, repr=False)
class ParameterError(Value):
    """The gradient of one parameter, beside the exact one."""

    may_be_nan: ClassVar[bool] = True

    name: str
    exact: float
    """The norm of the exact gradient."""
    error: float
    """The norm of the difference."""
    cosine: float
    """Of the angle between the two; 1 if both are zero."""

    @property
    def relative(self) -> float:
        if self.exact == 0:
            return 0.0 if self.error == 0 else math.inf
        return self.error / self.exact


@dataclass(frozen=True, kw_only=True, repr=False)
class GradError(Value):
    """The gradients of one batch, with and without what is applied."""

    what: str
    """What was applied, as one would type it."""
    parameters: tuple[ParameterError, ...]
    """In the order of the model."""

    @property
    def relative(self) -> float:
        """Of all gradients taken for one vector."""
        exact, error = (math.hypot(*(getattr(p, field) for p in self.parameters)) for field in ("exact", "error"))
        return error / exact if exact else 0.0 if error == 0 else math.inf

    @property
    def worst(self) -> ParameterError:
        """The parameter with the largest relative error."""
        return max(self.parameters, key=lambda parameter: parameter.relative)

    def plot(self, path: str | Path) -> Path:
        """Draw the relative error of each parameter, and write it to `path`."""
        return errors.grad_error_plot(self, Path(path))

    def __str__(self) -> str:
        return errors.grad_error_table(self)
