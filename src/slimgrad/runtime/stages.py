"""Rules that change while a model is trained."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from slimgrad.errors import SpecError
from slimgrad.recipes import recipe_from
from slimgrad.rules import Controller, Recipe, Rules, Shapes, as_rules

NONE_BEGAN = -1
"""The step before the first forward, where a step ends when the next forward begins."""


def stages_of(what: Any, model: nn.Module, optimizer: Optimizer | None = None) -> Stages:
    """What `apply` was given."""
    recipe = what if isinstance(what, Recipe) else recipe_from(what)
    if recipe is None:
        return Stages({0: as_rules(what)}, optimizer)
    controller = recipe.controller(model, optimizer)
    if controller is not None:
        return Adaptive(controller, optimizer, recipe.min_bytes)
    return Stages(recipe.stages(model), optimizer, recipe.min_bytes)


class Stages:
    """Which rules hold at which step; steps are the optimizer's, or else forwards."""

    controller: Controller | None = None
    strict = False
    """As Controller.strict."""

    def __init__(
        self, rules: Mapping[int, Rules], optimizer: Optimizer | None = None, min_bytes: int | None = None
    ) -> None:
        self.min_bytes = min_bytes
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

    @property
    def notes(self) -> tuple[str, ...]:
        """As Controller.notes."""
        return ()

    def preview(self, shapes: Shapes) -> AbstractContextManager[None] | None:
        """As Controller.preview."""
        return None

    def untouched(self) -> AbstractContextManager[None]:
        """As Controller.untouched."""
        return nullcontext()

    def epoch(self) -> None:
        """Another epoch begins."""

    def begin_forward(self, shapes: Shapes) -> Rules:
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

    def rest(self) -> None:
        """As Controller.rest."""

    def _count(self, *_: Any) -> None:
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if type(state.get("step")) is not int or state.keys() != self.state_dict().keys():
            expected = ", ".join(self.state_dict())
            raise SpecError(f"expected the state of a run with {expected}; found {', '.join(map(str, state))}")
        self.step = state["step"]


class Adaptive(Stages):
    """Rules that a controller changes."""

    controller: Controller

    def __init__(self, controller: Controller, optimizer: Optimizer | None, min_bytes: int | None) -> None:
        super().__init__({0: controller.rules}, optimizer, min_bytes)
        self.controller = controller
        self.strict = controller.strict
        self.step = NONE_BEGAN if optimizer is None else 0

    @property
    def rules(self) -> Rules:
        return self.controller.rules

    @property
    def to_come(self) -> list[Rules]:
        return []

    @property
    def notes(self) -> tuple[str, ...]:
        return self.controller.notes

    def preview(self, shapes: Shapes) -> AbstractContextManager[None] | None:
        return self.controller.preview(shapes)

    def untouched(self) -> AbstractContextManager[None]:
        return self.controller.untouched()

    def epoch(self) -> None:
        self.controller.epoch()

    def begin_forward(self, shapes: Shapes) -> Rules:
        if self._optimizer is None:
            self._count()
        self.controller.begin(self.step, shapes)
        return self.rules

    def attach(self) -> None:
        self.controller.attach()
        super().attach()

    def detach(self) -> None:
        super().detach()
        self.controller.detach()

    def rest(self) -> None:
        self.controller.rest()

    def _count(self, *_: Any) -> None:
        if self.step > NONE_BEGAN:
            self.controller.end()
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "controller": self.controller.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = self.step
        super().load_state_dict(state)
        try:
            self.controller.load_state_dict(state["controller"])
        except Exception:
            self.step = before
            raise
