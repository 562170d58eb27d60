"""How tensors lie in memory, and the geometry of a max-pool: shared by both twins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from slimgrad.errors import SpecError

ROUNDS, THREADS, LANES = 4, 32, 8
TILE = ROUNDS * THREADS * LANES
"""Elements as a warp of a GPU reads them: 16 bytes of 16-bit floats per thread and round."""

PATTERNS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes, the integers that numbers are taken for where only their bits matter."""

MAX_WINDOW = 255
"""Positions inside a window that one byte can tell apart, beside NO_POSITION."""

NO_POSITION = 255
"""The code of an index that is not in its window: for a window full of -inf, CUDA's channels_last pool gives index 0
wherever the window is."""


class Windows(NamedTuple):
    """A max-pool over the last `rank` dimensions; all tuples have `rank` entries."""

    input_size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.input_size)

    @property
    def fits(self) -> bool:
        """Whether `pack_window` can serve it: well formed, a byte is enough, and no window lies wholly in the padding.

        Torch bounds the padding by half the window, so only a dilation that steps over a whole input can make an
        empty window. Torch then returns an index outside the plane, for which there is no position to speak of.
        """
        fields = (self.input_size, self.kernel, self.stride, self.padding, self.dilation)
        if self.rank not in (1, 2, 3) or any(len(field) != self.rank for field in fields):
            return False
        steps = zip(self.input_size, self.padding, self.dilation, strict=True)
        return math.prod(self.kernel) <= MAX_WINDOW and all(d == 1 or p == 0 or d <= i for i, p, d in steps)


@dataclass(frozen=True)
class Planes:
    """How a dense index tensor lies in memory: [planes..., *out, inner], inner > 1 for channels_last."""

    out: tuple[int, ...]
    inner: int

    def slabs(self, t: Tensor) -> Tensor:
        """`t` in memory order, as [planes, *out, inner]; a view."""
        moved = t if self.inner == 1 else t.movedim(-len(self.out) - 1, -1)
        outer = t.numel() // max(1, math.prod(self.out) * self.inner)
        return moved.view(outer, *self.out, self.inner)


def layout_of(t: Tensor, rank: int) -> Planes | None:
    """The layout of `t`, or None if it is neither contiguous nor channels_last."""
    if t.dim() < rank:
        raise SpecError(f"expected at least {rank} dimensions of windows, found shape {tuple(t.shape)}")
    out = tuple(t.shape[t.dim() - rank :])
    if t.is_contiguous():
        return Planes(out, 1)
    if t.dim() > rank and t.movedim(-rank - 1, -1).is_contiguous():
        return Planes(out, t.shape[-rank - 1])
    return None


def dense(t: Tensor, rank: int, dtype: torch.dtype) -> tuple[Tensor, Planes]:
    """`t`, checked and copied only if its memory has gaps or an unknown order, and its layout."""
    if t.dtype != dtype:
        raise SpecError(f"expected {dtype}, found {t.dtype}")
    t = t.detach()
    layout = layout_of(t, rank)
    if layout is None:
        t = t.contiguous()
        layout = Planes(tuple(t.shape[t.dim() - rank :]), 1)
    return t, layout


def checked(pool: Windows) -> Windows:
    """The geometry, if one byte per index can serve it."""
    if not pool.fits:
        raise SpecError(
            f"{pool} cannot be packed: expected 1, 2 or 3 entries in each field, at most {MAX_WINDOW} positions in a "
            "window (one byte), and no dilation larger than a padded input; use narrow_int instead"
        )
    return pool


def feature_dim(dims: int) -> int:
    """Of N, C, ... as convolutions have it, or of ..., C as products do."""
    return 1 if dims >= 4 else dims - 1


def part(n: int, keep: float) -> int:
    """keep * n, rounded up; but 0.1 * 50 is 5, though it is a little more in floating point. At least one, if any."""
    return min(n, max(1, math.ceil(keep * n - 1e-9 * n)))


def divider(size: int) -> tuple[int, int]:
    """(multiplier, shift) with x // size == x * multiplier >> (31 + shift) for every 0 <= x < 2**31.

    The multiplier exceeds 2**(31 + shift) / size by at most 1, which adds less than 2**-shift <= 1 / size to the
    quotient: too little to reach the next integer. For sizes up to 2**30 it is below 2**32.
    """
    shift = (size - 1).bit_length()
    return 2 ** (31 + shift) // size + 1, shift


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory without gaps or overlaps, in any order of dimensions."""
    return tensor.is_contiguous() or is_dense_layout(tensor.shape, tensor.stride())


def is_dense_layout(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """The same by shape and strides."""
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


class Layout(NamedTuple):
    """Shape, strides, dtype and device: all that is left of a tensor whose values are not kept."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The tensor's layout; where memory is shared or skipped, the dense layout nearest to it."""
        if tensor.is_contiguous():
            return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return cls.near(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    @classmethod
    def near(cls, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Layout:
        """The dense layout nearest to this one; this one, if it is dense."""
        if not is_dense_layout(shape, stride):
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            stride = torch.empty_like(tensor).stride()
        return cls(shape, stride, dtype, device)

    def dense(self, tensor: Tensor) -> Tensor:
        """The tensor in this layout, without a copy where it has it."""
        return tensor if tensor.stride() == self.stride else self.empty().copy_(tensor)

    def flat(self, tensor: Tensor) -> Tensor:
        """The elements in the order of this layout's memory, without a copy where the tensor has this layout."""
        return self.dense(tensor).as_strided((tensor.numel(),), (1,))

    def restore(self, flat: Tensor) -> Tensor:
        """The inverse of `flat`."""
        return flat.as_strided(self.shape, self.stride)

    def empty(self) -> Tensor:
        """A tensor of this layout with no defined values; no kernel runs."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


def check_dense(function: str, x: Tensor) -> None:
    if not is_dense(x):
        raise SpecError(
            f"{function}: expected a dense tensor, found shape {tuple(x.shape)} with strides {x.stride()}, "
            "which leave gaps or overlap; copy it first"
        )
