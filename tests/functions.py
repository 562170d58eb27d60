"""Pointwise functions that several tests share: stock torch, and the parameters under which slimgrad names them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Stock = tuple[Callable[[Tensor], Tensor], dict[str, object]]

STOCK: dict[str, Stock] = {
    "gelu": (F.gelu, {}),
    "gelu tanh": (lambda x: F.gelu(x, approximate="tanh"), {"approximate": "tanh"}),
    "silu": (F.silu, {}),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x), {}),
    "mish": (F.mish, {}),
    "hardswish": (F.hardswish, {}),
    "sigmoid": (torch.sigmoid, {}),
    "tanh": (torch.tanh, {}),
    "softplus": (lambda x: F.softplus(x, 2.0), {"beta": 2.0}),
    "elu": (lambda x: F.elu(x, 0.5), {"alpha": 0.5}),
    "selu": (F.selu, {}),
    "celu": (lambda x: F.celu(x, 2.0), {"alpha": 2.0}),
    "logsigmoid": (F.logsigmoid, {}),
    "softsign": (F.softsign, {}),
    "tanhshrink": (F.tanhshrink, {}),
}
"""The first word of a name is the function's."""
