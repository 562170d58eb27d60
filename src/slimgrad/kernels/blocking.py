"""The strongest blocks of a matrix in Triton: the twin of reference_blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slimgrad.kernels import reference_blocks
from slimgrad.kernels.block_multiply import product_kernel, sum_kernel
from slimgrad.kernels.block_pack import (
    fill_kernel,
    gather_kernel,
    group_kernel,
    keep_kernel,
    means_kernel,
    norms_kernel,
    put_kernel,
)
from slimgrad.kernels.blocks import BALANCED, L2, MOST_UNIT, Grid, Matrix, check_blocks
from slimgrad.kernels.geometry import Layout
from slimgrad.kernels.launch import (
    Launch,
    device_of,
    is_current,
    launch,
    multiprocessors,
    reads_tiles,
    shared_bytes,
    variant_of,
)
from slimgrad.kernels.reference_blocks import places, select

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TILE_ELEMENTS = 4096
"""That a program sums up at once, if blocks are smaller; more take longer."""
MOST_DOWN = 16384
"""Norms that fit into one program; more are sorted by torch."""
GATHERING = 4
"""Programs for each multiprocessor that gather blocks."""
OUTS = {256: 8, 128: 4, 64: 4, 32: 4, 16: 4}
"""Outputs that a tile of dW may have, and the warps for it."""
MOST_STAGES, STAGES_OF_MANY = 8, 3
"""Of a program that has a multiprocessor for itself, and of one that shares it."""
LEAST_BLOCKS = 4
"""That a program multiplies, if a column of blocks is split."""
SUM_SIZE = 1024
GROUP_WIDTH = 128
MOST_SPLITS = 16


def keep_blocks(x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
    made = packer(Layout.of(x), grid)
    return reference_blocks.keep_blocks(x, grid) if made is None else made.keep(made.layout.dense(x))


def put_blocks_back(
    values: Tensor,
    index: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    grid: Grid,
    means: Tensor | None = None,
) -> Tensor:
    check_blocks(values, index, grid, means)
    made = packer(Layout(torch.Size(shape), tuple(stride), values.dtype, values.device), grid)
    if made is None:
        return reference_blocks.put_blocks_back(values, index, shape, stride, grid, means)
    return made.put_back(values, index, means)


def block_product(
    values: Tensor, index: Tensor, dy: Tensor, grid: Grid, means: Tensor | None = None, *, turned: bool = False
) -> Tensor:
    check_blocks(values, index, grid, means)
    return product(values, index, dy, grid, means, turned)


@lru_cache(maxsize=4096)
def packer(layout: Layout, grid: Grid) -> Blocker | None:
    matrix = Matrix.of(layout.shape, layout.stride)
    return None if matrix is None or not _serves(layout.dtype, grid) else Blocker(layout, grid, matrix)


class Blocker:
    """All launches for one layout."""

    __slots__ = ("balanced", "filling", "grid", "in_one", "keeping", "layout", "norms", "putting")

    def __init__(self, layout: Layout, grid: Grid, matrix: Matrix) -> None:
        numbers, steps = matrix.in_units
        size = (grid.height, grid.width)
        read = grid.height // grid.sample * grid.width
        beside = max(1, min(TILE_ELEMENTS // read, triton.next_power_of_2(grid.across)))
        groups = triton.cdiv(grid.across, beside)
        each = triton.cdiv(grid.blocks, GATHERING * multiprocessors(layout.device))
        parts = triton.cdiv(grid.kept, each)
        room = triton.next_power_of_2(max(16, grid.down))
        summing = (*numbers, grid.down, groups, *steps, *size, beside, grid.norm == L2)
        self.layout = layout
        self.grid = grid
        self.balanced = grid.layout == BALANCED
        self.in_one = self.balanced and grid.down <= MOST_DOWN
        """Whether one kernel selects and gathers."""
        kernel, option = (means_kernel, grid.group) if grid.group else (norms_kernel, grid.sample)
        warps = 4 if beside == 1 and not grid.group else 1  # where sums run across rows, more would wait for each other
        self.norms = Launch(kernel, grid.down * groups, *summing, option, num_warps=warps)
        if self.in_one:
            counts = (grid.down, grid.kept, each, parts)
            options = (grid.group, room, grid.unbiased, grid.norm == L2)
            self.keeping = Launch(keep_kernel, grid.across * parts, *numbers, *counts, *steps, *size, *options)
        else:
            self.keeping = Launch(gather_kernel, grid.blocks, *numbers, *steps, *size, grid.group, grid.unbiased)
        added = grid.unbiased and grid.group > 0
        self.putting = Launch(put_kernel, grid.blocks, *numbers, grid.kept, *steps, *size, self.balanced, added)
        self.filling = Launch(fill_kernel, grid.down * grid.across, *numbers, grid.across, *steps, *size, grid.group)

    def strengths(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Norms and means; norms twice where there are none."""
        grid = self.grid
        norms = torch.empty(grid.across, grid.down, dtype=torch.float32, device=x.device)
        if not grid.group:
            self.norms(x, norms)
            return norms, norms
        means = torch.empty(grid.means_shape, dtype=x.dtype, device=x.device)
        self.norms(x, norms, means)
        return norms, means

    def keep(self, x: Tensor) -> tuple[Tensor, ...]:
        grid = self.grid
        norms, means = self.strengths(x)
        values = torch.empty(grid.values_shape, dtype=x.dtype, device=x.device)
        if self.in_one:
            index = torch.empty(grid.index_size, dtype=torch.int32, device=x.device)
            self.keeping(x, values, norms, index, means)
        else:
            index, scales = select(norms, grid)
            self.keeping(x, values, *_places(index, grid), means, norms if scales is None else scales)
        return (values, index, means) if grid.group else (values, index)

    def put_back(self, values: Tensor, index: Tensor, means: Tensor | None = None) -> Tensor:
        out = self.layout.empty()
        if means is None:
            out.zero_()
        else:
            self.filling(means, out)
        self.putting(values, out, *((index, index) if self.balanced else _places(index, self.grid)))
        return out

    def product(self, held: Sequence[Tensor], dy: Tensor, turned: bool) -> Tensor:
        values, index, *means = held
        return product(values, index, dy, self.grid, means[0] if means else None, turned)


class Tiling(NamedTuple):
    """How a product is divided among programs."""

    out: int
    """Outputs in one tile."""
    tiles: int
    splits: int
    stages: int


@lru_cache(maxsize=4096)
def tiling(grid: Grid, outputs: int, itemsize: int, device: torch.device) -> Tiling:
    """The smallest tiles with which every program has a multiprocessor for itself; medium ones if there are too many.

    By measurements of ten shapes on an H200: what a program reads falls with the size of its tile, and programs that
    wait for a second turn take the time of a whole one.
    """
    most = multiprocessors(device)
    fitting = [out for out in OUTS if out // 2 < outputs and out * itemsize <= 512] or [min(OUTS)]
    programs = {out: triton.cdiv(outputs, out) * grid.across for out in fitting}
    alone = [out for out in fitting if programs[out] <= most and out >= min(64, max(fitting))]
    out = alone[-1] if alone else min(fitting[0], 128)
    room = shared_bytes(device) // (grid.height * (grid.width + out) * itemsize)
    splits = min(most // programs[out], _per_column(grid) // LEAST_BLOCKS, MOST_SPLITS) if alone else 1
    stages = min(room, MOST_STAGES if alone else STAGES_OF_MANY)
    return Tiling(out, triton.cdiv(outputs, out), max(1, splits), max(2, stages))


class Incoming(NamedTuple):
    """What a product must know of dY: a kernel is compiled for it."""

    outputs: int
    step: int
    """From row to row."""
    dtype: torch.dtype
    device: torch.device
    aligned: bool
    """Whether it begins at a multiple of 16 bytes."""

    @classmethod
    def of(cls, dy: Tensor) -> Incoming:
        return cls(dy.shape[1], dy.stride(0), dy.dtype, dy.device, dy.data_ptr() % 16 == 0)

    @property
    def in_tiles(self) -> bool:
        """Whether the tensor memory accelerator can read it: rows must begin at multiples of 16 bytes."""
        return self.aligned and self.step * self.dtype.itemsize % 16 == 0 and reads_tiles(self.device)

    @property
    def unit(self) -> int:
        """See NOTE [Steps in units]."""
        return math.gcd(MOST_UNIT, self.step, self.outputs)


class Multiply:
    """The launch of a product: with a compiled kernel found once, because that takes longer than the rest."""

    __slots__ = ("grid", "how", "outputs", "rest", "shape", "tma", "variant")

    def __init__(self, grid: Grid, dy: Incoming, turned: bool, precision: str) -> None:
        self.grid = grid
        self.outputs = dy.outputs
        self.tma = dy.in_tiles
        self.how = how = tiling(grid, dy.outputs, dy.dtype.itemsize, dy.device)
        self.shape = (grid.columns, dy.outputs) if turned else (dy.outputs, grid.columns)
        numbers = (grid.kept, grid.rows, dy.outputs // dy.unit, grid.columns, dy.step // dy.unit)
        counts = (how.tiles, grid.across, how.splits, dy.outputs * grid.columns)
        size = (grid.height, grid.width, how.out, dy.unit)
        self.rest = (*numbers, *counts, *size, grid.layout == BALANCED, turned, self.tma, precision, how.stages)
        self.variant: Any = None

    def __call__(self, values: Tensor, index: Tensor, dy: Tensor) -> Tensor:
        how, device = self.how, dy.device
        out = torch.empty(self.shape, dtype=dy.dtype, device=device)
        parts = out if how.splits == 1 else torch.empty((how.splits, out.numel()), dtype=torch.float32, device=device)
        operands = self._described(values, dy) if self.tma else (values, dy)
        columns = _columns(index, self.grid)
        programs = how.tiles * self.grid.across * how.splits
        if self.variant is None or not is_current(dy):
            with device_of(dy):
                compiled = product_kernel[(programs,)](*operands, parts, *columns, *self.rest, num_warps=OUTS[how.out])
            self.variant = variant_of(compiled)
        else:
            plain = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in (*operands, parts, *columns)]
            launch(self.variant, programs, dy.get_device(), *plain, *self.rest)
        if how.splits > 1:
            _adding(out.numel(), how.splits, out.dtype)(parts, out)
        return out

    def _described(self, values: Tensor, dy: Tensor) -> tuple[Any, Any]:
        """For the tensor memory accelerator."""
        height, width = self.grid.height, self.grid.width
        flat = [values.numel() // width, width]
        return (
            TensorDescriptor(values, flat, [width, 1], [height, width]),
            TensorDescriptor(dy, [self.grid.rows, self.outputs], [dy.stride(0), 1], [height, self.how.out]),
        )


_multiply = lru_cache(maxsize=4096)(Multiply)


def product(values: Tensor, index: Tensor, dy: Tensor, grid: Grid, means: Tensor | None, turned: bool) -> Tensor:
    if not _serves(values.dtype, grid) or not dy.shape[1] or dy.dtype != values.dtype:
        return reference_blocks.block_product(values, index, dy, grid, means, turned=turned)
    dy = dy if dy.stride(1) == 1 and dy.stride(0) >= dy.shape[1] else dy.contiguous()
    out = _multiply(grid, Incoming.of(dy), turned, precision())(values, index, dy)
    if means is None:
        return out
    sums = group_sums(dy, grid)
    return out.addmm_(means.t(), sums) if turned else out.addmm_(sums.t(), means)


def group_sums(dy: Tensor, grid: Grid) -> Tensor:
    """The sums of dY over groups of rows."""
    sums = torch.empty(grid.means_shape[0], dy.shape[1], dtype=dy.dtype, device=dy.device)
    _grouping(grid, Incoming.of(dy))(dy, sums)
    return sums


@lru_cache(maxsize=4096)
def _grouping(grid: Grid, dy: Incoming) -> Launch:
    width = min(GROUP_WIDTH, triton.next_power_of_2(dy.outputs))
    groups = triton.cdiv(dy.outputs, width)
    numbers = (grid.rows, dy.outputs // dy.unit, dy.step // dy.unit, groups)
    return Launch(group_kernel, grid.down * groups, *numbers, grid.height, width, grid.group, dy.unit, num_warps=1)


@lru_cache(maxsize=4096)
def _adding(n: int, splits: int, dtype: torch.dtype) -> Launch:
    """For one dtype of the sum."""
    return Launch(sum_kernel, triton.cdiv(n, SUM_SIZE), n, splits, SUM_SIZE)


def _per_column(grid: Grid) -> int:
    return grid.kept if grid.layout == BALANCED else math.ceil(grid.kept / grid.across)


def _columns(index: Tensor, grid: Grid) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of the blocks, column after column; where each lies; and where each column begins."""
    if grid.layout == BALANCED:
        return index, index, index
    across, downs = _places(index, grid)
    ordered, order = across.sort(stable=True)
    borders = torch.arange(grid.across + 1, dtype=torch.int32, device=index.device)
    return downs[order], order.to(torch.int32), torch.searchsorted(ordered, borders, out_int32=True)


def _places(index: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    across, downs = places(index, grid)
    return across.to(torch.int32), downs.to(torch.int32)


def _serves(dtype: torch.dtype, grid: Grid) -> bool:
    return dtype in DTYPES and grid.blocks > 0


def precision() -> str:
    """How float32 is multiplied: as torch is told to."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
