"""Gated units f(a) * b, such as SwiGLU and GEGLU, that keep a and b for backward and nothing else: stock autograd keeps
f(a) too. Backward computes f(a) and f'(a) again in the pass that reads a, b and dY, so that gradients are exact. Of the
sigmoid (GLU) stock keeps f(a) in the place of a: there it saves only where a is kept anyway, as half of a projection.

There are no few-bit codes here. db = dY * f(a) asks for the value of f(a), not for its slope, so codes would come on
top of a kept f(a) or a: 16 + 16 + 3 bits per element, where a and b are 16 + 16 and tell all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling
from torch.library import custom_op

from slimgrad import kernels
from slimgrad.errors import DoubleBackwardError
from slimgrad.kernels import Layout
from slimgrad.kernels.reference_gated import check_function, check_gated


class GatedFunction:
    """(a, b) -> f(a) * b as a callable on tensors. Made by `gated_function`."""

    def __init__(self, f: str) -> None:
        check_function(f)
        self.f = f

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """f(a) * b, for a and b of the same shape and dtype.

        The result has the layout of a. The halves of a projection, `x.chunk(2, -1)`, are read where they lie, and x is
        all that is kept; so are other views whose rows lie evenly, if rows are long. What lies in memory in another way
        than a, or has other gaps, is copied on its way to the kernel, forward and backward, and kept as it was.
        """
        if is_compiling():
            return gated_forward(a, b, self.f)  # type: ignore[no-any-return]
        if not (torch.is_grad_enabled() and (a.requires_grad or b.requires_grad)):
            return kernels.gated_forward(a, b, self.f)
        return _Gated.apply(a, b, self.f)  # type: ignore[no-any-return, no-untyped-call]

    def __repr__(self) -> str:
        return f"gated_function({self.f!r})"


def gated_function(f: str) -> GatedFunction:
    """f(a) * b in one kernel, with f one of "silu" (SwiGLU), "gelu" (GEGLU), "gelu_tanh", "quick_gelu" and "sigmoid"
    (GLU): keeps a and b for backward, and nothing else.
    """
    return GatedFunction(f)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, f: str) -> Tensor:
        # What is fake has no memory for kernels to read, and must be learnt with the same nodes that real tensors have.
        y = gated_forward(a, b, f) if isinstance(a, FakeTensor) else kernels.gated_forward(a, b, f)
        ctx.save_for_backward(a, b)
        ctx.f = f
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        if torch.is_grad_enabled():
            raise DoubleBackwardError(
                "a second-order gradient (create_graph=True) goes through a gated unit, whose backward is one kernel "
                "without a derivative of its own; call the stock functions there"
            )
        a, b = ctx.saved_tensors
        backward = gated_backward if isinstance(a, FakeTensor) else kernels.gated_backward
        return *backward(a, b, gradients[0], ctx.f), None


# --- for compilers ----------------------------------------------------------------------------------------------------


@custom_op("slimgrad::gated_forward", mutates_args=())
def gated_forward(a: Tensor, b: Tensor, f: str) -> Tensor:
    return kernels.gated_forward(a, b, f)


@gated_forward.register_fake
def _(a: Tensor, b: Tensor, f: str) -> Tensor:
    check_gated(f, a, b)
    return Layout.of(a).empty()


@custom_op("slimgrad::gated_backward", mutates_args=())
def gated_backward(a: Tensor, b: Tensor, dy: Tensor, f: str) -> tuple[Tensor, Tensor]:
    return kernels.gated_backward(a, b, dy, f)


@gated_backward.register_fake
def _(a: Tensor, b: Tensor, dy: Tensor, f: str) -> tuple[Tensor, Tensor]:
    check_gated(f, a, b, dy)
    layout = Layout.of(a)
    return layout.empty(), layout.empty()


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    a, b, ctx.f = inputs
    ctx.save_for_backward(a, b)


def _go_back(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    a, b = ctx.saved_tensors
    return *gated_backward(a, b, dy, ctx.f), None


gated_forward.register_autograd(_go_back, setup_context=_keep)
