"""The contract of recipes: rules that depend on the model, and may change while it is trained."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from slimgrad.rules.rule import Rules
from slimgrad.spec import Value


class Recipe(Value, ABC):
    """A published method: rules that depend on the model, and may change while it is trained."""

    @abstractmethod
    def stages(self, model: nn.Module) -> Mapping[int, Rules]:
        """Step -> the rules from that step on; the first is step 0."""

    def controller(self, model: nn.Module, optimizer: Optimizer | None) -> Controller | None:
        """What changes the rules by what it sees; None if they follow from the step alone. Refuses here what it cannot
        treat, before anything is changed.
        """
        return None

    @property
    def min_bytes(self) -> int | None:
        """What a storage must have at least to be packed, where `apply` is not told; None leaves it to the device."""
        return None


Shapes = tuple[Any, ...]
"""Of the tensors that a model is called with."""


class Controller(ABC):
    """Rules that follow from what is seen while a model is trained."""

    strict: ClassVar[bool] = False
    """Whether no forward may hold everything once, to be learnt: what was never seen is learnt on fake tensors."""

    @property
    @abstractmethod
    def rules(self) -> Rules:
        """Of the forward that is next: the very same tuple as long as nothing changed."""

    @property
    def notes(self) -> tuple[str, ...]:
        """For the report."""
        return ()

    @abstractmethod
    def attach(self) -> None:
        """Have the hooks that it takes to see; once, however often it is called."""

    @abstractmethod
    def detach(self) -> None: ...

    def rest(self) -> None:
        """`with run:` is left: the model is as it was, unless a step of what ran inside is still to come."""
        return

    def preview(self, shapes: Shapes) -> AbstractContextManager[None] | None:
        """Under what the model runs on fake tensors of these shapes before the forward begins; None if it need not."""
        return None

    def untouched(self) -> AbstractContextManager[None]:
        """Under what the model is as it would be without this controller, to be counted on fake tensors."""
        return nullcontext()

    @abstractmethod
    def begin(self, step: int, shapes: Shapes) -> None:
        """A forward of this step begins; there may be several."""

    @abstractmethod
    def end(self) -> None:
        """The optimizer took the step; without one, the next forward begins."""

    def epoch(self) -> None:
        """Another epoch begins."""
        return

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """What it takes to go on where one stopped."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
