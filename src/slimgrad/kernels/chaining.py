"""Elementwise steps behind the unpacking of groups, in Triton: the twin of reference_chains.py. See chains.py.

A program is one warp and treats one tile, as in quant_unpack.py. A thread holds octets, LANES elements in a row each:
what a spread operand has for an element is found once for its octet, where runs allow it.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimgrad.kernels.chains import MOST_STEPS, SPREAD, Chain, Step, check_chain
from slimgrad.kernels.formulas import slope_of, value_of
from slimgrad.kernels.geometry import LANES as LANES_EACH
from slimgrad.kernels.geometry import TILE as ELEMENTS
from slimgrad.kernels.geometry import Layout
from slimgrad.kernels.halves import is_native
from slimgrad.kernels.launch import Launch
from slimgrad.kernels.quant_unpack import tile_values
from slimgrad.kernels.tiles import LANES, TILE, float32, rounded

ALIGNED = 16
"""Bytes at a multiple of which the kernel takes every operand to begin."""


def unpack_chain(packed: Tensor, chain: Chain, operands: Sequence[Tensor], layout: Layout) -> Tensor:
    check_chain(chain, packed, operands, layout)
    return chainer(layout, chain, tuple(operand.dtype for operand in operands)).unpack(packed, operands)


class ByLaunch:
    """A kernel for one layout, one chain and operands of these dtypes. It checks nothing."""

    __slots__ = ("layout", "slots", "unpacking")

    def __init__(self, layout: Layout, chain: Chain) -> None:
        n = math.prod(layout.shape)
        self.layout = layout
        self.slots = [bool(step.operand) for step in chain.steps]
        steps = [*chain.steps, *[Step("")] * (MOST_STEPS - len(chain.steps))]
        self.unpacking = Launch(
            chain_kernel,
            triton.cdiv(n, ELEMENTS),
            n,
            *(word for step in steps for word in _found(step)),
            chain.how.bits,
            chain.how.group,
            chain.how.zeros,
            torch.finfo(torch.float32).max,
            is_native(layout.device),
            num_warps=1,
        )

    def unpack(self, packed: Tensor, operands: Sequence[Tensor]) -> Tensor:
        out = self.layout.empty()
        if out.numel():
            given = iter([operand if operand.data_ptr() % ALIGNED == 0 else operand.clone() for operand in operands])
            all_slots = [next(given) if taken else out for taken in self.slots]
            self.unpacking(packed, out, *all_slots, *[out] * (MOST_STEPS - len(all_slots)))
        return out


@lru_cache(maxsize=4096)
def chainer(layout: Layout, chain: Chain, dtypes: tuple[torch.dtype, ...]) -> ByLaunch:
    """Found once: the kernel is compiled for the dtypes, and `Launch` looks at them no more."""
    return ByLaunch(layout, chain)


def _found(step: Step) -> tuple[str, str, int, int]:
    """A step as the kernel takes it, where numbers of a spread operand are found in one of three ways."""
    if step.operand != SPREAD:
        return step
    if step.run % LANES_EACH == 0:
        return step.op, "by octet", step.run // LANES_EACH, step.period
    if step.run == 1 and step.period and step.period % LANES_EACH == 0:
        return step.op, "side by side", 1, step.period // LANES_EACH
    return step.op, "by element", step.run, step.period


@triton.jit
def _spread(ptr, octet, n, KIND: tl.constexpr, RUN: tl.constexpr, COUNT: tl.constexpr):
    """The number that stands for each element; beyond the end that of the last one."""
    lane = tl.arange(0, LANES)[None, :]
    if KIND == "by octet":  # runs and counts are in octets
        number = tl.minimum(octet, (n - 1) // LANES) // RUN
        found = float32(tl.load(ptr + (number % COUNT if COUNT else number)))[:, None]
    elif KIND == "side by side":
        found = float32(tl.load(ptr + (octet % COUNT)[:, None] * LANES + lane))
    else:
        number = tl.minimum(octet[:, None] * LANES + lane, n - 1) // RUN
        found = float32(tl.load(ptr + (number % COUNT if COUNT else number)))
    return found


@triton.jit
def _operand(
    ptr,
    tile,
    tiles,
    n,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    COUNT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One number for each element of a tile, as octets."""
    OCTETS: tl.constexpr = TILE // LANES
    octet = (tile * OCTETS).to(tl.int32) + tl.arange(0, OCTETS)
    if KIND == "same":
        cell = tl.arange(0, OCTETS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
        left = n - tile * TILE
        if left >= TILE:  # with a mask, elements are loaded one by one
            found = float32(tl.load(ptr + tile * TILE + cell))
        else:
            found = float32(tl.load(ptr + tile * TILE + cell, mask=cell < left, other=1.0))
    elif KIND == "packed":
        found = tl.reshape(tile_values(ptr, tile, tiles, BITS, GROUP, ZEROS, LARGEST), [OCTETS, LANES])
    else:
        found = _spread(ptr, octet, n, KIND, RUN, COUNT)
    return found


@triton.jit
def _step(
    values,
    ptr,
    tile,
    tiles,
    n,
    OP: tl.constexpr,
    KIND: tl.constexpr,
    RUN: tl.constexpr,
    COUNT: tl.constexpr,
    PRECISE: tl.constexpr,
    NATIVE: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    if KIND != "":
        operand = _operand(ptr, tile, tiles, n, KIND, RUN, COUNT, BITS, GROUP, ZEROS, LARGEST)
        if OP == "add":
            values = values + operand
        elif OP == "sub":
            values = values - operand
        elif OP == "mul":
            values = values * operand
        else:
            tl.static_assert(OP == "div", "an operation that is not known here")
            values = values / operand
    elif OP == "d_gelu" or OP == "d_gelu_tanh" or OP == "d_silu":
        values = slope_of(values, OP, PRECISE, NATIVE)
    elif OP != "":
        values = value_of(values, OP, PRECISE, NATIVE)
    return values


@triton.jit(do_not_specialize=["n"])
def chain_kernel(
    packed_ptr,
    out_ptr,
    ptr_1,
    ptr_2,
    ptr_3,
    ptr_4,
    n,
    OP_1: tl.constexpr,
    KIND_1: tl.constexpr,
    RUN_1: tl.constexpr,
    COUNT_1: tl.constexpr,
    OP_2: tl.constexpr,
    KIND_2: tl.constexpr,
    RUN_2: tl.constexpr,
    COUNT_2: tl.constexpr,
    OP_3: tl.constexpr,
    KIND_3: tl.constexpr,
    RUN_3: tl.constexpr,
    COUNT_3: tl.constexpr,
    OP_4: tl.constexpr,
    KIND_4: tl.constexpr,
    RUN_4: tl.constexpr,
    COUNT_4: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    LARGEST: tl.constexpr,
    NATIVE: tl.constexpr,
):
    PRECISE: tl.constexpr = out_ptr.dtype.element_ty == tl.float32
    tile = tl.program_id(0).to(tl.int64)
    tiles = tl.num_programs(0).to(tl.int64)
    x = tl.reshape(tile_values(packed_ptr, tile, tiles, BITS, GROUP, ZEROS, LARGEST), [TILE // LANES, LANES])
    x = _step(x, ptr_1, tile, tiles, n, OP_1, KIND_1, RUN_1, COUNT_1, PRECISE, NATIVE, BITS, GROUP, ZEROS, LARGEST)
    x = _step(x, ptr_2, tile, tiles, n, OP_2, KIND_2, RUN_2, COUNT_2, PRECISE, NATIVE, BITS, GROUP, ZEROS, LARGEST)
    x = _step(x, ptr_3, tile, tiles, n, OP_3, KIND_3, RUN_3, COUNT_3, PRECISE, NATIVE, BITS, GROUP, ZEROS, LARGEST)
    x = _step(x, ptr_4, tile, tiles, n, OP_4, KIND_4, RUN_4, COUNT_4, PRECISE, NATIVE, BITS, GROUP, ZEROS, LARGEST)
    values = tl.reshape(rounded(x, out_ptr.dtype.element_ty), [TILE])
    out_ptr += tile * TILE
    cell = tl.arange(0, TILE)
    left = n - tile * TILE
    if left >= TILE:
        tl.store(out_ptr + cell, values)
    else:
        tl.store(out_ptr + cell, values, mask=cell < left)
