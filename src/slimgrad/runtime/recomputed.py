"""Modules that run again in backward instead of keeping what they save, while a run is active."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from slimgrad.codecs import Recompute
from slimgrad.errors import RuleError
from slimgrad.rules import Rule, path_matches
from slimgrad.runtime.swaps import FORWARD, Inert


class Recomputed(Inert):
    """Stands as `forward` in a module's own dictionary."""

    __slots__ = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().__call__(*args, **kwargs)
        args, kwargs = tuple(map(_without_cache, args)), {key: _without_cache(kwargs[key]) for key in kwargs}
        return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


def _without_cache(argument: Any) -> Any:
    """None for a cache of keys and values: a second run would append to it once more. Transformers' own checkpointing
    leaves it out as well; in training nobody reads it.
    """
    return None if any(kind.__name__ == "Cache" for kind in type(argument).__mro__) else argument


class Recomputing:
    """All such modules of one model under one set of rules."""

    def __init__(self, modules: Mapping[str, nn.Module], rules: Sequence[Rule]) -> None:
        self.rules = tuple(rule for rule in rules if isinstance(rule.codec, Recompute))
        self._found = {path: Recomputed(modules[path]) for path in _outermost(modules, self.rules)}
        for path, found in self._found.items():
            if FORWARD in found.module.__dict__:
                raise RuleError(
                    f"{path} has a forward that something else put in its place ({found.module.__dict__[FORWARD]!r}), "
                    "so Recompute() cannot stand there; take that away first, or exempt the module"
                )

    @property
    def paths(self) -> list[str]:
        return list(self._found)

    def put_in(self) -> None:
        for found in self._found.values():
            found.module.__dict__[FORWARD] = found

    def take_out(self) -> None:
        for found in self._found.values():
            if found.module.__dict__.get(FORWARD) is found:
                del found.module.__dict__[FORWARD]


def _outermost(modules: Mapping[str, nn.Module], rules: Collection[Rule]) -> list[str]:
    """The modules that rules select, but for those inside others: what runs again runs its inside again too."""
    selected = {
        path for path, module in modules.items() if path and any(_selects(rule, path, module) for rule in rules)
    }
    return [path for path in modules if path in selected and not _is_inside(path, selected)]


def _selects(rule: Rule, path: str, module: nn.Module) -> bool:
    if not _has_forward(module):
        return False  # a list of modules, which nobody calls
    if isinstance(rule.where, type):
        return isinstance(module, rule.where)
    if isinstance(rule.where, str):
        return path_matches(path, rule.where)
    raise RuleError(f"{rule!r}: Recompute() is for modules, so it goes by a path or a class; found {rule.where!r}")


def _has_forward(module: nn.Module) -> bool:
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))


def _is_inside(path: str, others: Collection[str]) -> bool:
    parts = path.split(".")
    return any(".".join(parts[:count]) in others for count in range(1, len(parts)))
