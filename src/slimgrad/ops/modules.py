"""Modules that an op of ours computes in the place of their own forward, and keeps less by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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


class PointwiseOp:
    """A few-bit function in the place of a module that is one."""

    def __init__(self, module: nn.Module, codec: FewBit) -> None:
        self.module = module
        self.codec = codec
        self._attributes = parameter_names(module)
        self._counts: Tensor | None = None
        self._made: tuple[list[Any], FewBitFunction] | None = None

    def takes(self, args: Sequence[Any], kwargs: Any) -> bool:
        """Whether the op can compute this call; the module itself does where nobody will ask for a gradient."""
        return _is_taken(args, kwargs) and (not _in_place(self.module) or is_dense(args[0]))

    def observe(self, x: Tensor) -> None:
        """The module's own forward is given x, and will be ours later on."""
        if self.codec.weight == DATA and self._made is None:
            low, high = self.codec.interval
            seen = torch.histc(x.detach().float(), BINS, low, high)
            self._counts = seen if self._counts is None else self._counts + seen

    def prepare(self) -> None:
        """Solve the table now, if nothing is missing: a forward should not wait for it, and a compiler cannot."""
        if self.codec.weight != DATA or self._counts is not None:
            self._function()

    def __call__(self, x: Tensor) -> Tensor:
        return self._function()(x, inplace=_in_place(self.module))

    def kept(self, elements: int) -> int:
        """Bytes that are kept of so many."""
        return code_bytes(elements, self.codec.bits)

    def _function(self) -> FewBitFunction:
        """The function that the module is now: its parameters may have been changed."""
        now = [getattr(self.module, name) for name in self._attributes]
        if self._made is None or self._made[0] != now:
            made = fewbit_function(self.module, self.codec.bits, self.codec.interval, self._weight())
            self._made = now, made
        return self._made[1]

    def _weight(self) -> Any:
        counts = None if self._counts is None else self._counts.cpu()
        if counts is None or not counts.any():
            return self.codec.known_weight
        low, high = self.codec.interval
        return torch.linspace(low, high, BINS + 1, dtype=torch.float64), counts


class GroupedOp:
    """A function that keeps its input in groups of a few bits, in the place of a module that is one."""

    def __init__(self, module: nn.Module, codec: Quant) -> None:
        self.module = module
        self.codec = codec
        self._how = codec.groups(ITSELF)
        self._attributes = parameter_names(module)
        self._made: tuple[list[Any], GroupedFunction | None] | None = None

    def takes(self, args: Sequence[Any], kwargs: Any) -> bool:
        """Whether the op can compute this call. No compiler knows it."""
        if torch.compiler.is_compiling() or not _is_taken(args, kwargs):
            return False
        function, x = self._function(), args[0]
        return function is not None and function.takes(x) and (not _in_place(self.module) or is_dense(x))

    def observe(self, x: Tensor) -> None:
        """There is nothing to learn from it."""

    def prepare(self) -> None:
        """There is nothing to solve."""

    def __call__(self, x: Tensor) -> Tensor:
        function = self._function()
        assert function is not None  # `takes` looked
        return function(x, inplace=_in_place(self.module))

    def kept(self, elements: int) -> int:
        return self._how.nbytes(elements)

    def _function(self) -> GroupedFunction | None:
        """The function that the module is now: its parameters may have been changed."""
        now = [getattr(self.module, name) for name in self._attributes]
        if self._made is None or self._made[0] != now:
            name = groupable_name(self.module)
            self._made = now, None if name is None else GroupedFunction(name, self._how)
        return self._made[1]


def groupable_name(module: nn.Module) -> str | None:
    """What kernels call the function that a module is, if they have its derivative."""
    function = module_function(module)
    return None if function is None else groupable(function.name, dict(function.parameters))


Op = PointwiseOp | GroupedOp


def _is_taken(args: Sequence[Any], kwargs: Any) -> bool:
    """Whether a module was called with one tensor, of which somebody will ask for a gradient."""
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
        return False
    x = args[0]
    return torch.is_grad_enabled() and x.requires_grad and x.is_floating_point() and x.layout is torch.strided


def _in_place(module: nn.Module) -> bool:
    return bool(module.__dict__.get("inplace", False))  # getattr takes 2 us to find that there is none


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


def op_for(module: nn.Module, codec: Codec) -> Op | None:
    """The op that computes a module as the codec wants it, if there is one."""
    if isinstance(codec, FewBit) and codec.fused:
        return PointwiseOp(module, codec)
    if isinstance(codec, Quant) and codec.fused and groupable_name(module) is not None:
        return GroupedOp(module, codec)
    return None
