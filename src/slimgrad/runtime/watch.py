"""Watching a forward: every tensor that is saved, with the module call that saves it."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint

from slimgrad.codecs import Demand
from slimgrad.kernels import is_dense_layout
from slimgrad.runtime.frame import ASIDE, Calls, Frame, Scope, innermost_hook, storage_of, view_of
from slimgrad.runtime.tickets import (
    Held,
    Kept,
    Order,
    Origin,
    Reader,
    Sealed,
    Ticket,
    is_output,
    origin,
    producer_name,
    sequence_number,
)
from slimgrad.runtime.views import leaf_copied
from slimgrad.runtime.ways import Passage, passage

Chain = tuple[tuple[str, int], ...]
"""The module calls that are under way, outermost first: (path, which call of that module)."""


@dataclass(frozen=True, eq=False)
class Record:
    """One tensor that was saved while watching."""

    held: weakref.ref[Held]
    number: int
    """Its place among all tensors saved in this forward."""
    path: str
    call: int
    index: int
    sequence: int
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    producer: str | None
    is_output: bool
    """Whether the node that saves it also made it."""
    view: tuple[Any, ...]
    """Which part of its storage it is."""
    version: int
    is_tracked_view: bool
    """Whether it has the version counter of its base; the parts of `unsafe_chunk`, as in LSTM cells, have their own."""
    leaf: Any
    """The leaf tensor behind views and casts, if any."""
    storage: StorageWeakRef
    storage_bytes: int
    origin: Origin | None
    """Which output of which node it is a copy of in another dtype, if it is one."""
    passage: Passage | None
    """How it could be made again, as far as its own graph tells."""
    boundary: bool
    """Whether torch.utils.checkpoint saves it as an input of a region; its node hangs in no graph we could walk."""

    @property
    def key(self) -> tuple[str, int, int]:
        """As Site.key."""
        return self.path, self.call, self.index

    @property
    def bytes(self) -> int:
        return int(self.shape.numel()) * self.dtype.itemsize

    @property
    def region(self) -> Any:
        """The elements of the storage that its view covers: a span, or the view itself where it has gaps."""
        offset, shape, stride = self.view
        return (self.dtype, offset, shape.numel()) if is_dense_layout(shape, stride) else self.view

    @property
    def content(self) -> Any:
        """The same for two tensors that hold the very same elements: in one memory, or copied from one tensor."""
        if self.origin is not None:
            return self.origin, *self.view[1:], self.dtype, self.device
        return self.storage_id, self.version, self.region

    @property
    def storage_id(self) -> int:
        return int(self.storage.cdata)


class WatchFrame(Frame):
    """Sees everything; packs what is ordered already, so that a watched forward need not be a large one."""

    def __init__(self, calls: Calls | None = None, borders: Mapping[str, bool] | None = None) -> None:
        super().__init__(calls or {}, borders or {})
        self.fused = []
        self.first = sequence_number()
        self.reader = Reader()
        self.records: list[Record] = []
        self.refuted: list[str] = []
        """Sites that did not come out the same when they were made again."""
        self.trail: list[Chain] = []
        """For each tensor saved, in order, where that was."""
        self._chains: list[Chain] = [()]
        self._saving: set[int] = set()
        self._saved: dict[tuple[str, int], int] = {}

    def enter(self, path: str) -> None:
        if innermost_hook() is not self._expected:
            self.stack.append((path, ASIDE, self.scope))
            self._chains.append(self._chains[-1])
            return
        call = self.counts.get(path, 0)
        self.counts[path] = call + 1
        anchor = self.borders.get(path)
        scope = self.scope if anchor is None else None
        if anchor:
            scope = Scope(path, call, self.calls.get((path, call), ()))
        self.stack.append((path, scope, self.scope))
        self._chains.append((*self._chains[-1], (path, call)))
        self.scope = scope
        if not self._on:
            self._switch(True)

    def leave(self, path: str) -> None:
        super().leave(path)
        del self._chains[len(self.stack) + 1 :]

    def wants_hooks(self) -> bool:
        return bool(self.stack)

    def restart(self) -> None:
        super().restart()
        self.fused = []
        self.records.clear()
        self.trail.clear()
        self._saved.clear()

    def pack(self, tensor: Tensor) -> Ticket:
        chain = self._chains[-1]
        path, call = chain[-1]
        index = self._saved.get(chain[-1], 0)
        self._saved[chain[-1]] = index + 1
        self.trail.append(chain)
        ticket = self.ticket(tensor)
        storage = storage_of(tensor)
        if storage is None:
            return ticket
        boundary = _saved_by_checkpoint()
        found = self._passage(tensor, boundary)
        held = Held(ticket, self.reader, None if found is None else tensor.grad_fn)
        self.records.append(
            Record(
                held=weakref.ref(held),
                number=len(self.trail) - 1,
                path=path,
                call=call,
                index=index,
                sequence=_saving_node(tensor),
                shape=tensor.shape,
                dtype=tensor.dtype,
                device=tensor.device,
                producer=producer_name(tensor),
                is_output=is_output(tensor),
                view=view_of(tensor),
                version=tensor._version,
                is_tracked_view=tensor._base is not None,
                leaf=_leaf(tensor),
                storage=StorageWeakRef(storage),
                storage_bytes=storage.nbytes(),
                origin=origin(tensor),
                passage=found,
                boundary=boundary,
            )
        )
        if not self.records[-1].boundary:
            self._saving.add(self.records[-1].sequence)
        return held

    def seal(self, tensor: Tensor, order: Order, demand: Demand, source: Origin | None = None) -> Kept | Sealed:
        """What was learnt on fake tensors is compared here, the first time that there are real ones."""
        derivation = demand.derivation
        is_sure = not order.derives or derivation is None or not derivation.exact or tensor.grad_fn is None
        if not (is_sure or derivation.comes_out(tensor)):  # type: ignore[union-attr]
            self.refuted.append(order.site.name)
            return Kept(tensor)
        return super().seal(tensor, order, demand, source)

    def _passage(self, tensor: Tensor, boundary: bool) -> Passage | None:
        """Not for what its own node saves; nor where orders are known, which were made by what was found before."""
        if self.calls or tensor.grad_fn is None or (is_output(tensor) and not boundary):
            return None
        return passage(tensor, self._saves)

    def _saves(self, node: Node, slot: str) -> bool:
        """Only nodes that saved something here are asked: one of a checkpointed region would run that region again."""
        return node._sequence_nr() in self._saving and bool(self.reader.read(node, f"_saved_{slot}"))


def _leaf(tensor: Tensor) -> Any:
    """The leaf behind views and casts; a frozen parameter has no graph, but its views know their base."""
    if tensor.requires_grad:
        return leaf_copied(tensor)
    base = tensor if tensor._base is None else tensor._base
    return base if isinstance(base, nn.Parameter) else None


def _saving_node(tensor: Tensor) -> int:
    """The sequence number of the node that saves the tensor right now.

    It is the newest, except where an in-place op (hardtanh_, silu_, ...) saves a clone of its input: the clone has a
    node too, made after that of the op.
    """
    newest = sequence_number() - 1
    return newest - 1 if producer_name(tensor) == "CloneBackward0" and is_output(tensor) else newest


def _saved_by_checkpoint() -> bool:
    """Whether the Python code that saves right now is torch.utils.checkpoint's."""
    caller: FrameType | None = sys._getframe(2)
    for _ in range(2):  # its Function is applied through torch/autograd/function.py
        if caller is not None and caller.f_code.co_filename == checkpoint.__file__:
            return True
        caller = None if caller is None else caller.f_back
    return False


@contextmanager
def watched(model: nn.Module, frame: WatchFrame) -> Iterator[None]:
    """Module hooks that tell the frame where the forward is; gone afterwards, as are the saved-tensor hooks."""
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(frame, path), prepend=True))
        handles.append(module.register_forward_hook(_leave(frame, path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        frame.close()


def _enter(frame: WatchFrame, path: str) -> Any:
    return lambda module, args: frame.enter(path)


def _leave(frame: WatchFrame, path: str) -> Any:
    return lambda module, args, output: frame.leave(path)
