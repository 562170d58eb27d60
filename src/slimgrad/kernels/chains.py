"""Chains: elementwise steps behind the unpacking of groups, in one pass. What a norm or an activation makes of a tensor
that is kept in a few bits is read from those bits and written once; the tensor itself is never there.

All tensors are taken in the order of their memory. A step is a function, or an operation with an operand: a number for
each element, another tensor in the same groups, or numbers that are spread: each stands for `run` elements in a row,
and after `period` of them they begin again. Means of rows are spread with the length of a row as the run, weights of
columns with a run of 1, those of channels with the size of a plane. All is computed in float32 and rounded once, to the
dtype of the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels.geometry import Layout, is_dense
from slimgrad.kernels.groups import Groups, check_groups, check_packed

SPREAD, SAME, PACKED = "spread", "same", "packed"
OPERANDS = (SPREAD, SAME, PACKED)
OPERATIONS = ("add", "sub", "mul", "div")
FUNCTIONS = ("gelu", "gelu_tanh", "silu", "sigmoid", "relu")
DERIVATIVES = {"gelu": "d_gelu", "gelu_tanh": "d_gelu_tanh", "silu": "d_silu"}
"""Of some of them, functions as well."""

MOST_ELEMENTS = 2**31 - 1
"""What kernels count in 32 bits."""
MOST_STEPS = 4
"""A layer norm takes four: less the mean, over the deviation, times the weight, plus the bias."""


class Step(NamedTuple):
    """What is done to every element."""

    op: str
    operand: str = ""
    """How the operand's numbers lie; "" for a function, which has none."""
    run: int = 0
    period: int = 0
    """Of a spread operand; 0 is as many as there are."""


class Chain(NamedTuple):
    """Steps behind the unpacking of groups."""

    how: Groups
    steps: tuple[Step, ...]


def check_chain(chain: Chain, packed: Tensor, operands: Sequence[Tensor], layout: Layout) -> None:
    n = math.prod(layout.shape)
    check_groups(chain.how, layout.dtype)
    check_packed(packed, n, chain.how.nbytes(n))
    wanted = [step for step in chain.steps if step.operand]
    known = all(
        (step.op in OPERATIONS and step.operand in OPERANDS)
        or (step.op in (*FUNCTIONS, *DERIVATIVES.values()) and not step.operand)
        for step in chain.steps
    )
    if not known or len(chain.steps) > MOST_STEPS or len(wanted) != len(operands):
        raise SpecError(
            f"unpack_chain: expected up to {MOST_STEPS} steps of {', '.join((*OPERATIONS, *FUNCTIONS))}, with an "
            f"operand for each operation, found {chain.steps} and {len(operands)} operands"
        )
    if n > MOST_ELEMENTS:
        raise SpecError(f"unpack_chain: expected {MOST_ELEMENTS} elements at the most, found {n}")
    for step, operand in zip(wanted, operands, strict=True):
        _check_operand(step, operand, chain, n)


def _check_operand(step: Step, operand: Tensor, chain: Chain, n: int) -> None:
    if step.operand == SPREAD and (step.run < 1 or n % (step.run * max(1, step.period))):
        raise SpecError(f"unpack_chain: {step.period or 'any number of'} runs of {step.run} do not fill {n} elements")
    sizes = {SPREAD: step.period or n // max(1, step.run), SAME: n, PACKED: chain.how.nbytes(n)}
    if operand.numel() != sizes[step.operand] or not is_dense(operand):
        raise SpecError(
            f"unpack_chain: expected a dense operand of {sizes[step.operand]} elements for {step.op} ({step.operand}), "
            f"found shape {tuple(operand.shape)} with strides {operand.stride()}"
        )
    if (operand.dtype == torch.uint8) is not (step.operand == PACKED):
        raise SpecError(f"unpack_chain: {step.op} by {step.operand} cannot take {operand.dtype}")
