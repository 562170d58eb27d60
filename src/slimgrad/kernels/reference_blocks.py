"""The strongest blocks of a matrix in plain torch: the reference for kernels/blocking.py. See blocks.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.kernels.blocks import BALANCED, L1, Grid, check_blocks, feature_dim


def block_norms(x: Tensor, grid: Grid) -> Tensor:
    """One number for each block: [across, down]."""
    wide = _matrix(x).to(torch.promote_types(x.dtype, torch.float32))
    wide = wide.abs() if grid.norm == L1 else wide.square()
    return _blocks(wide, grid).sum((2, 3)).float()


def keep_blocks(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Values and index of the blocks that are kept."""
    return gather_blocks(x, select(block_norms(x, grid), grid), grid)


def gather_blocks(x: Tensor, index: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """The blocks that an index names."""
    at = places(index, grid)
    values = _blocks(_matrix(x.detach()), grid)[at.across, at.down].view(grid.values_shape)
    return values.contiguous(), index


def select(norms: Tensor, grid: Grid) -> Tensor:
    """The index of the blocks with the largest norms, of [across, down]."""
    if grid.layout == BALANCED:
        return _strongest(norms, grid.kept).to(torch.int32).flatten()
    flat = _strongest(norms.t().reshape(1, -1), grid.kept).flatten()
    borders = torch.arange(grid.down + 1, device=flat.device) * grid.across
    return torch.cat([torch.searchsorted(flat, borders), flat % max(1, grid.across)]).to(torch.int32)


def _strongest(norms: Tensor, kept: int) -> Tensor:
    """Where the largest of each row are, ascending; the first of equal ones, and a NaN before all."""
    order = norms.argsort(dim=1, descending=True, stable=True)
    return order[:, :kept].sort(dim=1).values


class Places(NamedTuple):
    """Of each block that is kept, in the order of its values."""

    across: Tensor
    down: Tensor


def places(index: Tensor, grid: Grid) -> Places:
    if grid.layout == BALANCED:
        across = torch.arange(grid.across, device=index.device).repeat_interleave(grid.kept)
        return Places(across, index.long())
    starts, across = index[: grid.down + 1].long(), index[grid.down + 1 :].long()
    order = torch.arange(grid.kept, device=index.device)
    return Places(across, torch.searchsorted(starts, order, right=True) - 1)


def put_blocks_back(values: Tensor, index: Tensor, shape: Sequence[int], stride: Sequence[int], grid: Grid) -> Tensor:
    """A tensor of that layout with the blocks where they were, and zeros elsewhere."""
    check_blocks(values, index, grid)
    at = places(index, grid)
    room = values.new_zeros(grid.across, grid.down, grid.height, grid.width)
    room[at.across, at.down] = values.view(-1, grid.height, grid.width)
    matrix = room.permute(1, 2, 0, 3).reshape(grid.down * grid.height, grid.across * grid.width)
    out = torch.empty_strided(shape, stride, dtype=values.dtype, device=values.device)
    at_end = out.movedim(feature_dim(out.dim()), -1) if out.dim() else out
    at_end.copy_(matrix[: grid.rows, : grid.columns].reshape(at_end.shape))
    return out


def block_product(values: Tensor, index: Tensor, dy: Tensor, grid: Grid, *, turned: bool = False) -> Tensor:
    """dY^T X for dY of [rows, outputs], by the blocks of X that are kept: [outputs, columns]; turned, X^T dY.

    One column of blocks after the other, so that of dY no more is gathered than one of them reads.
    """
    check_blocks(values, index, grid)
    at = places(index, grid)
    blocks = values.view(-1, grid.height, grid.width)
    out = dy.new_empty(dy.shape[1], grid.across * grid.width)
    for column in range(grid.across):
        mine = at.across == column
        rows = (at.down[mine][:, None] * grid.height + torch.arange(grid.height, device=dy.device)).flatten()
        read = dy[rows.clamp(max=grid.rows - 1)].masked_fill_((rows >= grid.rows)[:, None], 0)
        block = blocks[mine].reshape(-1, grid.width)
        out[:, column * grid.width : (column + 1) * grid.width] = read.t() @ block
    found = out[:, : grid.columns]
    return (found.t() if turned else found).contiguous()


def _matrix(x: Tensor) -> Tensor:
    """Rows by columns; a view where strides allow it."""
    if not x.dim():
        return x.view(1, 1)
    moved = x.movedim(feature_dim(x.dim()), -1)
    return moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1])


def _blocks(matrix: Tensor, grid: Grid) -> Tensor:
    """[across, down, height, width], filled up with zeros."""
    below, beside = grid.down * grid.height - grid.rows, grid.across * grid.width - grid.columns
    if below or beside:
        matrix = torch.nn.functional.pad(matrix, (0, beside, 0, below))
    return matrix.view(grid.down, grid.height, grid.across, grid.width).permute(2, 0, 1, 3)
