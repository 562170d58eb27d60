"""Gated units f(a) * b in plain torch: what the Triton twin must equal to rounding, and both twins' checks.

Each is computed in float32 or better and rounded once, where stock PyTorch rounds f(a) first and the product again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels.geometry import Layout
from slimgrad.kernels.reference import chunks

aten = torch.ops.aten


class Formula(NamedTuple):
    """A function that may gate."""

    value: Callable[[Tensor], Tensor]
    """f(x)"""
    chain: Callable[[Tensor, Tensor], Tensor]
    """(g, x) -> g * f'(x), by torch's own formula where it has one."""


def _quick_gelu_chain(g: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * x)
    return g * s * (1 + 1.702 * x * (1 - s))


FUNCTIONS: dict[str, Formula] = {
    "silu": Formula(F.silu, lambda g, x: aten.silu_backward(g, x)),
    "gelu": Formula(F.gelu, lambda g, x: aten.gelu_backward(g, x)),
    "gelu_tanh": Formula(
        lambda x: F.gelu(x, approximate="tanh"), lambda g, x: aten.gelu_backward(g, x, approximate="tanh")
    ),
    "quick_gelu": Formula(lambda x: x * torch.sigmoid(1.702 * x), _quick_gelu_chain),
    "sigmoid": Formula(torch.sigmoid, lambda g, x: aten.sigmoid_backward(g, torch.sigmoid(x))),
}


def check_function(function: str) -> None:
    if function not in FUNCTIONS:
        raise SpecError(f"gated unit: expected one of {', '.join(FUNCTIONS)}, found {function!r}")


def check_gated(function: str, a: Tensor, b: Tensor, dy: Tensor | None = None) -> None:
    """Kernels read all of them by a's shape and dtype."""
    check_function(function)
    if not a.is_floating_point():
        raise SpecError(f"gated unit: expected floating-point tensors, found a of {a.dtype}")
    for name, t in (("b", b),) if dy is None else (("b", b), ("dY", dy)):
        if t.shape != a.shape or t.dtype != a.dtype or t.device != a.device:
            raise SpecError(
                f"gated unit: expected a and {name} of the same shape, dtype and device, "
                f"found {_shown(a)} and {_shown(t)}; expand or convert one of them first"
            )


def _shown(t: Tensor) -> str:
    return f"{tuple(t.shape)} {t.dtype} on {t.device}"


def gated_forward(a: Tensor, b: Tensor, function: str) -> Tensor:
    """f(a) * b in the layout of a; where a has gaps, in the dense layout nearest to it."""
    check_gated(function, a, b)
    layout, value = Layout.of(a), FUNCTIONS[function].value
    a, b = (layout.flat(t.detach()) for t in (a, b))
    y = torch.empty_like(a)
    precision = torch.promote_types(a.dtype, torch.float32)
    for first, last in chunks(len(a)):
        y[first:last] = value(a[first:last].to(precision)) * b[first:last]
    return layout.restore(y)


def gated_backward(a: Tensor, b: Tensor, dy: Tensor, function: str) -> tuple[Tensor, Tensor]:
    """(dY * b * f'(a), dY * f(a)), in the layout of the result."""
    check_gated(function, a, b, dy)
    layout, formula = Layout.of(a), FUNCTIONS[function]
    a, b, dy = (layout.flat(t.detach()) for t in (a, b, dy))
    da, db = torch.empty_like(a), torch.empty_like(a)
    precision = torch.promote_types(a.dtype, torch.float32)
    for first, last in chunks(len(a)):
        x, g = a[first:last].to(precision), dy[first:last].to(precision)
        da[first:last] = formula.chain(g * b[first:last], x)
        db[first:last] = formula.value(x) * g
    return layout.restore(da), layout.restore(db)
