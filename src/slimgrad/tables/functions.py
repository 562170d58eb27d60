"""The pointwise functions by name: f in any precision, where f' jumps, and whether f' is even.

Names and parameters are those of the needs table, so that a demand names its function.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from slimgrad.errors import SpecError

Parameters = Mapping[str, Any]


@dataclass(frozen=True)
class Family:
    """A named function with parameters."""

    f: Callable[[Tensor, Parameters], Tensor]
    defaults: Parameters = field(default_factory=dict)
    jumps: Callable[[Parameters], tuple[float, ...]] = lambda parameters: ()
    """Where f' is not continuous."""
    even: bool = False
    """Whether f'(-x) = f'(x), so that |x| tells all."""


def _elu(x: Tensor, p: Parameters) -> Tensor:
    below = torch.expm1(x.clamp(max=0) * p["input_scale"]).mul(p["alpha"])
    return torch.where(x > 0, x, below).mul(p["scale"])


def _elu_jump(p: Parameters) -> tuple[float, ...]:
    return () if p["alpha"] * p["input_scale"] == 1 else (0.0,)


SELU = {"alpha": 1.6732632423543772, "scale": 1.0507009873554805, "input_scale": 1.0}

FAMILIES: dict[str, Family] = {
    "gelu": Family(lambda x, p: F.gelu(x, approximate=p["approximate"]), {"approximate": "none"}),
    "silu": Family(lambda x, p: F.silu(x)),
    "quick_gelu": Family(lambda x, p: x * torch.sigmoid(1.702 * x)),
    "mish": Family(lambda x, p: F.mish(x)),
    "hardswish": Family(lambda x, p: x * (x + 3).clamp(0, 6) / 6, jumps=lambda p: (-3.0, 3.0)),
    "softplus": Family(
        lambda x, p: F.softplus(x, p["beta"], p["threshold"]),
        {"beta": 1.0, "threshold": 20.0},
        jumps=lambda p: (p["threshold"] / p["beta"],),
    ),
    "elu": Family(_elu, {"alpha": 1.0, "scale": 1.0, "input_scale": 1.0}, jumps=_elu_jump),
    "selu": Family(_elu, SELU, jumps=_elu_jump),
    "celu": Family(lambda x, p: F.celu(x, p["alpha"]), {"alpha": 1.0}),
    "logsigmoid": Family(lambda x, p: F.logsigmoid(x)),
    "sigmoid": Family(lambda x, p: x.sigmoid(), even=True),
    "tanh": Family(lambda x, p: x.tanh(), even=True),
    "softsign": Family(lambda x, p: F.softsign(x), even=True),
    "tanhshrink": Family(lambda x, p: x - x.tanh(), even=True),
    "hardsigmoid": Family(lambda x, p: (x / 6 + 0.5).clamp(0, 1), jumps=lambda p: (-3.0, 3.0), even=True),
}

CALLABLES: dict[Callable[..., Any], str] = {
    F.gelu: "gelu",
    F.silu: "silu",
    F.mish: "mish",
    F.hardswish: "hardswish",
    F.softplus: "softplus",
    F.elu: "elu",
    F.selu: "selu",
    torch.selu: "selu",
    F.celu: "celu",
    F.logsigmoid: "logsigmoid",
    F.sigmoid: "sigmoid",
    torch.sigmoid: "sigmoid",
    F.tanh: "tanh",
    torch.tanh: "tanh",
    F.softsign: "softsign",
    F.tanhshrink: "tanhshrink",
    F.hardsigmoid: "hardsigmoid",
}
"""torch's own functions, with their default parameters."""

MODULES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.GELU: ("gelu", ("approximate",)),
    nn.SiLU: ("silu", ()),
    nn.Mish: ("mish", ()),
    nn.Hardswish: ("hardswish", ()),
    nn.Softplus: ("softplus", ("beta", "threshold")),
    nn.ELU: ("elu", ("alpha",)),
    nn.SELU: ("selu", ()),
    nn.CELU: ("celu", ("alpha",)),
    nn.LogSigmoid: ("logsigmoid", ()),
    nn.Sigmoid: ("sigmoid", ()),
    nn.Tanh: ("tanh", ()),
    nn.Softsign: ("softsign", ()),
    nn.Tanhshrink: ("tanhshrink", ()),
    nn.Hardsigmoid: ("hardsigmoid", ()),
}
"""torch's own modules: the function, and which attributes are its parameters."""

_TANH = {"approximate": "tanh"}
FOREIGN: dict[str, tuple[str, Parameters]] = {
    "transformers.activations.GELUActivation": ("gelu", {}),
    "transformers.activations.GELUTanh": ("gelu", _TANH),
    "transformers.activations.PytorchGELUTanh": ("gelu", _TANH),
    "transformers.activations.NewGELUActivation": ("gelu", _TANH),
    "transformers.activations.FastGELUActivation": ("gelu", _TANH),
    "transformers.activations.AccurateGELUActivation": ("gelu", _TANH),
    "transformers.activations.QuickGELUActivation": ("quick_gelu", {}),
    "transformers.activations.SiLUActivation": ("silu", {}),
    "transformers.activations.MishActivation": ("mish", {}),
    "timm.layers.activations.GELU": ("gelu", {}),
    "timm.layers.activations.GELUTanh": ("gelu", _TANH),
    "timm.layers.activations.QuickGELU": ("quick_gelu", {}),
    "timm.layers.activations.Swish": ("silu", {}),
    "timm.layers.activations.Mish": ("mish", {}),
}
"""Modules of other libraries, by name, so that those need not be there. Several write a formula out, op by op."""


def _itself(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True)
class Function:
    """One function with its parameters, ready to be evaluated."""

    name: str
    """Of its family, or what a message may call it."""
    parameters: tuple[tuple[str, Any], ...]
    f: Callable[[Tensor], Tensor]
    jumps: tuple[float, ...] | None
    """None if nobody has said where f' jumps."""
    even: bool | None
    """None if nobody has said."""

    @property
    def named(self) -> bool:
        return self.name in FAMILIES

    def __str__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value}' for key, value in self.parameters)})"

    def slope(self, x: Tensor) -> Tensor:
        """f'(x), by autograd in the precision of x; hooks on saved tensors are none of its business."""
        with torch.enable_grad(), saved_tensors_hooks(_itself, _itself):
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.f(x).sum(), x)
        return slope


def named(name: str, parameters: Parameters) -> Function:
    if name not in FAMILIES:
        raise SpecError(f"fewbit_table: no function {name!r}; known are {', '.join(FAMILIES)}, or give a callable")
    family = FAMILIES[name]
    unknown = parameters.keys() - family.defaults.keys()
    if unknown:
        takes = ", ".join(family.defaults) or "no parameters"
        raise SpecError(f"fewbit_table: {name} takes {takes}; found {', '.join(sorted(unknown))}")
    complete = {**family.defaults, **parameters}
    return Function(name, tuple(complete.items()), lambda x: family.f(x, complete), family.jumps(complete), family.even)


def module_function(module: nn.Module) -> Function | None:
    """The function that a module is, if it is one of those known here; a class derived from theirs may be another."""
    kind = type(module)
    if kind in MODULES:
        name, attributes = MODULES[kind]
        return named(name, {key: getattr(module, key) for key in attributes})
    name, parameters = FOREIGN.get(f"{kind.__module__}.{kind.__qualname__}", ("", {}))
    return named(name, parameters) if name else None


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """The attributes that are parameters of the function that a module is."""
    return MODULES.get(type(module), ("", ()))[1]


def function_of(f: str | Callable[[Tensor], Tensor], parameters: Parameters) -> Function:
    """The function meant by a name, a torch function, a module, or any callable on tensors."""
    if isinstance(f, str):
        return named(f, parameters)
    known = module_function(f) if isinstance(f, nn.Module) else None
    if known is not None:
        return named(known.name, {**dict(known.parameters), **parameters})
    if f in CALLABLES:
        return named(CALLABLES[f], parameters)
    if not callable(f) or parameters:
        raise SpecError(f"fewbit_table: expected a name with parameters, a callable or a module, found {f!r}")
    return custom(f)


def custom(f: Callable[[Tensor], Tensor]) -> Function:
    """Anything else, in double precision; a module by way of a copy."""
    if isinstance(f, nn.Module):
        f = copy.deepcopy(f).double().eval().requires_grad_(False)
    name = type(f).__name__ if isinstance(f, nn.Module) else getattr(f, "__qualname__", repr(f))
    found = Function(name, (), f, None, None)
    sample = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)
    try:
        works = f(sample).shape == sample.shape and found.slope(sample).isfinite().all()
    except Exception as error:
        raise SpecError(f"fewbit_table: {name} cannot be differentiated in float64: {error}") from error
    if not works:
        raise SpecError(f"fewbit_table: {name} must map a tensor to one of the same shape, with a finite derivative")
    return found
