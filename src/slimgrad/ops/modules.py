"""Modules that an op of ours computes in the place of their own forward, and keeps less by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimgrad.codecs import Codec, Demand, FewBit
from slimgrad.codecs.fewbit import DATA
from slimgrad.kernels import is_dense
from slimgrad.kernels.codes import code_bytes
from slimgrad.ops.fewbit import FewBitFunction, fewbit_function
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
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            return False
        x = args[0]
        fits = torch.is_grad_enabled() and x.requires_grad and x.is_floating_point() and x.layout is torch.strided
        return fits and (not self._in_place or is_dense(x))

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
        return self._function()(x, inplace=self._in_place)

    def kept(self, elements: int) -> int:
        """Bytes that are kept of so many."""
        return code_bytes(elements, self.codec.bits)

    @property
    def _in_place(self) -> bool:
        return bool(self.module.__dict__.get("inplace", False))  # getattr takes 2 us to find that there is none

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


def op_for(module: nn.Module, codec: Codec) -> PointwiseOp | None:
    """The op that computes a module as the codec wants it, if there is one."""
    return PointwiseOp(module, codec) if isinstance(codec, FewBit) and codec.fused else None
