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
from slimgrad.kernels.launch import ByLaunches, Launch
from slimgrad.kernels.quant_pack import pack_kernel
from slimgrad.kernels.quant_unpack import unpack_kernel
from slimgrad.kernels.tiles import INTERPRETED

REGISTERS = 64
"""Of a thread that packs: this keeps 32 warps on a multiprocessor. The way of wild tiles alone would take 168."""


@lru_cache(maxsize=4096)
def packer(layout: Layout, how: Groups) -> ByLaunches:
    n, dtype = math.prod(layout.shape), layout.dtype
    check_groups(how, dtype)
    programs = triton.cdiv(n, TILE)
    scale = (how.last(wild=False), how.factor(wild=False), how.last(wild=True), how.factor(wild=True))
    limits = (fmt.TAME[dtype], how.least_step(dtype))
    pack = (n, how.seed, how.bits, how.group, how.zeros, how.stochastic, *scale, *limits)
    packing = partial(Launch, pack_kernel, programs, *pack, num_warps=1, enable_fp_fusion=False, maxnreg=REGISTERS)
    by_pairs = packing(True) if dtype.itemsize == 2 and not INTERPRETED else None
    unpack = (n, how.bits, how.group, how.zeros, torch.finfo(dtype).max)
    unpacking = Launch(unpack_kernel, programs, *unpack, num_warps=1, enable_fp_fusion=False)
    return ByLaunches(layout, how.nbytes(n), packing(False), unpacking, by_pairs, alignment=4)


def pack_groups(x: Tensor, how: Groups) -> Tensor:
    check_dense("pack_groups", x)
    return packer(Layout(x.shape, x.stride(), x.dtype, x.device), how).pack(x)


def unpack_groups(
    packed: Tensor, shape: Sequence[int], stride: Sequence[int], how: Groups, dtype: torch.dtype
) -> Tensor:
    made = packer(Layout(torch.Size(shape), tuple(stride), dtype, packed.device), how)
    check_packed(packed, math.prod(shape), made.nbytes)
    return made.unpack(packed)
