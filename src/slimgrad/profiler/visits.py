"""Visits: which modules of a step could be run again in backward or computed by a fused op, and when they ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from slimgrad.ops.modules import groupable_name, is_fusible
from slimgrad.profiler.clock import Block, Clock
from slimgrad.runtime.frame import storage_of
from slimgrad.runtime.lesson import Lesson
from slimgrad.spec.timeline import Region


class Visits:
    """The calls of modules that could be run again in backward, and of those that are one nonlinearity."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._repeated: dict[str, bool] = {}
        """Those with siblings of their class, and whether they stand in a ModuleList, a ModuleDict or a Sequential."""
        self._calls: Counter[str] = Counter()
        self._spans: dict[str, tuple[int, int]] = {}
        """Of the last call of each."""
        self._pointwise: list[Region] = []
        self._given: dict[str, list[Block]] = {}
        self._versions: dict[str, list[int]] = {}
        self._changing: set[str] = set()
        """Those that change in place what they are given: a second run would begin with something else."""

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Watch the calls during the forward."""
        handles = []
        self._repeated = dict(_repeated(model))
        for path, module in model.named_modules():
            if (is_pointwise := is_fusible(module)) or path in self._repeated:
                leave = self._leave(path, is_pointwise=is_pointwise)
                handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
                handles.append(module.register_forward_hook(leave, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Any:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls[path] += 1
            self._spans[path] = self._clock.now, self._clock.now
            tensors = list(_tensors(args, kwargs))
            storages = (storage_of(tensor) for tensor in tensors)
            blocks = (self._clock.block(storage) for storage in storages if storage is not None)
            self._given[path] = list({id(block): block for block in blocks if block is not None}.values())
            self._versions[path] = [tensor._version for tensor in tensors]

        return enter

    def _leave(self, path: str, *, is_pointwise: bool) -> Any:
        def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            start, stop = self._spans[path] = self._spans[path][0], self._clock.now
            if [tensor._version for tensor in _tensors(args, kwargs)] != self._versions[path]:
                self._changing.add(path)
            if is_pointwise:
                groupable = groupable_name(module) is not None
                call = self._calls[path] - 1
                self._pointwise.append(Region(path=path, call=call, start=start, stop=stop, groupable=groupable))

        return leave

    @property
    def pointwise(self) -> tuple[Region, ...]:
        """Every call of a module that is one nonlinearity."""
        return tuple(self._pointwise)

    def regions(self, holding: set[str]) -> tuple[tuple[Region, ...], list[Block]]:
        """All that were called once and hold something, some inside others: members of lists first, and siblings of one
        class where no list is around them or in them. And what they are given.
        """
        once = (path for path, calls in self._calls.items() if calls == 1 and path not in self._changing)
        paths = [path for path in once if path in self._repeated and path in holding]
        listed = {path for path in paths if self._repeated[path]}
        around = {path for inner in listed for path in _above(inner)}
        others = [p for p in paths if p not in around and p not in listed and listed.isdisjoint(_above(p))]
        chosen = listed | _outermost(others)
        spans = {path: span for path, span in self._spans.items() if path in chosen and span[0] < span[1]}
        given = {id(block): block for path in spans for block in self._given[path]}
        places = {key: place for place, key in enumerate(given)}
        regions = (
            Region(path=p, call=0, start=start, stop=stop, given=tuple(places[id(b)] for b in self._given[p]))
            for p, (start, stop) in spans.items()
        )
        return tuple(regions), list(given.values())


def _tensors(args: Any, kwargs: Any) -> Iterator[Tensor]:
    """What a module is called with, but for objects: a cache of keys and values is not handed to a second run."""
    for argument in (*args, *kwargs.values()):
        for item in argument if isinstance(argument, (list, tuple)) else (argument,):
            if isinstance(item, Tensor):
                yield item


def _repeated(model: nn.Module) -> Iterator[tuple[str, bool]]:
    """Each module with siblings of its class, and whether they stand in a list; torch's own leaves are too small."""
    for path, parent in model.named_modules():
        children = dict(parent.named_children())
        kinds = Counter(type(child) for child in children.values())
        for name, child in children.items():
            is_leaf = type(child).__module__.startswith("torch.nn.") and not any(True for _ in child.children())
            if kinds[type(child)] > 1 and not is_leaf:
                listed = isinstance(parent, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
                yield f"{path}.{name}" if path else name, listed


def holding_in(lesson: Lesson) -> set[str]:
    """The modules during whose first call something is saved that is autograd's own."""
    profile = lesson.profile
    own = (r for r, site in zip(lesson.records, profile.sites, strict=True) if profile.storages[site.storage].counted)
    return {path for record in own for path, call in lesson.trail[record.number] if call == 0}


def _outermost(paths: Iterable[str]) -> set[str]:
    found = set(paths)
    return {path for path in found if found.isdisjoint(_above(path))}


def _above(path: str) -> Iterator[str]:
    """The modules around it."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path
