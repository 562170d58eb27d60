"""A pointwise function that keeps only the codes of its derivative: forward writes f(x) and codes in one pass, backward
reads codes and dY.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.library import custom_op

from slimgrad import kernels
from slimgrad.codecs.base import per_layout
from slimgrad.errors import DoubleBackwardError, SpecError
from slimgrad.kernels import Buckets, Fusion, FusionByFunctions, Layout, Pointwise
from slimgrad.kernels.codes import code_bytes
from slimgrad.spec.values import parsed
from slimgrad.tables import FAMILIES, Table, fewbit_table
from slimgrad.tables.functions import function_of, named
from slimgrad.tables.question import Histogram

_treatment = per_layout(kernels.fusion)


class FewBitFunction:
    """f as a callable on tensors, with `table` in the place of f'. Made by `fewbit_function`."""

    def __init__(self, f: Callable[[Tensor], Tensor], table: Table) -> None:
        self.table = table
        buckets = Buckets(table.borders, table.levels, 0.0, table.even)
        self.unit = Pointwise(f, buckets, fused_name(table))
        self._text = table.to_json(indent=None)
        """What a compiled graph knows the table by."""

    def __call__(self, x: Tensor, *, inplace: bool = False) -> Tensor:
        """f(x); with `inplace` written over x, which must then be dense and nobody else's for backward."""
        if not x.is_floating_point():
            raise SpecError(f"{self!r}: expected a floating-point tensor, found {x.dtype}")
        if is_compiling():
            return self._traced(x, inplace)
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x.copy_(self.unit.f(x)) if inplace else self.unit.f(x)
        layout, fusion = self._treatment(x)
        return FewBit.apply(x, layout, fusion, inplace)  # type: ignore[no-any-return, no-untyped-call]

    def _treatment(self, x: Tensor) -> tuple[Layout, Fusion]:
        if isinstance(x, FakeTensor):  # the same nodes must be learnt from them that real ones have
            return Layout.of(x), pretended(code_bytes(x.numel(), self.unit.buckets.bits))
        found = _treatment(x, self.unit)
        return found.layout, found.packer

    def _traced(self, x: Tensor, inplace: bool) -> Tensor:
        """The same in an op that a compiler knows."""
        if self.table.function not in FAMILIES:
            raise SpecError(f"{self!r} has no name slimgrad knows, so torch.compile cannot take it; call it uncompiled")
        y: Tensor = fewbit_forward(Layout.of(x).dense(x), self._text)[0]
        return x.copy_(y) if inplace else y

    def __repr__(self) -> str:
        shown = "".join(f", {key}={value!r}" for key, value in self.table.parameters)
        return f"fewbit_function({self.table.function!r}, bits={self.table.bits}{shown})"


def pretended(nbytes: int) -> Fusion:
    """A fusion of tensors that have no memory for kernels to read, which keeps so many bytes."""

    def forward(x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x) if out is None else out, x.new_empty(nbytes, dtype=torch.uint8)

    return FusionByFunctions(forward, lambda kept, dy: torch.empty_like(dy))


def fewbit_function(
    f: str | Callable[[Tensor], Tensor],
    bits: int = 3,
    interval: tuple[float, float] = (-10.0, 10.0),
    weight: str | Histogram = "uniform",
    **parameters: Any,
) -> FewBitFunction:
    """f with a derivative of 2**bits levels: keeps `bits` bits per element for backward, and nothing else.

    Takes what `fewbit_table` takes. GELU, SiLU and their like are computed together with the codes in one kernel.
    """
    table = fewbit_table(f, bits, interval, weight, **parameters)
    return FewBitFunction(function_of(f, parameters).f, table)


def fused_name(table: Table) -> str:
    """What kernels/pointwise.py calls the function, if it has its default parameters."""
    parameters = dict(table.parameters)
    if table.function == "gelu":
        return "gelu_tanh" if parameters["approximate"] == "tanh" else "gelu"
    return "" if parameters else table.function


class FewBit(torch.autograd.Function):
    """Its node, by the name of this class, is known to runtime/reruns.py: it can make f(x) again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: Layout, fusion: Fusion, inplace: bool) -> Tensor:
        if inplace and layout.stride != x.stride():
            raise SpecError(f"in place needs a dense tensor, found shape {tuple(x.shape)} with strides {x.stride()}")
        y, codes = fusion.forward(layout.dense(x), x if inplace else None)
        if inplace:
            ctx.mark_dirty(x)
        ctx.save_for_backward(codes)
        ctx.layout, ctx.fusion = layout, fusion
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "a second-order gradient (create_graph=True) goes through a few-bit function, which keeps too little "
                "for it; call the stock function there"
            )
        (codes,) = ctx.saved_tensors
        return ctx.fusion.backward(codes, ctx.layout.dense(gradients[0])), None, None, None


# --- for compilers ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def _unit(table: str) -> Pointwise:
    found = Table.from_dict(parsed(table))
    return FewBitFunction(named(found.function, dict(found.parameters)).f, found).unit


@custom_op("slimgrad::fewbit_forward", mutates_args=())
def fewbit_forward(x: Tensor, table: str) -> tuple[Tensor, Tensor]:
    return kernels.pointwise_forward(x, _unit(table))


@fewbit_forward.register_fake
def _(x: Tensor, table: str) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(code_bytes(x.numel(), _unit(table).buckets.bits), dtype=torch.uint8)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device), codes


@custom_op("slimgrad::fewbit_backward", mutates_args=())
def fewbit_backward(codes: Tensor, dy: Tensor, table: str) -> Tensor:
    return kernels.pointwise_backward(codes, dy, _unit(table))


@fewbit_backward.register_fake
def _(codes: Tensor, dy: Tensor, table: str) -> Tensor:
    return torch.empty_strided(dy.shape, dy.stride(), dtype=dy.dtype, device=dy.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.table = inputs
    ctx.shape, ctx.stride = x.shape, x.stride()
    ctx.save_for_backward(output[1])


def _go_back(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor, None]:
    (codes,) = ctx.saved_tensors
    layout = Layout(ctx.shape, ctx.stride, dy.dtype, dy.device)
    return fewbit_backward(codes, layout.dense(dy), ctx.table), None


fewbit_forward.register_autograd(_go_back, setup_context=_keep)
