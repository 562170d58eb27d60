"""Modules whose forward an op of ours stands in for, while a run is active.

NOTE [The first forward is the model's own]
What a step kept before slimgrad can be counted only where it is kept: so the first forward of each structure runs the
modules' own code, is watched, and tells which bytes each such module holds alone. The second one runs the ops and is
watched too, because other tensors are saved then; all others are worked. With `apply(..., batch=...)` both lessons are
learnt on fake tensors. Where the gate stands aside (a checkpointed region, compiled code), the ops always run: what is
computed again there must be what was computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slimgrad.ops.modules import Op, demand_of, op_for
from slimgrad.rules import Rule
from slimgrad.runtime.frame import innermost_hook
from slimgrad.runtime.lesson import Lesson
from slimgrad.runtime.orders import least_bytes
from slimgrad.spec import Need, Site

FORWARD = "forward"


@dataclass(frozen=True)
class Stock:
    """What the modules themselves keep, per element of their input: for the ledger's 'before'."""

    alone: Mapping[str, float]
    """Path -> bytes of storages that nobody else keeps."""
    views: Mapping[str, float]
    """Path -> bytes of all that is saved there."""


class Inert:
    """What stands in the place of a Swap on a copy of the model: the module's own forward."""

    __slots__ = ("module",)

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.module).forward(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Inert:
        return Inert(memo.get(id(self.module), self.module))

    def __reduce__(self) -> tuple[Any, ...]:
        return Inert, (self.module,)


class Swap(Inert):
    """Stands as `forward` in a module's own dictionary."""

    __slots__ = ("gains", "local", "op", "rule", "site")

    def __init__(self, module: nn.Module, site: Site, op: Op[Any], rule: Rule, local: Any) -> None:
        super().__init__(module)
        self.site = site
        self.op = op
        self.rule = rule
        self.local = local
        self.gains: bool | None = None
        """Whether less is kept by it; None as long as nobody has looked."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        op = self.op
        if self.gains is False or not op.takes(args, kwargs):
            return super().__call__(*args, **kwargs)
        if torch.compiler.is_compiling():
            return op(args[0])
        frame = self.local.frame
        if frame is None or innermost_hook() is not frame.hook:
            return op(args[0])
        if frame.stock:
            op.observe(args[0])
            return super().__call__(*args, **kwargs)
        if frame.fused is not None:
            frame.fused.append((self.site.path, args[0].numel()))
        return op(args[0])


class Swaps:
    """All swaps of one model under one set of rules."""

    def __init__(self, modules: Mapping[str, nn.Module], rules: Sequence[Rule], local: Any) -> None:
        self._rules = rules
        self._local = local
        self._all: dict[str, Swap] = {}
        self._is_in = False
        self.look(modules)

    @property
    def rules(self) -> set[Rule]:
        """Those that are followed by a swap."""
        return {swap.rule for swap in self._all.values()}

    @property
    def paths(self) -> list[str]:
        return list(self._all)

    def __bool__(self) -> bool:
        return any(swap.gains is not False for swap in self._all.values())

    def __getitem__(self, path: str) -> Swap:
        return self._all[path]

    def look(self, modules: Mapping[str, nn.Module]) -> None:
        """See which modules there are now."""
        was_in = self._is_in
        gone = [path for path, swap in self._all.items() if modules.get(path) is not swap.module]
        for path in gone:
            self._take_out(self._all.pop(path))
        for path, module in modules.items():
            if path not in self._all and (swap := self._made(path, module)) is not None:
                self._all[path] = swap
        if was_in:
            self.put_in()

    def _made(self, path: str, module: nn.Module) -> Swap | None:
        """By the first rule that selects the module with a codec that can serve it; one that is wrapped stays."""
        demand = None if FORWARD in module.__dict__ else demand_of(module)
        if demand is None:
            return None
        site = Site(
            path=path,
            module=type(module).__name__,
            call=0,
            index=0,
            node=FORWARD,
            slot="input",
            need=Need.DERIVATIVE,
            fn=demand.fn,
            detail=demand.detail,
            shape=(),
            dtype="float32",
            bytes=0,
            storage=0,
        )
        for rule in self._rules:
            if rule.selects(site, module) and rule.codec.serves(demand, torch.float32):
                op = op_for(module, rule.codec)
                return None if op is None else Swap(module, site, op, rule, self._local)
        return None

    def put_in(self) -> None:
        for swap in self._all.values():
            swap.op.prepare()
        self._is_in = True  # only now: what cannot be prepared leaves nothing half-applied
        for swap in self._all.values():
            swap.module.__dict__[FORWARD] = swap

    def take_out(self) -> None:
        self._is_in = False
        for swap in self._all.values():
            self._take_out(swap)

    def _take_out(self, swap: Swap) -> None:
        if swap.module.__dict__.get(FORWARD) is swap:
            del swap.module.__dict__[FORWARD]

    def learn(self, lesson: Lesson, min_bytes: int | None, derived: Collection[str] = ()) -> Stock:
        """What the modules keep by themselves. Those that hold no more alone than an op would are left alone: what a
        Tanh returns, the product behind it keeps as well. So are those with less than `min_bytes`, and those at the
        paths of which all that they keep is `derived`.
        """
        elements, views, large = Counter[str](), Counter[str](), set()
        for (path, _), numel in _inputs(lesson).items():
            elements[path] += numel
        for record in lesson.records:
            views[record.path] += record.bytes
            if record.bytes >= least_bytes(record.device, min_bytes):
                large.add(record.path)
        found = [path for path in self._all if elements[path]]
        owned = _owned(lesson)
        large -= set(derived)
        gaining = self._gaining({path: elements[path] for path in found if path in large}, owned)
        for path in found:
            self._decide(self._all[path], path in gaining)
        alone = Counter[str]()
        for paths, size in owned:
            if gaining.issuperset(paths):
                alone[paths[0]] += size  # of several, it counts for the first
        return Stock({p: alone[p] / elements[p] for p in found}, {p: views[p] / elements[p] for p in found})

    def _gaining(self, elements: Mapping[str, int], owned: Sequence[tuple[Sequence[str], int]]) -> set[str]:
        """The paths where ops keep less than is then freed; what several share is freed if all of them let go."""
        gaining = {path for path in elements if self._all[path].gains is not False}
        while True:
            freed = Counter[str]()
            for paths, size in owned:
                if gaining.issuperset(paths):
                    freed.update({path: size // len(paths) for path in paths})
            lost = {path for path in gaining if freed[path] <= self._all[path].op.kept(elements[path])}
            if not lost:
                return gaining
            gaining -= lost

    def _decide(self, swap: Swap, gains: bool) -> None:
        """Once: what is learnt later builds on it."""
        if swap.gains is None:
            swap.gains = gains
            swap.op.prepare()


def _owned(lesson: Lesson) -> list[tuple[tuple[str, ...], int]]:
    """Of each storage that autograd keeps: the modules that keep it, and its bytes."""
    profile = lesson.profile
    return [
        (tuple(dict.fromkeys(profile.sites[saver].path for saver in storage.savers)), storage.bytes)
        for storage in profile.storages
        if storage.counted
    ]


def _inputs(lesson: Lesson) -> dict[tuple[str, int], int]:
    """(path, call) -> the elements of what a module was given: as many as its largest saved tensor has."""
    found: dict[tuple[str, int], int] = {}
    for record in lesson.records:
        key = record.path, record.call
        found[key] = max(found.get(key, 0), int(record.shape.numel()))
    return found


def drop_inert_swaps(model: nn.Module) -> None:
    """Take away what is left of a run on a copy of a treated model."""
    for module in model.modules():
        if type(module.__dict__.get(FORWARD)) is Inert:
            del module.__dict__[FORWARD]
