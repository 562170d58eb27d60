"""Blocks: keep the strongest blocks of what a product reads, and skip all others when it is multiplied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed, per_layout
from slimgrad.codecs.selection import check_choice, check_flag, check_part
from slimgrad.errors import SpecError
from slimgrad.kernels import Blocker, Grid, Layout
from slimgrad.kernels.blocks import BALANCED, BSR, L1, LAYOUTS, NORMS, SIZES, check_blocks
from slimgrad.spec import Need

GROUPS = (2, 4, 8, *SIZES)
"""Rows that may have a mean."""
SAMPLES = (1, 2, 4, 8)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True, repr=False)
class Blocks(Codec):
    """The part `keep` of all blocks, those with the largest norms; the others become zero.

    A tensor is taken for a matrix whose columns are features (the last dimension, or the second of four and more) and
    whose rows are all that is left; `block` is rows by columns. "balanced" keeps as many blocks in each column of them,
    "bsr" the strongest of all, as `torch.sparse_bsr_tensor` holds them. With `means=16` what is dropped is not taken
    for zero, but for the mean of its column over 16 rows; any power of two up to the rows of a block will do. With
    `sample=4` norms are taken from every fourth row: less exact, in less time. With `unbiased=True` blocks are drawn,
    the strong more often, and scaled so that gradients are right on average. The gradient of a weight is computed from
    what is kept itself (ops/block_operand.py).
    """

    keep: float = 0.1
    block: tuple[int, int] = (64, 64)
    norm: Literal["l1", "l2"] = L1  # type: ignore[assignment]
    layout: Literal["balanced", "bsr"] = BALANCED  # type: ignore[assignment]
    means: int = 0
    sample: int = 1
    unbiased: bool = False

    def __post_init__(self) -> None:
        check_part("Blocks", self.keep)
        pair = tuple(self.block) if isinstance(self.block, (tuple, list)) else ()  # JSON has lists
        if len(pair) != 2 or any(type(size) is not int or size not in SIZES for size in pair):
            sizes = ", ".join(map(str, SIZES))
            raise SpecError(f"Blocks: block must be rows and columns, each one of {sizes}; found {self.block!r}")
        object.__setattr__(self, "block", pair)
        check_choice("Blocks", "norm", self.norm, NORMS)
        check_choice("Blocks", "layout", self.layout, LAYOUTS)
        check_choice("Blocks", "sample", self.sample, SAMPLES)
        if type(self.means) is not int or (self.means and (self.means not in GROUPS or self.means > self.block[0])):
            groups = ", ".join(map(str, GROUPS))
            raise SpecError(
                f"Blocks: means must be 0 or rows, one of {groups} and no more than a block has; found {self.means!r}"
            )
        check_flag("Blocks", "unbiased", self.unbiased)
        if self.means and self.sample > 1:
            raise SpecError("Blocks: means are those of all rows; leave sample at 1")

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        return demand.need is Need.OPERAND and dtype in DTYPES

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        found = _treatment(tensor, self)
        return Packed(found.layout, demand, found.packer.keep(found.dense(tensor)), found.packer)

    def unpack(self, packed: Packed) -> Tensor:
        return packed.extra.put_back(*packed.payload)  # type: ignore[no-any-return]

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        return self.grid(shape).nbytes(dtype.itemsize)

    def grid(self, shape: Sequence[int]) -> Grid:
        """How a tensor of this shape is cut, and how many blocks of it are kept."""
        return Grid.of(shape, self.keep, self.block, self.layout, self.norm, self.means, self.sample, self.unbiased)

    def to_sparse_bsr(self, packed: Packed) -> Tensor:
        """What was packed as a `torch.sparse_bsr_tensor`: the matrix, filled up to whole blocks. Nothing is copied."""
        values, index, *means = packed.payload
        grid: Grid = packed.extra.grid
        if grid.layout != BSR or means:
            raise SpecError(f"{self!r}: only layout='bsr', without means, is what torch.sparse_bsr_tensor holds")
        size = (grid.down * grid.height, grid.across * grid.width)
        starts, columns = index.split([grid.down + 1, grid.kept])
        return torch.sparse_bsr_tensor(starts, columns, values, size, check_invariants=False)

    def from_sparse_bsr(self, matrix: Tensor) -> Packed:
        """A `torch.sparse_bsr_tensor` with this codec's block, as if its blocks had been packed."""
        if matrix.layout is not torch.sparse_bsr:
            raise SpecError(f"{self!r}: expected a torch.sparse_bsr tensor, found {matrix.layout}")
        values = matrix.values()
        if self.layout != BSR or self.means or tuple(values.shape[1:]) != self.block or values.dim() != 3:
            raise SpecError(
                f"{self!r}: expected layout='bsr', no means and blocks of {self.block}, "
                f"found values of {tuple(values.shape)}"
            )
        index = torch.cat([matrix.crow_indices(), matrix.col_indices()]).to(torch.int32)
        (rows, columns), (height, width) = matrix.shape, self.block
        grid = Grid(rows, columns, height, width, len(values), BSR, self.norm)
        layout = Layout(matrix.shape, (matrix.shape[1], 1), values.dtype, values.device)
        held = (values.clone(memory_format=torch.contiguous_format), index)
        check_blocks(*held, grid)
        return Packed(layout, Demand(need=Need.OPERAND), held, kernels.blocker(layout, grid))


@per_layout
def _treatment(layout: Layout, codec: Blocks) -> Blocker:
    return kernels.blocker(layout, codec.grid(layout.shape))
