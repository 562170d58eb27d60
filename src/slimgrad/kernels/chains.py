"""Chains: elementwise steps behind the unpacking of groups, in one pass. What a norm or an activation makes of a tensor
that is kept in a few bits is read from those bits and written once; the tensor itself is never there.

The flat tensor is taken for rows of `inner` elements. A step is a function, or an operation with an operand: one number
for each row, one for each column, one for each element, or another tensor in the same groups. All is computed in
float32 and rounded once, to the dtype of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels.geometry import LANES, Layout
from slimgrad.kernels.groups import Groups, check_groups, check_packed

ROW, COLUMN, SAME, PACKED = "row", "column", "same", "packed"
OPERANDS = (ROW, COLUMN, SAME, PACKED)
OPERATIONS = ("add", "sub", "mul", "div")
FUNCTIONS = ("gelu", "gelu_tanh", "silu", "sigmoid", "relu")

MOST_STEPS = 4
"""A layer norm takes four: less the mean, over the deviation, times the weight, plus the bias."""


class Step(NamedTuple):
    """What is done to every element."""

    op: str
    operand: str = ""
    """Of what the operand has one number; "" for a function, which has none."""


class Chain(NamedTuple):
    """Steps behind the unpacking of groups."""

    how: Groups
    steps: tuple[Step, ...]
    inner: int = LANES
    """Elements of a row."""


def check_chain(chain: Chain, packed: Tensor, operands: Sequence[Tensor], layout: Layout) -> None:
    n = math.prod(layout.shape)
    check_groups(chain.how, layout.dtype)
    check_packed(packed, n, chain.how.nbytes(n))
    wanted = [step for step in chain.steps if step.operand]
    known = all(
        (step.op in OPERATIONS and step.operand in OPERANDS) or (step.op in FUNCTIONS and not step.operand)
        for step in chain.steps
    )
    if not known or len(chain.steps) > MOST_STEPS or len(wanted) != len(operands):
        raise SpecError(
            f"unpack_chain: expected up to {MOST_STEPS} steps of {', '.join((*OPERATIONS, *FUNCTIONS))}, with an "
            f"operand for each operation, found {chain.steps} and {len(operands)} operands"
        )
    if chain.inner % LANES or n % chain.inner:
        raise SpecError(f"unpack_chain: rows of {chain.inner} must be multiples of {LANES} and fill {n} elements")
    for step, operand in zip(wanted, operands, strict=True):
        _check_operand(step, operand, chain, n)


def _check_operand(step: Step, operand: Tensor, chain: Chain, n: int) -> None:
    sizes = {ROW: n // chain.inner, COLUMN: chain.inner, SAME: n, PACKED: chain.how.nbytes(n)}
    if operand.numel() != sizes[step.operand] or not operand.is_contiguous():
        raise SpecError(
            f"unpack_chain: expected a contiguous operand of {sizes[step.operand]} elements for {step.op} by "
            f"{step.operand}, found shape {tuple(operand.shape)} with strides {operand.stride()}"
        )
    if (operand.dtype == torch.uint8) is not (step.operand == PACKED):
        raise SpecError(f"unpack_chain: {step.op} by {step.operand} cannot take {operand.dtype}")
