"""Clock: sees every operator of a step on fake tensors, and counts the bytes that are alive.

NOTE [Autograd adds in place, but not to fake tensors]
Where two gradients flow into one tensor, the engine adds one to the other in place if nobody else holds that one; with
subclasses and dispatch modes it never does. The Clock adds in place for it, by the same conditions. How many references
there are to a gradient that only the engine holds, seen from a dispatch mode, is found by trying.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slimgrad.kernels import is_dense
from slimgrad.profiler.operators import told
from slimgrad.runtime.frame import storage_of

aten = torch.ops.aten

GATHERS = frozenset((aten.embedding, aten.index_select, aten.gather, aten.index))
"""Operators that read no more of their first argument than they write."""
OPAQUE = frozenset((aten.mkldnn_rnn_layer, aten._cudnn_rnn, aten.miopen_rnn))
"""Fused recurrent kernels: they take a workspace of a size that only the kernel knows."""


ROOMY = frozenset((aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy, aten.soft_margin_loss))
"""Losses whose mean or sum stays in memory that was taken for one element of each of theirs."""


@dataclass(eq=False)
class Block:
    """A storage that was born in the step."""

    bytes: int
    born: int
    died: int | None = None
    """The first event without it."""


class Clock(TorchDispatchMode):
    """Sees every operator that runs: one event for each that makes or changes something."""

    def __init__(self, owned: Mapping[int, str], single: tuple[int, int] | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owned = owned
        """Storages that are there before the step."""
        self.floor: list[int] = []
        self.flops: list[int] = []
        self.moved: list[int] = []
        self.made: list[int] = []
        self.operators: list[str] = []
        """What each event runs, as text."""
        self._single = single
        self._blocks: dict[int, Block] = {}
        self._live = 0
        self._aside = False
        self._stopped = False

    @property
    def now(self) -> int:
        """The event that comes next."""
        return len(self.floor)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For what is no part of the step."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._aside or _is_idle(func):
            return func(*args, **kwargs)
        if func.overloadpacket in OPAQUE:
            raise NotImplementedError(f"the memory that {func.overloadpacket} takes is not known before it runs")
        if func is aten.add.Tensor and self._only_the_engine_holds(args, kwargs):
            result = args[0].add_(args[1])
        else:
            result = func(*args, **kwargs)
        self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = list(_tensors(result))
        fresh = [storage for tensor in made if (storage := storage_of(tensor)) is not None and self._is_new(storage)]
        sizes = [max(storage.nbytes(), _room(func, args)) for storage in fresh]
        for storage, size in zip(fresh, sizes, strict=True):
            self.born(storage, size)
        if fresh or func._schema.is_mutable or func is aten.add.Tensor:
            self.floor.append(self._live)
            self.flops.append(_flops(func, args, kwargs, result))
            self.made.append(sum(sizes))
            self.operators.append(told(func, args, kwargs))
            self.moved.append(_moved(func, [*_tensors(args), *_tensors(kwargs.values())], made))

    def _is_new(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata not in self._blocks and storage._cdata not in self.owned

    def born(self, storage: torch.UntypedStorage, size: int) -> None:
        """Count a storage from now on until it dies."""
        key = storage._cdata
        if key not in self._blocks:
            self._blocks[key] = Block(size, self.now)
            self._live += size
            weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._live -= block.bytes
        block.died = self.at_death()

    def at_death(self) -> int | None:
        """The event before which something dies; None after the step."""
        return None if self._stopped else self.now

    def stop(self) -> None:
        self._stopped = True

    def block(self, storage: torch.UntypedStorage) -> Block | None:
        return self._blocks.get(storage._cdata)

    def _only_the_engine_holds(self, args: Any, kwargs: Any) -> bool:
        """Whether stock autograd would add in place: see NOTE [Autograd adds in place, but not to fake tensors]."""
        if self._single is None or torch.is_grad_enabled() or kwargs or torch._C._current_autograd_node() is None:
            return False
        old, new = args
        if not isinstance(new, Tensor) or old.shape != new.shape or old.dtype != new.dtype:
            return False
        return _holders(old) == self._single and is_dense(old)


@lru_cache(maxsize=4096)
def _is_idle(func: Any) -> bool:
    """Whether an operator touches no memory: views, and questions about devices."""
    return bool(func.is_view) or func is torch.ops.prim.device.default


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors among an operator's arguments or results."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Iterable) and not isinstance(value, str):
        for item in value:
            yield from _tensors(item)


@cache
def _formulas() -> dict[Any, Callable[..., int]]:
    """Of operators that multiply. Torch's own; they are imported here because they import triton."""
    from torch.utils.flop_counter import flop_registry as known

    attention = aten._scaled_dot_product_flash_attention
    backward = aten._scaled_dot_product_flash_attention_backward
    return {
        **known,
        aten._scaled_dot_product_flash_attention_for_cpu: known[attention],
        aten._scaled_dot_product_flash_attention_for_cpu_backward: known[backward],
    }


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula = _formulas().get(func.overloadpacket)
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except AssertionError:  # shapes that broadcast, which the formulas do not know
        return 0


def _room(func: Any, args: Any) -> int:
    """Bytes of memory that a result stays in; 0 if it has no more than it needs."""
    if func.overloadpacket not in ROOMY:
        return 0
    shape: torch.Size = torch.broadcast_shapes(args[0].shape, args[1].shape)
    return shape.numel() * int(args[0].itemsize)


def _moved(func: Any, read: list[Tensor], written: list[Tensor]) -> int:
    sizes = [_extent(tensor) for tensor in read]
    if func.overloadpacket in GATHERS:
        sizes[0] = min(sizes[0], sum(map(_extent, written)))
    return sum(sizes) + sum(map(_extent, written))


def _extent(tensor: Tensor) -> int:
    """Bytes of memory behind a tensor; elements that are repeated by strides of 0 are there once."""
    elements = 1
    for size, step in zip(tensor.shape, tensor.stride(), strict=True) if tensor.layout is torch.strided else ():
        elements *= size if step or not size else 1
    return elements * tensor.itemsize


def _holders(tensor: Tensor) -> tuple[int, int]:
    storages: Any = torch._C
    return tensor._use_count(), storages._storage_Use_Count(tensor.untyped_storage()._cdata)  # type: ignore[attr-defined]


class _Holders(TorchDispatchMode):
    """Looks at the first argument of each addition."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: tuple[int, int] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten.add.Tensor and not torch.is_grad_enabled():
            self.seen = _holders(args[0])
        return func(*args, **(kwargs or {}))


@lru_cache(maxsize=1)
def single_holder() -> tuple[int, int] | None:
    """What `_holders` says of a gradient that only the engine holds; None if this torch cannot tell."""
    if not hasattr(Tensor, "_use_count"):
        return None
    mode = _Holders()
    with torch.enable_grad():
        x = torch.ones(2, requires_grad=True) * 2
        loss = (x * 3 + x * 5).sum()
        with mode:
            loss.backward()
    return mode.seen
