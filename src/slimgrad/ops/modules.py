"""Modules that an op of ours computes in the place of their own forward, and keeps less by."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from slimgrad.codecs import Codec, Demand, FewBit, Quant
from slimgrad.codecs.base import ITSELF
from slimgrad.codecs.fewbit import DATA
from slimgrad.kernels import is_dense
from slimgrad.kernels.codes import code_bytes
from slimgrad.ops.fewbit import FewBitFunction, fewbit_function
from slimgrad.ops.grouped import GroupedFunction, groupable
from slimgrad.spec import Need
from slimgrad.tables.functions import module_function, parameter_names

BINS = 512
"""Of the histogram that a table for the data is made of."""


C = TypeVar("C", bound=Codec)


class Op(ABC, Generic[C]):
    """Stands in the place of a module that is one function."""

    def __init__(self, module: nn.Module, codec: C) -> None:
        self.module = module
        self.codec = codec
        self._attributes = parameter_names(module)
        self._made: tuple[list[Any], Any] | None = None

    def takes(self, args: Sequence[Any], kwargs: Any) -> bool:
        """Whether the op can compute this call; the module itself does where nobody will ask for a gradient."""
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return False
        x = args[0]
        fits = torch.is_grad_enabled() and x.requires_grad and x.is_floating_point() and x.layout is torch.strided
        return fits and (not self._in_place or is_dense(x))

    def observe(self, x: Tensor) -> None:
        """The module's own forward is given x, and will be ours later on."""
        return

    def prepare(self) -> None:
        """What can be made now, a forward should not wait for, and a compiler cannot."""
        return

    def __call__(self, x: Tensor) -> Tensor:
        return self._function()(x, inplace=self._in_place)  # type: ignore[no-any-return]

    @abstractmethod
    def kept(self, elements: int) -> int:
        """Bytes that are kept of so many."""

    @abstractmethod
    def _make(self) -> Any:
        """The function that the module is, as it is computed here; None if it is none of those."""

    def _function(self) -> Any:
        """The same as it is now: the module's parameters may have been changed."""
        now = [getattr(self.module, name) for name in self._attributes]
        if self._made is None or self._made[0] != now:
            self._made = now, self._make()
        return self._made[1]

    @property
    def _in_place(self) -> bool:
        return bool(self.module.__dict__.get("inplace", False))  # getattr takes 2 us to find that there is none


class PointwiseOp(Op[FewBit]):
    """A few-bit function."""

    def __init__(self, module: nn.Module, codec: FewBit) -> None:
        super().__init__(module, codec)
        self._counts: Tensor | None = None

    def observe(self, x: Tensor) -> None:
        if self.codec.weight == DATA and self._made is None:
            low, high = self.codec.interval
            seen = torch.histc(x.detach().float(), BINS, low, high)
            self._counts = seen if self._counts is None else self._counts + seen

    def prepare(self) -> None:
        """Solve the table, if nothing is missing."""
        if self.codec.weight != DATA or self._counts is not None:
            self._function()

    def kept(self, elements: int) -> int:
        return code_bytes(elements, self.codec.bits)

    def _make(self) -> FewBitFunction:
        return fewbit_function(self.module, self.codec.bits, self.codec.interval, self._weight())

    def _weight(self) -> Any:
        counts = None if self._counts is None else self._counts.cpu()
        if counts is None or not counts.any():
            return self.codec.known_weight
        low, high = self.codec.interval
        return torch.linspace(low, high, BINS + 1, dtype=torch.float64), counts


class GroupedOp(Op[Quant]):
    """A function that keeps its input in groups of a few bits."""

    def takes(self, args: Sequence[Any], kwargs: Any) -> bool:
        """No compiler knows it."""
        if torch.compiler.is_compiling() or not super().takes(args, kwargs):
            return False
        function = self._function()
        return function is not None and function.takes(args[0])

    def kept(self, elements: int) -> int:
        return self.codec.groups(ITSELF).nbytes(elements)

    def _make(self) -> GroupedFunction | None:
        name = groupable_name(self.module)
        return None if name is None else GroupedFunction(name, self.codec.groups(ITSELF))


def groupable_name(module: nn.Module) -> str | None:
    """What kernels call the function that a module is, if they have its derivative."""
    function = module_function(module)
    return None if function is None else groupable(function.name, dict(function.parameters))


def demand_of(module: nn.Module) -> Demand | None:
    """What a module's backward demands of its input, if the module is one function."""
    function = module_function(module)
    if function is None:
        return None
    return Demand(need=Need.DERIVATIVE, fn=function.name, detail=dict(function.parameters))


def is_fusible(module: nn.Module) -> bool:
    """Whether an op can compute it in a few bits by default."""
    demand = demand_of(module)
    return demand is not None and FewBit().serves(demand, torch.float32)


def op_for(module: nn.Module, codec: Codec) -> Op[Any] | None:
    """The op that computes a module as the codec wants it, if there is one."""
    if isinstance(codec, FewBit) and codec.fused:
        return PointwiseOp(module, codec)
    if isinstance(codec, Quant) and codec.fused and groupable_name(module) is not None:
        return GroupedOp(module, codec)
    return None
