"""Group quantization in Triton: the twin of reference_groups.py, bit for bit because multiply and add are not fused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache, partial

import torch
import triton
from torch import Tensor

from slimgrad.kernels import groups as fmt
from slimgrad.kernels.geometry import Layout, check_dense
from slimgrad.kernels.groups import Groups, check_groups, check_packed
from slimgrad.kernels.launch import Launch
from slimgrad.kernels.quant_pack import pack_kernel
from slimgrad.kernels.quant_unpack import unpack_kernel
from slimgrad.kernels.tiles import INTERPRETED

REGISTERS = 64
"""Of a thread that packs: this keeps 32 warps on a multiprocessor. The way of wild tiles alone would take 168."""


class Packer:
    """Packs and unpacks dense tensors of one layout. Made once, because finding out what follows from it takes 20 us.

    It checks nothing: `pack_groups` and `unpack_groups` do.
    """

    __slots__ = ("layout", "nbytes", "pairs", "singles", "unpacking")

    def __init__(self, layout: Layout, how: Groups) -> None:
        n, dtype = math.prod(layout.shape), layout.dtype
        check_groups(how, dtype)
        programs = triton.cdiv(n, fmt.TILE)
        scale = (how.last(wild=False), how.factor(wild=False), how.last(wild=True), how.factor(wild=True))
        limits = (fmt.TAME[dtype], how.least_step(dtype))
        pack = (n, how.seed, how.bits, how.group, how.zeros, how.stochastic, *scale, *limits)
        packing = partial(Launch, pack_kernel, programs, *pack, num_warps=1, enable_fp_fusion=False, maxnreg=REGISTERS)
        self.singles = packing(False)
        self.pairs = packing(True) if dtype.itemsize == 2 and not INTERPRETED else None
        unpack = (n, how.bits, how.group, how.zeros, torch.finfo(dtype).max)
        self.unpacking = Launch(unpack_kernel, programs, *unpack, num_warps=1, enable_fp_fusion=False)
        self.layout = layout
        self.nbytes = how.nbytes(n)

    def pack(self, x: Tensor) -> Tensor:
        out = torch.empty(self.nbytes, dtype=torch.uint8, device=self.layout.device)
        if self.nbytes:
            by_pairs = self.pairs is not None and x.data_ptr() % 4 == 0
            (self.pairs if by_pairs else self.singles)(x, out)  # type: ignore[misc]
        return out

    def unpack(self, packed: Tensor) -> Tensor:
        out = self.layout.empty()
        if self.nbytes:
            self.unpacking(packed, out)
        return out


packer = lru_cache(maxsize=4096)(Packer)


def pack_groups(x: Tensor, how: Groups) -> Tensor:
    check_dense("pack_groups", x)
    return packer(Layout(x.shape, x.stride(), x.dtype, x.device), how).pack(x)


def unpack_groups(
    packed: Tensor, shape: Sequence[int], stride: Sequence[int], how: Groups, dtype: torch.dtype
) -> Tensor:
    made = packer(Layout(torch.Size(shape), tuple(stride), dtype, packed.device), how)
    check_packed(packed, math.prod(shape), made.nbytes)
    return made.unpack(packed)
