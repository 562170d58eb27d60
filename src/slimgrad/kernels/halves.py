"""Two 16-bit floats in a register, and functions of one instruction: what a GPU does for the price of one.

Elsewhere (Triton's interpreter, older and other GPUs) plain Triton says the same. Both ways give the same codes; values
may differ in the last bits of float32.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from slimgrad.kernels.tiles import INTERPRETED, float32, rounded

HALVES = (torch.bfloat16, torch.float16)
NATIVE_SINCE = (9, 0)
"""The compute capability that compares two bf16 at once."""


@lru_cache(maxsize=64)
def is_native(device: torch.device) -> bool:
    """Whether the instructions below exist there."""
    if INTERPRETED.value or device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= NATIVE_SINCE


def has_pairs(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether comparing two at once is possible, or wants to be tested: the interpreter says it in plain Triton."""
    return dtype in HALVES and (INTERPRETED.value or is_native(device))


@triton.jit
def low_of(words, HALF: tl.constexpr):
    """The lower half of each word in float32."""
    if tl.bfloat16 == HALF:
        x = (words << 16).to(tl.float32, bitcast=True)
    else:
        x = (words & 0xFFFF).to(tl.uint16).to(HALF, bitcast=True).to(tl.float32)
    return x


@triton.jit
def high_of(words, HALF: tl.constexpr):
    if tl.bfloat16 == HALF:
        x = (words & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        x = (words >> 16).to(tl.uint16).to(HALF, bitcast=True).to(tl.float32)
    return x


@triton.jit
def paired(low, high, HALF: tl.constexpr, NATIVE: tl.constexpr):
    """Words of two numbers, rounded to nearest."""
    if NATIVE and tl.bfloat16 == HALF:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=tl.uint32, is_pure=True, pack=1
        )
    if NATIVE:
        return tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $1, $2;", "=r,r,r", [high, low], dtype=tl.uint32, is_pure=True, pack=1
        )
    below = rounded(low, HALF).to(tl.uint16, bitcast=True).to(tl.uint32)
    return below | (rounded(high, HALF).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def _half_above(bits, border, HALF: tl.constexpr):
    x = float32(bits.to(tl.uint16).to(HALF, bitcast=True))
    return tl.where(x <= float32(border.to(tl.uint16).to(HALF, bitcast=True)), 0, 0xFFFF).to(tl.uint32)


@triton.jit
def above(words, border, HALF: tl.constexpr):
    """All bits of each half that is not at or below the border's half; NaN is above."""
    if INTERPRETED:
        low = _half_above(words & 0xFFFF, border & 0xFFFF, HALF)
        return low | (_half_above(words >> 16, border >> 16, HALF) << 16)
    if tl.bfloat16 == HALF:
        return tl.inline_asm_elementwise(
            "set.gtu.u32.bf16x2 $0, $1, $2;", "=r,r,r", [words, border], dtype=tl.uint32, is_pure=True, pack=1
        )
    return tl.inline_asm_elementwise(
        "set.gtu.u32.f16x2 $0, $1, $2;", "=r,r,r", [words, border], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def exp2(x, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.exp2(x)


@triton.jit
def inverse(x, NATIVE: tl.constexpr):
    if NATIVE:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / x
