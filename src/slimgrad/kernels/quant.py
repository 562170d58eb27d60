"""Group quantization in Triton: the twin of reference_groups.py, bit for bit because multiply and add are not fused."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor

from slimgrad.kernels import groups as fmt
from slimgrad.kernels.groups import Groups, check_dense, check_groups, check_packed
from slimgrad.kernels.launch import Variants, launch
from slimgrad.kernels.quant_pack import pack_kernel
from slimgrad.kernels.quant_unpack import unpack_kernel
from slimgrad.kernels.tiles import INTERPRETED


class Plan:
    """All about a launch that follows from how many elements are packed how; made once, because it takes 20 us."""

    __slots__ = ("aligned", "nbytes", "pack", "programs", "unaligned", "unpack", "unpacked")

    def __init__(self, n: int, how: Groups, dtype: torch.dtype) -> None:
        check_groups(how, dtype)
        scale = (how.last(wild=False), how.factor(wild=False), how.last(wild=True), how.factor(wild=True))
        limits = (fmt.TAME[dtype], how.least_step(dtype))
        self.nbytes = how.nbytes(n)
        self.programs = triton.cdiv(n, fmt.TILE)
        self.pack = (n, how.seed, how.bits, how.group, how.zeros, how.stochastic, *scale, *limits)
        self.unpack = (n, how.bits, how.group, how.zeros, torch.finfo(dtype).max)
        self.aligned: Variants = {}
        self.unaligned: Variants = {}
        self.unpacked: Variants = {}


plan = lru_cache(maxsize=4096)(Plan)


def pack_groups(x: Tensor, how: Groups) -> Tensor:
    check_dense(x)
    n = x.numel()
    with_plan = plan(n, how, x.dtype)
    out = torch.empty(with_plan.nbytes, dtype=torch.uint8, device=x.device)
    if n:
        pairs = x.itemsize == 2 and x.data_ptr() % 4 == 0 and not INTERPRETED
        variants = with_plan.aligned if pairs else with_plan.unaligned
        # 64 registers keep 32 warps on a multiprocessor; the way of wild tiles alone would take 168.
        launch(
            pack_kernel, variants, with_plan.programs, (x, out), *with_plan.pack, pairs,
            num_warps=1, enable_fp_fusion=False, maxnreg=64,
        )  # fmt: skip
    return out


def unpack_groups(
    packed: Tensor, shape: Sequence[int], stride: Sequence[int], how: Groups, dtype: torch.dtype
) -> Tensor:
    out = torch.empty_strided(shape, stride, dtype=dtype, device=packed.device)
    n = out.numel()
    with_plan = plan(n, how, dtype)
    check_packed(packed, n, with_plan.nbytes)
    if n:
        launch(
            unpack_kernel, with_plan.unpacked, with_plan.programs, (packed, out), *with_plan.unpack,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out
