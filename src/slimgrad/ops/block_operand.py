"""Products with a tensor that is kept in blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slimgrad.ops.operands import Convolution, Operand


class BlockOperand(Operand):
    """Stands for a tensor kept in blocks."""

    def product(self, dy: Tensor, turned: bool = False) -> Tensor:
        return self.packed.extra.product(self.packed.payload, dy, turned)  # type: ignore[no-any-return]

    def kernels(self, dy: Tensor, weight: Tensor, how: Convolution) -> Any:
        """A 1x1 convolution is a product at each position."""
        one = all(size == 1 for size in weight.shape[2:])
        plain = not how.transposed and how.groups == 1 and set(how.stride) == {1} and set(how.padding) == {0}
        if not (one and plain and dy.dim() >= 4):
            return NotImplemented
        dw = self.product(dy.movedim(1, -1).reshape(-1, dy.shape[1]))
        return torch.empty_like(weight).copy_(dw.view(weight.shape))
