"""Group quantization in Triton: the twin of reference_groups.py, bit for bit because multiply and add are not fused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor

from slimgrad.kernels import groups as fmt
from slimgrad.kernels.groups import Groups, check_dense, check_groups, check_packed
from slimgrad.kernels.launch import Launch
from slimgrad.kernels.quant_pack import pack_kernel
from slimgrad.kernels.quant_unpack import unpack_kernel
from slimgrad.kernels.tiles import INTERPRETED


class Packer:
    """Packs and unpacks dense tensors of one layout. Made once, because finding out what follows from it takes 20 us.

    It checks nothing: `pack_groups` and `unpack_groups` do.
    """

    __slots__ = ("device", "dtype", "empty", "nbytes", "pairs", "shape", "singles", "stride", "unpacking")

    def __init__(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, how: Groups
    ) -> None:
        check_groups(how, dtype)
        n = math.prod(shape)
        programs = triton.cdiv(n, fmt.TILE)
        scale = (how.last(wild=False), how.factor(wild=False), how.last(wild=True), how.factor(wild=True))
        limits = (fmt.TAME[dtype], how.least_step(dtype))
        pack = (n, how.seed, how.bits, how.group, how.zeros, how.stochastic, *scale, *limits)
        # 64 registers keep 32 warps on a multiprocessor; the way of wild tiles alone would take 168.
        options = {"num_warps": 1, "enable_fp_fusion": False}
        self.singles = Launch(pack_kernel, programs, *pack, False, **options, maxnreg=64)
        by_pairs = dtype.itemsize == 2 and not INTERPRETED
        self.pairs = Launch(pack_kernel, programs, *pack, True, **options, maxnreg=64) if by_pairs else None
        unpack = (n, how.bits, how.group, how.zeros, torch.finfo(dtype).max)
        self.unpacking = Launch(unpack_kernel, programs, *unpack, **options)
        self.shape, self.stride, self.dtype, self.device = shape, stride, dtype, device
        self.nbytes, self.empty = how.nbytes(n), n == 0

    def pack(self, x: Tensor) -> Tensor:
        out = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        if not self.empty:
            by_pairs = self.pairs is not None and x.data_ptr() % 4 == 0
            (self.pairs if by_pairs else self.singles)(x, out)  # type: ignore[misc]
        return out

    def unpack(self, packed: Tensor) -> Tensor:
        out = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        if not self.empty:
            self.unpacking(packed, out)
        return out


packer = lru_cache(maxsize=4096)(Packer)


def pack_groups(x: Tensor, how: Groups) -> Tensor:
    check_dense(x)
    return packer(x.shape, x.stride(), x.dtype, x.device, how).pack(x)


def unpack_groups(
    packed: Tensor, shape: Sequence[int], stride: Sequence[int], how: Groups, dtype: torch.dtype
) -> Tensor:
    made = packer(tuple(shape), tuple(stride), dtype, packed.device, how)
    check_packed(packed, math.prod(shape), made.nbytes)
    return made.unpack(packed)
