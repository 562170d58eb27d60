"""What is frozen while channels are trained: parameters by their flag, BatchNorms by their mode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slimgrad.errors import RuleError
from slimgrad.recipes.hooks import Hook
from slimgrad.recipes.pruning import SKIPPED
from slimgrad.rules import path_matches

Modules = Mapping[str, nn.Module]
"""By path."""


def trained_whole(train: Iterable[str], model: nn.Module) -> dict[str, nn.Module]:
    """The modules that are trained in any case, by name or as the head."""
    modules = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for entry in train:
        paths = SKIPPED[entry](model) if entry in SKIPPED else [p for p in modules if p and path_matches(p, entry)]
        if not paths and entry not in SKIPPED:
            raise RuleError(f"trady: train={entry!r} is no module of the model, and none of {', '.join(SKIPPED)}")
        found |= {path: modules[path] for path in paths}
    return found


class Frozen:
    """All of a model but for some modules. What is frozen can be trained again, parameter by parameter."""

    def __init__(self, model: nn.Module, whole: Modules) -> None:
        inside = [module for outer in whole.values() for module in outer.modules()]
        trained = {id(parameter) for module in inside for parameter in module.parameters()}
        self.parameters = [p for p in model.parameters() if p.requires_grad and id(p) not in trained]
        self._norms = [m for m in model.modules() if _has_statistics(m) and all(m is not each for each in inside)]
        self._handles: list[RemovableHandle] = []
        self._stills: list[_Still] = []
        self.is_lifted = False

    def freeze(self) -> None:
        for parameter in self.parameters:
            parameter.requires_grad_(False)
        for norm in self._norms:
            still = _Still(self, "")
            self._stills.append(still)
            self._handles.append(norm.register_forward_pre_hook(still))
            self._handles.append(norm.register_forward_hook(_Moving(still), always_call=True))

    def hold(self, trained: Iterable[Tensor]) -> None:
        """Freeze again what somebody had train meanwhile, as loops with two networks do, but for what is `trained`."""
        mine = {id(parameter) for parameter in trained}
        for parameter in self.parameters:
            if parameter.requires_grad and id(parameter) not in mine:
                parameter.requires_grad_(False)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """As if nothing were frozen, for a moment."""
        flags = [(parameter, parameter.requires_grad) for parameter in self.parameters]
        try:
            self.is_lifted = True
            for parameter, _ in flags:
                parameter.requires_grad_(True)
            yield
        finally:
            self.is_lifted = False
            for parameter, flag in flags:
                parameter.requires_grad_(flag)

    def thaw(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._stills.clear()
        for parameter in self.parameters:
            parameter.requires_grad_(True)


class _Still(Hook[Frozen]):
    """Before a BatchNorm: it runs in eval mode, or its input would be kept for statistics."""

    was = True

    def __call__(self, *args: Any) -> None:
        if self.owner is not None:
            self.was = args[0].training
            args[0].training = self.was and self.owner.is_lifted


class _Moving(Hook[_Still]):
    """After it: the mode that it had."""

    def __init__(self, owner: _Still | None, path: str = "") -> None:
        super().__init__(owner, path)

    def __call__(self, *args: Any) -> None:
        if self.owner is not None:
            args[0].training = self.owner.was


def _has_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None
