"""Chains of elementwise steps in plain torch: what the Triton twin must equal. See chains.py."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.kernels.chains import DERIVATIVES, PACKED, SPREAD, Chain, Step, check_chain
from slimgrad.kernels.geometry import Layout
from slimgrad.kernels.reference_gated import FUNCTIONS as FORMULAS
from slimgrad.kernels.reference_gated import Formula
from slimgrad.kernels.reference_groups import unpack_groups

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": Tensor.add_,
    "sub": Tensor.sub_,
    "mul": Tensor.mul_,
    "div": Tensor.div_,
}


def _slope(formula: Formula) -> Callable[[Tensor], Tensor]:
    return lambda x: formula.chain(torch.ones_like(x), x)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    **{name: FORMULAS[name].value for name in ("gelu", "gelu_tanh", "silu", "sigmoid")},
    **{name: _slope(FORMULAS[of]) for of, name in DERIVATIVES.items()},
}


def unpack_chain(packed: Tensor, chain: Chain, operands: Sequence[Tensor], layout: Layout) -> Tensor:
    check_chain(chain, packed, operands, layout)
    n = math.prod(layout.shape)
    values = unpack_groups(packed, (n,), (1,), chain.how, torch.float32)
    given = iter(operands)
    for step in chain.steps:
        if step.operand == SPREAD:  # in the shape in which the operand is broadcast
            shape = (-1, step.period, step.run) if step.period else (1, -1, step.run)
            OPERATIONS[step.op](values.view(shape), next(given).detach().float().view(1, -1, 1))
        elif step.operand:
            OPERATIONS[step.op](values, _operand(step, next(given), chain, n))
        else:
            values = FUNCTIONS[step.op](values)
    return values.to(layout.dtype).as_strided(layout.shape, layout.stride)


class ByFunction(NamedTuple):
    """A chain for one layout."""

    layout: Layout
    chain: Chain

    def unpack(self, packed: Tensor, operands: Sequence[Tensor]) -> Tensor:
        return unpack_chain(packed, self.chain, operands, self.layout)


def chainer(layout: Layout, chain: Chain, dtypes: tuple[torch.dtype, ...]) -> ByFunction:
    return ByFunction(layout, chain)


def _operand(step: Step, operand: Tensor, chain: Chain, n: int) -> Tensor:
    if step.operand == PACKED:
        return unpack_groups(operand, (n,), (1,), chain.how, torch.float32)
    return operand.detach().as_strided((n,), (1,)).float()
