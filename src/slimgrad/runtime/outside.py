"""`with run:`: the gate extended over what is computed outside the model, such as a loss over a large vocabulary."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slimgrad.codecs import Demand
from slimgrad.errors import SlimgradWarning
from slimgrad.rules import At, Rule
from slimgrad.runtime.frame import Frame, WorkFrame
from slimgrad.runtime.graph import tensors_in
from slimgrad.runtime.lesson import Lesson, lesson, owners_of
from slimgrad.runtime.orders import Structure, seal_held, structure
from slimgrad.runtime.watch import WatchFrame
from slimgrad.spec import OUTSIDE, Need


class Witness(TorchFunctionMode):
    """Remembers, without keeping them alive, the tensors that torch functions return: the loss is one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.seen.extend(weakref.ref(tensor) for tensor in tensors_in(result, depth=2) if tensor.requires_grad)
        return result

    def roots(self) -> list[Any]:
        return [tensor.grad_fn for ref in self.seen if (tensor := ref()) is not None]


def _speaks_of_outside(rule: Rule) -> bool:
    """Whether a loss would have something of it."""
    is_meant = rule.where == "*" or (
        isinstance(rule.where, At) and any(path == OUTSIDE for path, _, _ in rule.where.keys)
    )
    return is_meant and rule.codec.serves(Demand(need=Need.VALUES), torch.float32)


TOO_LATE = (
    "`with run:` held a backward as well, so what was saved outside the model could not be learnt, and is kept as it "
    "is. End the block where the loss is computed: `with run: loss = loss_fn(model(x), y)`, and then `loss.backward()`"
)


class Outside:
    """The part of `with run:` that lies outside the model. Learnt when the first block ends, then worked."""

    def __init__(self, model: nn.Module, rules: Sequence[Rule], min_bytes: int | None) -> None:
        self._model = model
        self._rules = tuple(rules)
        self._min_bytes = min_bytes
        self._threads = threading.local()
        self._taught: Lesson | None = None
        self._learnt: Structure | None = None
        self._has_warned = False

    @property
    def frame(self) -> Frame | None:
        """The frame of the block this thread is in."""
        return getattr(self._threads, "frame", None)

    def begin(self) -> None:
        if self.frame is not None or not torch.is_grad_enabled():
            return
        if self._learnt is None:
            frame: Frame = WatchFrame()
            self._threads.witness = Witness()
            self._threads.witness.__enter__()
        elif self._learnt.calls:
            frame = WorkFrame(self._learnt.calls, {OUTSIDE: True})
        else:
            return  # nothing outside the model can be packed: leave it to autograd
        self._threads.frame = frame
        frame.enter(OUTSIDE)

    def pause(self) -> None:
        """The model's forward begins: what it saves is not outside, and what follows it belongs to a new step."""
        if self.frame is not None:
            self.frame.restart()
            self.frame.pause()

    def resume(self) -> None:
        """The model's forward has ended."""
        if self.frame is not None:
            self.frame.resume()

    def end(self, *, failed: bool) -> None:
        frame, witness = self.frame, getattr(self._threads, "witness", None)
        self._threads.frame = self._threads.witness = None
        if witness is not None:
            witness.__exit__(None, None, None)
        if frame is None:
            return
        frame.close()
        if not isinstance(frame, WatchFrame) or failed:
            return
        if not frame.reader.opened:
            self._learn(frame, witness.roots() if witness is not None else [])
        elif not self._has_warned and any(map(_speaks_of_outside, self._outside_rules())):
            self._has_warned = True
            warnings.warn(TOO_LATE, SlimgradWarning, stacklevel=4)

    def _learn(self, frame: WatchFrame, roots: list[Any]) -> None:
        if not frame.records:
            return
        self._taught = lesson(frame, roots, owners_of(self._model, ()), {}, {})
        self._learnt = self._decided(self._taught)
        seal_held(frame, self._taught, self._learnt)

    def follow(self, rules: Sequence[Rule]) -> None:
        """Other rules from the next block on."""
        self._rules = tuple(rules)
        if self._taught is not None:
            self._learnt = self._decided(self._taught)

    def _decided(self, taught: Lesson) -> Structure:
        return structure(taught, self._outside_rules(), {}, min_bytes=self._min_bytes, all_here=False)

    def _outside_rules(self) -> tuple[Rule, ...]:
        """Rules by class or path belong to modules; only these can speak of what is outside."""
        return tuple(rule for rule in self._rules if rule.where == "*" or not isinstance(rule.where, (str, type)))
