"""Values within a bound in Triton: the twin of reference_bounds."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slimgrad.kernels import reference_bounds
from slimgrad.kernels.bound_pack import pack_kernel
from slimgrad.kernels.bound_unpack import unpack_kernel
from slimgrad.kernels.bounds import LEAST_BOUND, LEAST_SLACK, MANTISSA, MOST_ELEMENTS, TILE, Coding, Extent
from slimgrad.kernels.geometry import Layout, check_dense
from slimgrad.kernels.halves import is_native
from slimgrad.kernels.launch import Launch, multiprocessors
from slimgrad.kernels.reference_bounds import BoundedParts, check_bounded

PACKING, UNPACKING = 16, 32
"""Programs for each multiprocessor. What those that pack have at hand, 16 KiB each, is read twice: the second time from
the cache, if they are not too many.
"""
EXACT: dict[str, Any] = {"enable_fp_fusion": False, "num_warps": 1}
"""Numbers are the same as the reference's only if a product and a sum are two operations."""


def pack_bounded(x: Tensor, bound: Tensor, how: Coding, capacity: int | None = None) -> BoundedParts:
    """See the reference; without a capacity there is room for everything."""
    check_dense("pack_bounded", x)
    if not _serves(x.dtype, x.numel()):
        return reference_bounds.pack_bounded(x, bound, how, capacity)
    extent = Extent(x.numel(), x.element_size())
    room = extent.most_words if capacity is None else capacity
    device = x.device
    words = torch.empty(room, dtype=torch.int32, device=device)
    heads = torch.empty(extent.chunks, dtype=torch.int16, device=device)
    places = torch.zeros(extent.places, dtype=torch.int32, device=device)
    programs = min(extent.tiles, PACKING * multiprocessors(device))
    scratch = torch.empty(programs * TILE // 2, dtype=torch.int32, device=device)
    _packing(x.numel(), x.dtype, how, device, programs)(x, words, heads, places, bound, scratch, room)
    return BoundedParts(words, heads, places, bound)


def unpack_bounded(kept: BoundedParts, layout: Layout, how: Coding) -> Tensor:
    n = math.prod(layout.shape)
    check_bounded(kept, n, layout.dtype)
    if not _serves(layout.dtype, n):
        return reference_bounds.unpack_bounded(kept, layout, how)
    out = layout.empty()
    _unpacking(n, layout.dtype, how, out.device)(kept.words, out, kept.heads, kept.places, kept.bound)
    return out


@lru_cache(maxsize=4096)
def _packing(n: int, dtype: torch.dtype, how: Coding, device: torch.device, programs: int) -> Launch:
    limits = MANTISSA[dtype], torch.finfo(dtype).max, LEAST_BOUND[dtype], LEAST_SLACK[dtype]
    tiles = Extent(n, dtype.itemsize).tiles
    constants = *_format(dtype, how, device), *limits, how.between, *how.tries
    return Launch(pack_kernel, programs, n, tiles, *constants, **EXACT)


@lru_cache(maxsize=4096)
def _unpacking(n: int, dtype: torch.dtype, how: Coding, device: torch.device) -> Launch:
    tiles = Extent(n, dtype.itemsize).tiles
    programs = min(tiles, UNPACKING * multiprocessors(device))
    constants = *_format(dtype, how, device), how.between, how.zeros and how.dither, how.tries[1]
    return Launch(unpack_kernel, programs, n, tiles, *constants, **EXACT)


def _format(dtype: torch.dtype, how: Coding, device: torch.device) -> tuple[int, int, bool, bool]:
    extent = Extent(0, dtype.itemsize)
    return extent.raw_words, extent.length_shift, how.dither, is_native(device)


def _serves(dtype: torch.dtype, n: int) -> bool:
    return dtype in MANTISSA and 0 < n <= MOST_ELEMENTS
