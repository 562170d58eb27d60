"""Rules that change while a model is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from slimgrad.recipes import recipe_from
from slimgrad.rules import Recipe, Rules, as_rules


def stages_of(what: Any, model: nn.Module) -> Mapping[int, Rules]:
    """What `apply` was given, as rules by the step from which on they hold."""
    recipe = what if isinstance(what, Recipe) else recipe_from(what)
    return {0: as_rules(what)} if recipe is None else recipe.stages(model)


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

    @property
    def to_come(self) -> list[Rules]:
        """Of later steps."""
        return [rules for step, rules in self._rules.items() if step > self.step]

    def begin_forward(self) -> Rules:
        """The rules of the forward that begins."""
        found = self.rules
        if self._optimizer is None:
            self.step += 1
        return found

    def attach(self) -> None:
        if self._optimizer is not None and self._handle is None:
            self._handle = self._optimizer.register_step_post_hook(self._count)

    def detach(self) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _count(self, *_: Any) -> None:
        self.step += 1
