"""One small family of errors. Each message says the site, what was found, what was expected and what to do."""

from __future__ import annotations


class SlimgradError(Exception):
    """Base of every error slimgrad raises on purpose."""


class SpecError(SlimgradError, ValueError):
    """A value (codec, rule, profile, JSON text) is not well formed."""


class RuleError(SlimgradError, ValueError):
    """A rule matches nothing, or its codec cannot serve what it matches."""


class BatchError(SlimgradError, ValueError):
    """The model could not be called with the batch given."""


class UnsupportedModelError(SlimgradError, TypeError):
    """The model, or one of its tensors, is of a kind slimgrad does not treat."""


class BudgetError(SlimgradError, ValueError):
    """No plan meets the budget; `smallest` says how few bytes one could do with."""

    def __init__(self, message: str, smallest: int | None = None) -> None:
        super().__init__(message)
        self.smallest = smallest


class SavedTensorModifiedError(SlimgradError, RuntimeError):
    """A tensor kept for backward was changed in place afterwards, as autograd itself would report."""


class SiteChangedError(SlimgradError, RuntimeError):
    """Backward asks a site for something else than what was learnt about it: the forward took another path."""


class DoubleBackwardError(SlimgradError, RuntimeError):
    """A second-order gradient was asked for through a site that keeps less than second order needs."""


class SlimgradWarning(UserWarning):
    """Something is done in a safe but less saving way; said once."""
