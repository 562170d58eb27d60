"""Forwards of a model under way, and the module hooks by which its gate knows of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from slimgrad.runtime.frame import Frame
from slimgrad.runtime.lesson import Owners

if TYPE_CHECKING:
    from slimgrad.runtime.gate import Gate


class Opening:
    """One forward of the model, from its pre-hook to its post-hook; `frame` is None where the gate stands aside."""

    __slots__ = ("allocated", "audit_key", "caller", "frame", "key", "nested", "owners")

    def __init__(self, caller: FrameType, frame: Frame | None = None, *, nested: bool = False) -> None:
        self.caller = caller
        """The model's call in Python: if it is not on the stack any more, an interrupt skipped the post-hook."""
        self.frame = frame
        self.nested = nested
        """Whether the model called itself and the frame is the outer call's."""
        self.key: Any = None
        self.audit_key: Any = None
        self.owners: Owners | None = None
        self.allocated: int | None = None


class Local(threading.local):
    """What each thread has for itself."""

    frame: Frame | None = None
    """The frame of the innermost forward."""
    is_on_fakes = False
    """Whether the model runs on fake tensors, inside a forward that has not begun."""

    def __init__(self) -> None:
        self.openings: list[Opening] = []
        """The model's forwards under way; more than one only if the model calls itself."""


class Border:
    """A module hook. On a copy of the model it is inert: a copy is untouched until something is applied to it."""

    __slots__ = ("action", "gate", "local", "path")

    def __init__(self, gate: Gate | None, path: str, action: str) -> None:
        self.gate = gate
        self.local = None if gate is None else gate.local
        self.path = path
        self.action = action

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if self.local is None or torch.compiler.is_compiling():
            return
        frame = self.local.frame
        if self.action == "enter":
            if frame is not None:
                frame.enter(self.path)
        elif self.action == "leave":
            if frame is not None:
                frame.leave(self.path)
        elif self.action == "open":
            self.gate.open(args, rest[0])  # type: ignore[union-attr]
        else:
            self.gate.shut(rest[0])  # type: ignore[union-attr]

    @property
    def is_inert(self) -> bool:
        return self.gate is None

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Border:
        return Border(None, self.path, self.action)

    def __reduce__(self) -> tuple[Any, ...]:
        return Border, (None, self.path, self.action)


def drop_interrupted(openings: list[Opening], caller: FrameType) -> None:
    """Forget forwards that an interrupt (KeyboardInterrupt skips post-hooks) left open."""
    while openings and not _on_stack(openings[-1].caller, caller):
        stale = openings.pop()
        if stale.frame is not None:
            stale.frame.close()


def _on_stack(wanted: FrameType, innermost: FrameType | None) -> bool:
    while innermost is not None:
        if innermost is wanted:
            return True
        innermost = innermost.f_back
    return False
