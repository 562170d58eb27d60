"""The strongest blocks of a matrix in plain torch: the reference for kernels/blocking.py. See blocks.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.kernels.blocks import BALANCED, CERTAIN, L1, LEAST_REST, ONE, Grid, check_blocks
from slimgrad.kernels.geometry import feature_dim
from slimgrad.kernels.reference_groups import hashed


def keep_blocks(x: Tensor, grid: Grid) -> tuple[Tensor, ...]:
    """Values and index of the blocks that are kept; and means, if there are groups."""
    norms, means = strengths(x, grid)
    return gather_blocks(x, select(norms, grid), grid, means)


class Chosen(NamedTuple):
    """The blocks that are kept."""

    at: Tensor
    """Their index."""
    scales: Tensor | None
    """What each is multiplied with; None if all stay as they are."""


def strengths(x: Tensor, grid: Grid) -> tuple[Tensor, Tensor | None]:
    """One number for each block, [across, down], and the means of all groups."""
    wide = _wide(_matrix(x.detach()))
    means = None
    if grid.group:
        exact = _grouped(wide, grid) / _counts(wide, grid)
        wide = wide - exact.repeat_interleave(grid.group, 0)[: grid.rows]
        means = exact.to(x.dtype)
    wide = wide.abs() if grid.norm == L1 else wide.square()
    return _blocks(wide, grid)[:, :, :: grid.sample].sum((2, 3)).float(), means


def gather_blocks(x: Tensor, chosen: Chosen, grid: Grid, means: Tensor | None = None) -> tuple[Tensor, ...]:
    """The blocks that were chosen. Their means are zero from now on, unless they are subtracted."""
    at = places(chosen.at, grid)
    values = _blocks(_matrix(x.detach()), grid)[at.across, at.down]
    if chosen.scales is not None:
        told = 0 if means is None else _spread(means, grid)[at.across, at.down]
        values = ((_wide(values) - told) * chosen.scales[:, None, None]).to(x.dtype)
    elif means is not None:
        means = means.masked_fill(_kept(at, grid)[:: grid.group], 0)
    held = (values.view(grid.values_shape).contiguous(), chosen.at)
    return held if means is None else (*held, means)


def select(norms: Tensor, grid: Grid) -> Chosen:
    """Blocks by their norms, [across, down]: in each column, or among all."""
    lines = norms if grid.layout == BALANCED else norms.t().reshape(1, -1)
    scales = None
    if grid.unbiased and grid.blocks:
        found, scales = _drawn(lines, grid.kept, grid.norm != L1)
        scales = scales.flatten()
    else:
        found = _strongest(lines, grid.kept)
    flat = found.flatten()
    if grid.layout == BALANCED:
        return Chosen(flat.to(torch.int32), scales)
    borders = torch.arange(grid.down + 1, device=flat.device) * grid.across
    index = torch.cat([torch.searchsorted(flat, borders), flat % max(1, grid.across)])
    return Chosen(index.to(torch.int32), scales)


def _strongest(norms: Tensor, kept: int) -> Tensor:
    """Where the largest of each row are, ascending; the first of equal ones, and a NaN before all."""
    order = norms.argsort(dim=1, descending=True, stable=True)
    return order[:, :kept].sort(dim=1).values


def _drawn(norms: Tensor, kept: int, root: bool) -> tuple[Tensor, Tensor]:
    """Which of each row are drawn, ascending, and what they are multiplied with."""
    weights = _chances(norms.sqrt() if root else norms, kept)
    until = weights.cumsum(1)
    total = until[:, -1:]
    first = (_number(norms) * total) >> 32
    points = (torch.arange(kept, device=norms.device) * total + first) // kept
    drawn = torch.searchsorted(until, points, right=True)
    return drawn, total.float() / (weights.gather(1, drawn).float() * kept)


def _chances(norms: Tensor, kept: int) -> Tensor:
    """In each row: of ONE, and in sum at least `kept` times ONE."""
    open = torch.where(norms < math.inf, norms, CERTAIN)
    certain = (open < 0).sum(1, keepdim=True)
    more = torch.ones(1)
    while bool(more.any()):  # certain ones lift the others' chances
        sure = open * _ratio(open, certain, kept) >= 1
        more = sure.sum(1, keepdim=True)
        open, certain = open.masked_fill(sure, CERTAIN), certain + more
    none = open.clamp(min=0).sum(1, keepdim=True) < LEAST_REST
    open = torch.where(none & (open >= 0), 1.0, open)
    chances = (open * _ratio(open, certain, kept) * ONE).ceil().clamp(1, ONE)
    return chances.masked_fill(open < 0, ONE).long()


def _ratio(open: Tensor, certain: Tensor, kept: int) -> Tensor:
    """Of a chance and a norm, in each row, where so many are certain."""
    rest = open.clamp(min=0).sum(1, keepdim=True)
    return (kept - certain).clamp(min=0).float() / rest.clamp(min=LEAST_REST)


def _number(norms: Tensor) -> Tensor:
    """Of 32 bits, from the norms of the first row."""
    bits = norms[0].contiguous().view(torch.int32).long() & 0x7FFFFFFF
    return hashed(((bits ^ (bits >> 16)) & 0xFFFF).sum())


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


def put_blocks_back(
    values: Tensor,
    index: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    grid: Grid,
    means: Tensor | None = None,
) -> Tensor:
    """A tensor of that layout with the blocks where they were; elsewhere zeros, or means."""
    check_blocks(values, index, grid, means)
    at = places(index, grid)
    room = values.new_zeros(grid.across, grid.down, grid.height, grid.width)
    if means is not None:
        room.copy_(_spread(means, grid))
    if grid.unbiased:
        room[at.across, at.down] += values.view(-1, grid.height, grid.width)
    else:
        room[at.across, at.down] = values.view(-1, grid.height, grid.width)
    matrix = room.permute(1, 2, 0, 3).reshape(grid.down * grid.height, grid.across * grid.width)
    out = torch.empty_strided(shape, stride, dtype=values.dtype, device=values.device)
    at_end = out.movedim(feature_dim(out.dim()), -1) if out.dim() else out
    at_end.copy_(matrix[: grid.rows, : grid.columns].reshape(at_end.shape))
    return out


def block_product(
    values: Tensor, index: Tensor, dy: Tensor, grid: Grid, means: Tensor | None = None, *, turned: bool = False
) -> Tensor:
    """dY^T X for dY of [rows, outputs], by what is kept of X: [outputs, columns]; turned, X^T dY.

    One column of blocks after the other, so that of dY no more is gathered than one of them reads.
    """
    check_blocks(values, index, grid, means)
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
    if means is not None:
        found = found + _grouped(dy, grid).t() @ means
    return (found.t() if turned else found).contiguous()


def _grouped(matrix: Tensor, grid: Grid) -> Tensor:
    """The sums of groups of rows."""
    below = -len(matrix) % grid.group
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, below)) if below else matrix
    return padded.reshape(len(padded) // grid.group, grid.group, matrix.shape[1]).sum(1)


def _spread(means: Tensor, grid: Grid) -> Tensor:
    """For each element its mean, in blocks."""
    return _blocks(means.repeat_interleave(grid.group, 0)[: grid.rows], grid)


def _counts(matrix: Tensor, grid: Grid) -> Tensor:
    """Rows in each group: the last may have fewer."""
    starts = torch.arange(0, grid.rows, grid.group, device=matrix.device)
    return (grid.rows - starts).clamp(max=grid.group)[:, None].to(matrix.dtype)


def _kept(at: Places, grid: Grid) -> Tensor:
    """Of each element of the matrix, whether its block is kept."""
    kept = torch.zeros(grid.down, grid.across, dtype=torch.bool, device=at.across.device)
    kept[at.down, at.across] = True
    wide = kept.repeat_interleave(grid.height, 0)[: grid.rows]
    return wide.repeat_interleave(grid.width, 1)[:, : grid.columns]


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


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
