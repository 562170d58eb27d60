"""What a product of backward is handed in the place of a tensor of which only a part was kept.

NOTE [A product that multiplies what is packed]
An unpack hook may return any tensor, and autograd's formula for dW hands it to `mm` or to `convolution_backward`. So a
wrapper that holds nothing but what is packed reaches that product, and takes its place: the forward and the gradient
that flows on are stock PyTorch, bit for bit, wherever in a model a linear layer, an F.linear or a convolution is
called. Any other op that is called on the wrapper gets the tensor itself, put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from slimgrad.codecs import Codec, Packed

aten = torch.ops.aten


class Convolution(NamedTuple):
    """What `convolution_backward` is told, but for tensors and what is wanted."""

    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    output_padding: Sequence[int]
    groups: int


class Operand(Tensor):
    """Stands for a tensor of which a part is packed, or for its transpose."""

    codec: Codec
    packed: Packed
    turned: bool

    @staticmethod
    def __new__(cls, codec: Codec, packed: Packed, turned: bool = False) -> Operand:
        layout = packed.layout
        shape, stride = cls.visible(packed)
        if turned:
            shape, stride = shape[::-1], stride[::-1]
        made = Tensor._make_wrapper_subclass(cls, shape, strides=stride, dtype=layout.dtype, device=layout.device)
        made.codec, made.packed, made.turned = codec, packed, turned
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        shortcut = SHORTCUTS.get(op)
        found = NotImplemented if shortcut is None else shortcut(*args, **(kwargs or {}))
        if found is not NotImplemented:
            return found
        return op(*tree_map_only(Operand, _whole, args), **tree_map_only(Operand, _whole, kwargs or {}))

    @staticmethod
    def visible(packed: Packed) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shape and strides that autograd sees."""
        return tuple(packed.layout.shape), packed.layout.stride

    def whole(self) -> Tensor:
        """The tensor itself, with zeros for what was dropped."""
        found = self.codec.unpack(self.packed)
        return found.t() if self.turned else found

    def product(self, dy: Tensor, turned: bool = False) -> Any:
        """dY^T X, or X^T dY; NotImplemented where it takes the tensor itself."""
        return NotImplemented

    def kernels(self, dy: Tensor, weight: Tensor, how: Convolution) -> Any:
        """The gradient of a convolution's weight, likewise."""
        return NotImplemented

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.codec!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _whole(operand: Operand) -> Tensor:
    return operand.whole()


# --- shortcuts; NotImplemented where the tensor itself is needed ------------------------------------------------------


def _detach(operand: Operand) -> Operand:
    return type(operand)(operand.codec, operand.packed, operand.turned)


def _t(operand: Operand) -> Operand:
    return type(operand)(operand.codec, operand.packed, not operand.turned)


def _mm(a: Tensor, b: Tensor) -> Any:
    """dY^T X, which autograd asks for where a weight is [outputs, inputs]; X^T dY where it is [inputs, outputs]."""
    if isinstance(b, Operand) and not b.turned and not isinstance(a, Operand):
        return b.product(a.t())
    if isinstance(a, Operand) and a.turned and not isinstance(b, Operand):
        return a.product(b, turned=True)
    return NotImplemented


def _convolution_backward(dy: Tensor, x: Tensor, weight: Tensor, biases: Any, *how: Any) -> Any:
    """The other gradients need nothing of x but its layout."""
    wanted = how[-1]
    if not isinstance(x, Operand) or not wanted[1]:
        return NotImplemented
    dw = x.kernels(dy, weight, Convolution(*how[:-1]))
    if dw is NotImplemented:
        return NotImplemented
    dx = db = None
    if wanted[0] or wanted[2]:
        others = [wanted[0], False, wanted[2]]
        dx, _, db = aten.convolution_backward(dy, x.packed.layout.empty(), weight, biases, *how[:-1], others)
    return dx, dw, db


SHORTCUTS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.t.default: _t,
    aten.mm.default: _mm,
    aten.convolution_backward.default: _convolution_backward,
}
