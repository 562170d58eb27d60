"""The hooks by which channels are found and their gradients gathered."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from slimgrad.recipes.hooks import Hook


class Told(Protocol):
    """Who is told of what hooks see."""

    def measure(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None: ...

    def gathered(self, path: str) -> None: ...


class Measure(Hook[Told]):
    """How large the input of a layer is."""

    def __call__(self, *args: Any) -> None:
        if self.owner is not None:
            self.owner.measure(self.path, *args)


class Gathered(Hook[Told]):
    """On a weight of which some channels are trained."""

    def __call__(self, *args: Any) -> None:
        if self.owner is not None:
            self.owner.gathered(self.path)
