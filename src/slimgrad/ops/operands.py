"""What a product of backward is handed in the place of a tensor that was kept in blocks.

NOTE [A product that multiplies what is packed]
An unpack hook may return any tensor, and autograd's formula for dW hands it to `mm`. So a wrapper that holds nothing
but blocks reaches that product, and takes its place: the forward and the gradient that flows on are stock PyTorch, bit
for bit, wherever in a model a linear layer, an F.linear or a 1x1 convolution is called. Any other op that is called on
the wrapper gets the tensor itself, put together again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from slimgrad.codecs import Blocks, Codec, Packed

aten = torch.ops.aten


class BlockOperand(Tensor):
    """Stands for a tensor kept in blocks, or its transpose."""

    codec: Blocks
    packed: Packed
    turned: bool

    @staticmethod
    def __new__(cls, codec: Blocks, packed: Packed, turned: bool = False) -> BlockOperand:
        layout = packed.layout
        shape, stride = tuple(layout.shape), layout.stride
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
        return op(*tree_map_only(BlockOperand, _whole, args), **tree_map_only(BlockOperand, _whole, kwargs or {}))

    def whole(self) -> Tensor:
        """The tensor itself, with zeros for what was dropped."""
        found = self.codec.unpack(self.packed)
        return found.t() if self.turned else found

    def product(self, dy: Tensor, turned: bool = False) -> Tensor:
        """dY^T X, or X^T dY."""
        return self.packed.extra.product(self.packed.payload, dy, turned)  # type: ignore[no-any-return]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"BlockOperand({self.codec!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _whole(operand: BlockOperand) -> Tensor:
    return operand.whole()


# --- shortcuts; NotImplemented where the tensor itself is needed ------------------------------------------------------


def _detach(operand: BlockOperand) -> BlockOperand:
    return BlockOperand(operand.codec, operand.packed, operand.turned)


def _t(operand: BlockOperand) -> BlockOperand:
    return BlockOperand(operand.codec, operand.packed, not operand.turned)


def _mm(a: Tensor, b: Tensor) -> Any:
    """dY^T X, which autograd asks for where a weight is [outputs, inputs]; X^T dY where it is [inputs, outputs]."""
    if isinstance(b, BlockOperand) and not b.turned and not isinstance(a, BlockOperand):
        return b.product(a.t())
    if isinstance(a, BlockOperand) and a.turned and not isinstance(b, BlockOperand):
        return a.product(b, turned=True)
    return NotImplemented


def _convolution_backward(dy: Tensor, x: Tensor, weight: Tensor, biases: Any, *how: Any) -> Any:
    """A 1x1 convolution is a product at each position; its other gradients need nothing of x but its layout."""
    stride, padding, _, transposed, _, groups, wanted = how
    one = all(size == 1 for size in weight.shape[2:])
    plain = not transposed and groups == 1 and set(stride) == {1} and set(padding) == {0}
    if not (isinstance(x, BlockOperand) and one and plain and wanted[1] and dy.dim() >= 4):
        return NotImplemented
    others = [wanted[0], False, wanted[2]]
    dx, _, db = aten.convolution_backward(dy, x.packed.layout.empty(), weight, biases, *how[:-1], others)
    dw = x.product(dy.movedim(1, -1).reshape(-1, dy.shape[1]))
    return dx, torch.empty_like(weight).copy_(dw.view(weight.shape)), db


SHORTCUTS: dict[Any, Callable[..., Any]] = {
    aten.detach.default: _detach,
    aten.t.default: _t,
    aten.mm.default: _mm,
    aten.convolution_backward.default: _convolution_backward,
}


def reader(codec: Codec) -> Callable[[Packed], Tensor]:
    """How backward reads what this codec packed."""
    if isinstance(codec, Blocks):
        return lambda packed: BlockOperand(codec, packed)
    return codec.unpack
