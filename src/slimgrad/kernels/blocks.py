"""Blocks of a matrix, and which of them are kept: the geometry that both twins share.

A tensor is taken for a matrix whose columns are features: those of its last dimension, or of its second one if it has
four or more, as the input of a convolution has. Its rows are all that is left, samples and positions. The matrix is cut
into blocks of `height` rows and `width` columns; at the borders blocks are filled up with zeros, in what is kept and
never by a copy of the tensor.

Two layouts say which blocks are kept:

- BALANCED: the same number in each column of blocks, so that every shape is known beforehand and a product has as much
  to do for each. `values` holds [columns, kept, height, width], `index` the block's row for each, ascending.
- BSR: the strongest of the whole matrix. `values` holds [kept, height, width] row by row, `index` first where each row
  of blocks begins (one more than there are), then each block's column: crow_indices and col_indices of
  `torch.sparse_bsr_tensor`.

Norms are sums of magnitudes (L1) or of squares (L2; a root would change no order), in float32. Of equal ones the first
are kept, and a NaN is larger than all. With a `sample` of 4 they are taken from every fourth row of a block.

UNBIASED blocks are not the strongest: they are drawn, and scaled so that what is kept is the matrix on average; see
NOTE [Blocks that are right on average].

With a `group`, what is dropped is not taken for zero: a third tensor, `means`, holds for each group of so many rows the
mean of every column, [groups, columns]; where a block is kept it is zero. Norms are then those of what means do not
tell. The product gains a small one, (sums of dY over groups)^T means. If blocks are drawn, means stay where they are,
and values are what they do not tell.

NOTE [Blocks that are right on average]
Of n blocks with norms s, `kept` are drawn, block i with the chance p_i = min(1, c * s_i) for the c that makes chances
add up to `kept`; what is kept of it is divided by p_i. That is the least variance for given bytes, if all one knows is
norms. The draw is systematic: chances lie on a line one behind the other, and `kept` points of one distance are laid
upon it. So there are always as many, each at most once, in order; and since all columns of blocks draw with the same
number, they take nearly the same rows, of which a product then reads dY but once.

Chances are integers, of which ONE is certainty, rounded up: their sum is exact in any order, and no block is longer
than the distance of points. Where fewer than `kept` blocks have a norm at all, these are certain, and the others have
equal chances of being drawn beside them. The number that places the points is a hash of the norms of the first column
(see NOTE [Random numbers without a state] in groups.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels.geometry import feature_dim, part

INDEX_BYTES = 4
MOST_UNIT = 16
"""Elements that Triton can make use of in steps; see NOTE [Steps in units] in block_pack.py."""
SIZES = (16, 32, 64, 128)
"""Rows or columns that a block may have."""
LAYOUTS = BALANCED, BSR = "balanced", "bsr"
"""Among which blocks the strongest are kept; see above."""
NORMS = L1, L2 = "l1", "l2"
ONE = 2**16
"""The chance of a block that is certainly drawn."""
CERTAIN = -1.0
"""Stands for the norm of a block that is."""
LEAST_REST = 1e-30
"""Norms that add up to less are taken for zeros."""


class Matrix(NamedTuple):
    """A tensor as a matrix: element (r, c) lies at r // inner * outer_step + r % inner * inner_step + c * step."""

    rows: int
    columns: int
    inner: int
    outer_step: int
    inner_step: int
    step: int

    @classmethod
    def of(cls, shape: Sequence[int], stride: Sequence[int]) -> Matrix | None:
        """None where the rows lie in memory in a way that takes more than two steps to tell."""
        rows, columns = extent(shape)
        at = feature_dim(len(shape))
        groups: list[tuple[int, int]] = []
        for dim, (size, step) in enumerate(zip(shape, stride, strict=True)):
            if dim == at or size == 1:
                continue
            if groups and groups[-1][1] == size * step:
                groups[-1] = groups[-1][0] * size, step
            else:
                groups.append((size, step))
        if len(groups) > 2:
            return None
        (_, outer), (inner, near) = [(1, 0)] * (2 - len(groups)) + groups
        return cls(rows, columns, max(1, inner), outer, near, stride[at] if shape else 1)

    @property
    def unit(self) -> int:
        """The largest power of two, up to MOST_UNIT, that divides the columns and all steps but inner ones of 1."""
        inner = (step for step in (self.inner_step, self.step) if step != 1)
        return math.gcd(MOST_UNIT, self.columns, self.outer_step, *inner)

    @property
    def in_units(self) -> tuple[tuple[int, ...], tuple[bool, int, int, int]]:
        """All numbers, columns and steps divided by the unit; and whether all rows lie one step apart, the unit, and
        what the last two steps were divided by.
        """
        unit = self.unit
        inner, step = (1 if each == 1 else unit for each in (self.inner_step, self.step))
        numbers = (self.rows, self.columns // unit, self.inner, self.outer_step // unit)
        return (*numbers, self.inner_step // inner, self.step // step), (self.inner == self.rows, unit, inner, step)


class Grid(NamedTuple):
    """A matrix cut into blocks, of which so many are kept: in each column of blocks, or in all."""

    rows: int
    columns: int
    height: int
    width: int
    kept: int
    layout: str
    norm: str
    group: int = 0
    """Rows that have a mean; 0 if none have."""
    sample: int = 1
    """Of so many rows, one counts for the norm."""
    unbiased: bool = False

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        keep: float,
        block: tuple[int, int],
        layout: str,
        norm: str,
        group: int = 0,
        sample: int = 1,
        unbiased: bool = False,
    ) -> Grid:
        """For the part `keep` of the blocks. A block is no larger than the matrix needs."""
        rows, columns = extent(shape)
        height, width = fitted(block[0], rows), fitted(block[1], columns)
        down, across = math.ceil(rows / height), math.ceil(columns / width)
        kept = part(down if layout == BALANCED else down * across, keep)
        return cls(rows, columns, height, width, kept, layout, norm, min(group, height), sample, unbiased)

    @property
    def down(self) -> int:
        """Blocks in a column of them."""
        return math.ceil(self.rows / self.height)

    @property
    def across(self) -> int:
        return math.ceil(self.columns / self.width)

    @property
    def blocks(self) -> int:
        """How many are kept in all."""
        return self.kept * self.across if self.layout == BALANCED else self.kept

    @property
    def values_shape(self) -> tuple[int, ...]:
        lead = (self.across, self.kept) if self.layout == BALANCED else (self.kept,)
        return (*lead, self.height, self.width)

    @property
    def index_size(self) -> int:
        return self.blocks + (0 if self.layout == BALANCED else self.down + 1)

    @property
    def means_shape(self) -> tuple[int, int]:
        return (math.ceil(self.rows / self.group), self.columns) if self.group else (0, 0)

    def nbytes(self, itemsize: int) -> int:
        """Of values, index and means."""
        held = self.blocks * self.height * self.width + math.prod(self.means_shape)
        return held * itemsize + self.index_size * INDEX_BYTES


def extent(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of this shape."""
    columns = shape[feature_dim(len(shape))] if shape else 1
    return (math.prod(shape) // columns if columns else 0), columns


def fitted(size: int, extent: int) -> int:
    """The block's size, or the smallest one that covers the whole extent."""
    return min(size, next(each for each in (*SIZES, size) if each >= min(extent, size)))


def check_blocks(values: Tensor, index: Tensor, grid: Grid, means: Tensor | None = None) -> None:
    """Before memory is read by an index that somebody hands in."""
    if (means is None) is bool(grid.group) or (means is not None and means.shape != grid.means_shape):
        found = None if means is None else tuple(means.shape)
        raise SpecError(f"expected means of shape {grid.means_shape if grid.group else None}, found {found}")
    fits = values.shape == grid.values_shape and index.dtype == torch.int32 and index.shape == (grid.index_size,)
    if not fits or not (values.is_contiguous() and index.is_contiguous()):
        raise SpecError(
            f"expected values of shape {grid.values_shape} and {grid.index_size} indices of int32, contiguous, for "
            f"{grid}; found {tuple(values.shape)} and {tuple(index.shape)} of {index.dtype}"
        )
