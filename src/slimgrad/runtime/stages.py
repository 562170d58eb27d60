"""Rules that change while a model is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from slimgrad.runtime.rules import Rules


class Stages:
    """Which rules hold at which step; steps are the optimizer's, or else forwards."""

    def __init__(self, rules: Mapping[int, Rules], optimizer: Optimizer | None = None) -> None:
        self._rules = dict(sorted(rules.items()))
        self._optimizer = optimizer
        self._handle: RemovableHandle | None = None
        self.step = 0

    @property
    def rules(self) -> Rules:
        """Of the step that is next."""
        return next(rules for step, rules in reversed(self._rules.items()) if step <= self.step)

    def begin_forward(self) -> Rules:
        """The rules of the forward that begins."""
        found = self.rules
        if self._optimizer is None:
            self.step += 1
        return found

    def attach(self) -> None:
        if self._optimizer is not None:
            self._handle = self._optimizer.register_step_post_hook(self._count)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _count(self, *_: Any) -> None:
        self.step += 1
