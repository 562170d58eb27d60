"""Modules that run again in backward instead of keeping what they save, while a run is active."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slimgrad.codecs import Recompute
from slimgrad.errors import RuleError, SavedTensorModifiedError
from slimgrad.rules import Rule, path_matches
from slimgrad.runtime.swaps import FORWARD, Inert


class Recomputed(Inert):
    """Stands as `forward` in a module's own dictionary."""

    __slots__ = ("_changing",)

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._changing: dict[tuple[bool, ...], list[Shelf]] = {}
        """The buffers that its forward changes, by the modes of the modules in it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        caches = [argument for argument in (*args, *kwargs.values()) if _is_cache(argument)]
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or not all(map(self._is_idle, caches)):
            return super().__call__(*args, **kwargs)
        args, kwargs = tuple(map(_without_cache, args)), {key: _without_cache(kwargs[key]) for key in kwargs}
        return checkpoint(super().__call__, *args, use_reentrant=False, context_fn=self._runs, **kwargs)

    def _is_idle(self, cache: Any) -> bool:
        """Whether nobody will miss it: its part of this module is empty, and in training nobody reads it afterwards.
        Modules before this one may have filled theirs.
        """
        found = [getattr(part, "layer_idx", None) for part in self.module.modules()]
        layers = {layer for layer in found if isinstance(layer, int)} or {0}
        return self.module.training and not any(map(cache.get_seq_length, layers))

    def _runs(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        modes = tuple([module.training for module in self.module.modules()])
        if modes in self._changing:
            before = Before(self._changing[modes])
            return self._later(before, modes), before
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return nullcontext(), nullcontext()  # a lesson, which has no backward
        before = Before(_buffers(self.module))
        return self._first(before, modes), before

    @contextmanager
    def _first(self, before: Before, modes: tuple[bool, ...]) -> Iterator[None]:
        yield
        self._changing[modes] = before.forget_unchanged(_moving(self.module))  # which waits for the device, once

    @contextmanager
    def _later(self, before: Before, modes: tuple[bool, ...]) -> Iterator[None]:
        """Notice those that it changes now and did not then, as a moving average that begins later."""
        known = {(id(buffers), name) for buffers, name in self._changing[modes]}
        others = [shelf for shelf in _buffers(self.module) if (id(shelf[0]), shelf[1]) not in known]
        there = [(shelf, one, one._version) for shelf in others if (one := shelf[0].get(shelf[1])) is not None]
        yield
        for shelf, buffer, version in there:
            now = shelf[0].get(shelf[1])
            if now is not buffer or now._version != version:
                self._changing[modes] = [*self._changing[modes], shelf]
                before.add(Shelved(shelf, buffer, buffer if buffer._version == version else None))


Shelf = tuple[dict[str, Tensor | None], str]
"""A module's dictionary of buffers, and a name in it."""


@dataclass(frozen=True)
class Shelved:
    """A buffer, and what it was; None if nobody knows any more."""

    shelf: Shelf
    buffer: Tensor
    value: Tensor | None

    @property
    def is_changed(self) -> bool:
        """Versions do not tell: batch norms leave that of their statistics as it is."""
        buffers, name = self.shelf
        return buffers.get(name) is not self.buffer or self.value is None or not torch.equal(self.buffer, self.value)

    def again(self) -> Tensor:
        """What it was, for one run."""
        if self.value is None:
            raise SavedTensorModifiedError(
                f"the buffer {self.shelf[1]!r} was changed in place by a forward, for the first time with these modes, "
                "so its module cannot run again as it did. From the next forward on it can: leave this step out, or "
                "exempt the module from Recompute()"
            )
        return self.value.clone()  # where a graph is kept, it may run a third time


class Before:
    """Buffers as they were before a forward, such as running statistics: while this context is open, the module runs
    with them as it did first, and what it makes of them is let go of.
    """

    def __init__(self, shelves: Iterable[Shelf]) -> None:
        there = ((shelf, shelf[0].get(shelf[1])) for shelf in shelves)
        self._all = [Shelved(shelf, one, one.detach().clone()) for shelf, one in there if one is not None]
        self._now: list[Tensor | None] = []

    def add(self, one: Shelved) -> None:
        self._all.append(one)

    def forget_unchanged(self, moving: Collection[int]) -> list[Shelf]:
        """The first run is over: those that it changed, or may change, because they are in such dictionaries."""
        self._all = [one for one in self._all if id(one.shelf[0]) in moving or one.is_changed]
        return [one.shelf for one in self._all]

    def __enter__(self) -> None:
        again = [one.again() for one in self._all]
        self._now = [buffers.get(name) for buffers, name in (one.shelf for one in self._all)]
        for one, value in zip(self._all, again, strict=True):
            buffers, name = one.shelf
            buffers[name] = value

    def __exit__(self, *_: object) -> None:
        for one, buffer in zip(self._all, self._now, strict=True):
            buffers, name = one.shelf
            buffers[name] = buffer
        self._now = []


def _moving(module: nn.Module) -> set[int]:
    """The dictionaries of norms whose statistics move with a batch; or stay, as with a momentum of zero."""
    norms = (part for part in module.modules() if isinstance(part, nn.modules.batchnorm._NormBase))
    return {id(norm._buffers) for norm in norms if norm.training and norm.track_running_stats}


def _buffers(module: nn.Module) -> list[Shelf]:
    return [(part._buffers, name) for part in module.modules() for name in part._buffers]


def _is_cache(argument: Any) -> bool:
    """Whether it is a cache of keys and values. To run again would append to it once more."""
    return any(kind.__name__ == "Cache" for kind in type(argument).__mro__)


def _without_cache(argument: Any) -> Any:
    """Transformers' own checkpointing leaves it out as well."""
    return None if _is_cache(argument) else argument


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
