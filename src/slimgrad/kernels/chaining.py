"""Elementwise steps behind the unpacking of groups, in Triton: the twin of reference_chains.py. See chains.py.

A program is one warp and treats one tile, as in quant_unpack.py. A thread holds runs of LANES consecutive elements, and
rows are multiples of them: which row a run lies in, and where, is found once for each.
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

from slimgrad.kernels.chains import MOST_STEPS, Chain, Step, check_chain
from slimgrad.kernels.formulas import value_of
from slimgrad.kernels.geometry import LANES as RUN
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
            *(word for step in steps for word in step),
            chain.inner // RUN,
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


@triton.jit
def _operand(
    ptr,
    tile,
    tiles,
    n,
    KIND: tl.constexpr,
    INNER: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    """One number for each element of a tile, as runs; beyond the end that of the last row."""
    RUNS: tl.constexpr = TILE // LANES
    run = (tile * RUNS).to(tl.int32) + tl.arange(0, RUNS)
    lane = tl.arange(0, LANES)[None, :]
    if KIND == "row":
        last = (n - 1) // (INNER * LANES)
        found = float32(tl.load(ptr + tl.minimum(run // INNER, last)))[:, None]
    elif KIND == "column":
        found = float32(tl.load(ptr + (run % INNER)[:, None] * LANES + lane))
    elif KIND == "same":
        cell = run[:, None].to(tl.int64) * LANES + lane
        found = float32(tl.load(ptr + cell, mask=cell < n, other=1.0))
    else:
        tl.static_assert(KIND == "packed", "an operand of no known kind")
        found = tl.reshape(tile_values(ptr, tile, tiles, BITS, GROUP, ZEROS, LARGEST), [RUNS, LANES])
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
    PRECISE: tl.constexpr,
    NATIVE: tl.constexpr,
    INNER: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    LARGEST: tl.constexpr,
):
    if KIND != "":
        operand = _operand(ptr, tile, tiles, n, KIND, INNER, BITS, GROUP, ZEROS, LARGEST)
        if OP == "add":
            values = values + operand
        elif OP == "sub":
            values = values - operand
        elif OP == "mul":
            values = values * operand
        else:
            tl.static_assert(OP == "div", "an operation that is not known here")
            values = values / operand
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
    OP_2: tl.constexpr,
    KIND_2: tl.constexpr,
    OP_3: tl.constexpr,
    KIND_3: tl.constexpr,
    OP_4: tl.constexpr,
    KIND_4: tl.constexpr,
    INNER: tl.constexpr,
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
    x = _step(x, ptr_1, tile, tiles, n, OP_1, KIND_1, PRECISE, NATIVE, INNER, BITS, GROUP, ZEROS, LARGEST)
    x = _step(x, ptr_2, tile, tiles, n, OP_2, KIND_2, PRECISE, NATIVE, INNER, BITS, GROUP, ZEROS, LARGEST)
    x = _step(x, ptr_3, tile, tiles, n, OP_3, KIND_3, PRECISE, NATIVE, INNER, BITS, GROUP, ZEROS, LARGEST)
    x = _step(x, ptr_4, tile, tiles, n, OP_4, KIND_4, PRECISE, NATIVE, INNER, BITS, GROUP, ZEROS, LARGEST)
    values = tl.reshape(rounded(x, out_ptr.dtype.element_ty), [TILE])
    out_ptr += tile * TILE
    cell = tl.arange(0, TILE)
    left = n - tile * TILE
    if left >= TILE:
        tl.store(out_ptr + cell, values)
    else:
        tl.store(out_ptr + cell, values, mask=cell < left)
