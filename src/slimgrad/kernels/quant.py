"""Group quantization in Triton: the twin of reference_groups.py, bit for bit because multiply and add are not fused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
import triton
from torch import Tensor

from slimgrad.kernels import groups as fmt
from slimgrad.kernels.geometry import TILE, Layout, check_dense
from slimgrad.kernels.groups import Groups, check_groups, check_packed
from slimgrad.kernels.halves import is_native
from slimgrad.kernels.launch import ByLaunches, Launch
from slimgrad.kernels.quant_pack import pack_kernel
from slimgrad.kernels.quant_unpack import unpack_kernel
from slimgrad.kernels.tiles import INTERPRETED

REGISTERS = 64
"""Of a thread that packs: this keeps 32 warps on a multiprocessor. The way of wild tiles alone would take 168."""
PAIR_BYTES, ALIGNED = 4, 16
"""At a multiple of which a tensor begins that is read two elements at a time, and one that is written."""


@lru_cache(maxsize=4096)
def packer(layout: Layout, how: Groups) -> ByLaunches:
    n, dtype = math.prod(layout.shape), layout.dtype
    check_groups(how, dtype)
    unpack = (n, how.bits, how.group, how.zeros, torch.finfo(dtype).max)
    unpacking = Launch(unpack_kernel, triton.cdiv(n, TILE), *unpack, num_warps=1, enable_fp_fusion=False)
    packing, by_pairs = _packing(layout, how)
    return ByLaunches(layout, how.nbytes(n), packing, unpacking, by_pairs, alignment=PAIR_BYTES)


def _packing(layout: Layout, how: Groups, function: str = "") -> tuple[Launch, Launch | None]:
    """The kernel element by element, and two at a time where that is possible. With a function it writes f(x) too."""
    n, dtype = math.prod(layout.shape), layout.dtype
    scale = (how.last(wild=False), how.factor(wild=False), how.last(wild=True), how.factor(wild=True))
    limits = (fmt.TAME[dtype], how.least_step(dtype))
    nowhere = () if function else (None,)
    pack = (*nowhere, n, how.seed, how.bits, how.group, how.zeros, how.stochastic, *scale, *limits)

    rest, programs = (function, is_native(layout.device)), triton.cdiv(n, TILE)
    packing = partial(Launch, pack_kernel, programs, *pack, num_warps=1, enable_fp_fusion=False, maxnreg=REGISTERS)
    return packing(False, *rest), packing(True, *rest) if dtype.itemsize == 2 and not INTERPRETED else None


class Together:
    """f(x) and x in groups by one kernel, for one layout. It checks nothing."""

    __slots__ = ("by_pairs", "nbytes", "packing")

    def __init__(self, layout: Layout, how: Groups, function: str) -> None:
        check_groups(how, layout.dtype)
        self.nbytes = how.nbytes(math.prod(layout.shape))
        self.packing, self.by_pairs = _packing(layout, how, function)

    def __call__(self, x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        place = x.data_ptr()
        packed = torch.empty(self.nbytes, dtype=torch.uint8, device=x.device)
        y = torch.empty_like(x) if out is None or place % ALIGNED else out  # a launch takes it for aligned
        if self.nbytes:
            wide = self.by_pairs
            (self.packing if wide is None or place % PAIR_BYTES else wide)(x, packed, y)
        return (y if out is None or y is out else out.copy_(y)), packed


grouping = lru_cache(maxsize=4096)(Together)


def pack_groups(x: Tensor, how: Groups) -> Tensor:
    check_dense("pack_groups", x)
    return packer(Layout(x.shape, x.stride(), x.dtype, x.device), how).pack(x)


def unpack_groups(
    packed: Tensor, shape: Sequence[int], stride: Sequence[int], how: Groups, dtype: torch.dtype
) -> Tensor:
    made = packer(Layout(torch.Size(shape), tuple(stride), dtype, packed.device), how)
    check_packed(packed, math.prod(shape), made.nbytes)
    return made.unpack(packed)
