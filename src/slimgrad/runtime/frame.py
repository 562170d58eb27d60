"""One forward of one model in one thread: where we are in it, and what is saved there.

NOTE [Two kinds of frame]
A WatchFrame (watch.py) sees every tensor that is saved, under hooks on every module: it is how roles are learnt and
bytes are counted. It runs in the first forward, and once more whenever the model meets new shapes, to count them. A
WorkFrame runs in all other forwards; its hooks are active only inside modules that have something to pack, so that
everything else costs what stock autograd costs.

NOTE [Whose hooks are on top]
Only the innermost pair of saved-tensor hooks applies. Where somebody else's pair is on top (torch.utils.checkpoint,
save_on_cpu), entering ours would switch theirs off silently; a frame then stands aside until that region is left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slimgrad.codecs import Demand, Packed
from slimgrad.kernels import is_dense
from slimgrad.runtime.tickets import (
    Kept,
    Latest,
    Order,
    Origin,
    Sealed,
    Shared,
    Sharing,
    Ticket,
    origin,
    producer_name,
    unpack,
)
from slimgrad.spec import Need

_top_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks

ROOT = ""
"""The model's own path."""

MOST_PENDING = 2
"""Tensors that may be held because it is not known yet whether what was packed of them is complete."""

WITHOUT_PAYLOAD = (Need.NOTHING, Need.WEIGHT)
"""Needs for which nothing is stored, so that nothing can be shared."""

Calls = Mapping[tuple[str, int], tuple[Order | None, ...]]
"""The orders of each call of an anchor, one entry per tensor that is saved in it."""


class Scope:
    """One call of an anchor (see anchors.py): counts the tensors that are saved in it, and has an order for some."""

    __slots__ = ("call", "index", "orders", "path", "shapes")

    def __init__(self, path: str, call: int, orders: tuple[Order | None, ...]) -> None:
        self.path = path
        self.call = call
        self.orders = orders
        self.index = 0
        self.shapes: list[torch.Size] = []


class _Aside:
    """Stands on the stack for a module call in which this frame does nothing."""


ASIDE = _Aside()


class Frame(ABC):
    """The stack of module calls, and our hooks switched on and off with it.

    `borders` says for each module path whether tensors saved by that module itself are ours to see; where it says
    nothing, nothing changes at that module's border.
    """

    stock = False
    """Whether modules run their own forward, whatever stands in its place."""
    fused: list[tuple[str, int]] | None = None
    """While watching: (path, elements) of each module that an op of ours computed."""

    def __init__(self, calls: Calls, borders: Mapping[str, bool]) -> None:
        self.calls = calls
        self.borders = borders
        self.stack: list[tuple[str, Scope | _Aside | None, Scope | None]] = []
        """Path, its scope, and the scope to go back to."""
        self.scope: Scope | None = None
        self.counts: dict[str, int] = {}
        self.surprises: list[str] = []
        self._shared: dict[Any, tuple[StorageWeakRef | None, Shared]] = {}
        self._latest = Latest(Latest.UNPACKED)
        self._made = Latest(Latest.MADE)
        self._pending: deque[Packed] = deque()
        self._pack = self.pack  # one object, so that torch's stack can be compared by identity
        self._on = False
        self._below = innermost_hook()
        self._expected = self._below
        """The hook that is innermost now unless somebody else's is."""

    @property
    def hook(self) -> Any:
        """The pack hook that is innermost now, unless somebody else's is."""
        return self._expected

    # --- where we are ---

    def enter(self, path: str) -> None:
        active = self.borders.get(path)
        if active is None or innermost_hook() is not self._expected:
            self.stack.append((path, ASIDE, self.scope))
            return
        call = self.counts.get(path, 0)
        self.counts[path] = call + 1
        scope = Scope(path, call, self.calls.get((path, call), ())) if active else None
        self.stack.append((path, scope, self.scope))
        self.scope = scope
        if active is not self._on:
            self._switch(active)

    def leave(self, path: str) -> None:
        """Leave the innermost call of `path`, and with it any call inside whose own leaving was missed."""
        stack = self.stack
        if not stack or stack[-1][0] != path:
            if all(entered != path for entered, _, _ in stack):
                return
            while stack[-1][0] != path:
                stack.pop()
        _, scope, self.scope = stack.pop()
        if isinstance(scope, Scope) and scope is not self.scope and scope.index < len(scope.orders):
            self.surprises.append(f"{path or 'the model'} saved {scope.index} tensors, not {len(scope.orders)}")
        if scope is not ASIDE and self.wants_hooks() is not self._on:
            self._switch(not self._on)

    def wants_hooks(self) -> bool:
        """Whether what is saved here is ours to see."""
        return self.scope is not None

    def close(self) -> None:
        """Switch our hooks off, whatever happened inside."""
        self.stack.clear()
        self.scope = None
        if self._on:
            self._switch(False)
        self._shared.clear()

    def pause(self) -> None:
        """Let another frame have the floor, as the model's inside `with run:`."""
        if self._on:
            self._switch(False)

    def resume(self) -> None:
        if self.wants_hooks() and not self._on:
            self._switch(True)

    def restart(self) -> None:
        """Count from the start of the current scope again."""
        if self.scope is not None:
            self.scope.index = 0
            self.scope.shapes.clear()

    def _switch(self, on: bool) -> None:
        if on:
            _push_hooks(self._pack, unpack)
        elif innermost_hook() is self._pack:
            _pop_hooks()
        self._on = on
        self._expected = self._pack if on else self._below

    # --- what is saved there ---

    @abstractmethod
    def pack(self, tensor: Tensor) -> Ticket:
        """The pack hook."""

    def ticket(self, tensor: Tensor) -> Kept | Sealed:
        """The ticket that the orders of the current call ask for."""
        scope = self.scope
        if scope is None:
            return Kept(tensor)
        index, orders = scope.index, scope.orders
        scope.index = index + 1
        scope.shapes.append(tensor.shape)
        order = orders[index] if index < len(orders) else None
        if order is None:
            return Kept(tensor)
        if not order.matches(tensor):
            self.surprises.append(
                f"{order.site.name}: expected {order.site.dtype} of rank {len(order.site.shape)} made by "
                f"{order.site.producer}, found {tensor.dtype} of rank {tensor.dim()} made by {producer_name(tensor)}"
            )
            return Kept(tensor)
        return self.seal(tensor, order, order.demand_for(scope.shapes))

    def seal(self, tensor: Tensor, order: Order, demand: Demand, source: Origin | None = None) -> Kept | Sealed:
        """Pack the tensor as ordered; a storage already packed the same way in this forward is packed once.

        `source` is what the tensor is a copy of, where its own graph cannot tell any more.
        """
        if order.alone or demand.need in WITHOUT_PAYLOAD:
            return Sealed(order, self._start(tensor, order, demand))
        if order.sharing is Sharing.COPIES:
            return self._seal_copy(tensor, order, demand, source or origin(tensor))
        if order.elementwise:
            return self._seal_elements(tensor, order, demand)
        storage = tensor.untyped_storage()
        sized_by = demand.key if order.sibling is not None else None
        key = (storage._cdata, tensor._version, view_of(tensor), order.family, sized_by)
        return Sealed(order, (self._known(key) or self._pack_shared(key, storage, tensor, order, demand)).packed)

    def _start(self, tensor: Tensor, order: Order, demand: Demand) -> Packed:
        """Pack; and settle what was packed before, as far as nobody has to wait, and all but the last MOST_PENDING."""
        packed = order.codec.start(tensor, demand)
        pending = self._pending
        if packed.pending is not None:
            pending.append(packed)
        while pending and (len(pending) > MOST_PENDING or pending[0].pending is None or pending[0].pending.ready):
            pending.popleft().settle()
        return packed

    def _known(self, key: Any) -> Shared | None:
        """What was packed under this key in this forward, if the storage it was packed from is still alive.

        The weak reference keeps the storage's identity from being reused, not its memory. What has no storage in its
        key needs none.
        """
        storage, shared = self._shared.get(key, (None, None))
        return None if storage is not None and storage.expired() else shared

    def _pack_shared(
        self, key: Any, storage: torch.UntypedStorage | None, tensor: Tensor, order: Order, demand: Demand
    ) -> Shared:
        latest = self._made if order.reads_besides else self._latest
        shared = Shared(self._start(tensor, order, demand), latest)
        self._shared[key] = (None if storage is None else StorageWeakRef(storage), shared)
        return shared

    def _seal_elements(self, tensor: Tensor, order: Order, demand: Demand) -> Sealed:
        """The same where shape and strides are nothing to the codec."""
        shape, stride, offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        storage = tensor.untyped_storage()
        key: tuple[Any, ...] = (storage._cdata, tensor._version, order.family)
        whole = order.sharing is Sharing.WHOLE
        dense = not whole and is_dense(tensor)
        if not whole:
            key += (offset, shape.numel()) if dense else (offset, shape, stride)
        shared = self._known(key)
        if shared is None:
            if whole:
                tensor = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            shared = self._pack_shared(key, storage, tensor, order, demand)
        packed = shared.packed
        if whole:
            return Sealed(order, packed, shared, (shape, stride, offset))
        other = dense and (packed.layout.shape != shape or packed.layout.stride != stride)
        return Sealed(order, packed, shared, (shape, stride, 0) if other else None)

    def _seal_copy(self, tensor: Tensor, order: Order, demand: Demand, source: Origin | None) -> Sealed:
        if source is None:
            return Sealed(order, self._start(tensor, order, demand))
        key = ("copy of", source, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, order.family)
        shared = self._known(key) or self._pack_shared(key, None, tensor, order, demand)
        return Sealed(order, shared.packed, shared if order.elementwise else None)


class WorkFrame(Frame):
    """Packs what is ordered, where it is ordered, and leaves the rest to autograd."""

    pack = Frame.ticket


def innermost_hook() -> Any:
    """The pack hook that applies now, or None."""
    top = _top_hooks(True)
    return None if top is None else top[0]


def view_of(tensor: Tensor) -> tuple[Any, ...]:
    """Which part of its storage the tensor is."""
    return tensor.storage_offset(), tensor.shape, tensor.stride()


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The tensor's storage; None for sparse, nested and other kinds that have none of their own."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return None
