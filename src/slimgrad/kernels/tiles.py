"""What Triton kernels share: the shape of a tile of group quantization, numbers by their bits, and random numbers."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import os

import triton
import triton.language as tl

from slimgrad.kernels import geometry, groups, reference_groups

ROUNDS = tl.constexpr(geometry.ROUNDS)
THREADS = tl.constexpr(geometry.THREADS)
LANES = tl.constexpr(geometry.LANES)
TILE = tl.constexpr(geometry.TILE)
SPECIALS = tl.constexpr(groups.SPECIALS)
WILD_PART = tl.constexpr(groups.WILD_PART)
GOLDEN = tl.constexpr(reference_groups.GOLDEN)
MIX_1 = tl.constexpr(reference_groups.HASH_MULTIPLIERS[0])
MIX_2 = tl.constexpr(reference_groups.HASH_MULTIPLIERS[1])
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""The interpreter walks through a custom reduction element by element, where its own ones are quick; and it cuts bits
off where it should round to bf16."""


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def float32(x):
    """`x` in float32, exactly. By hand for bf16, whose subnormals the interpreter's own conversion loses."""
    if x.dtype == tl.bfloat16:
        return ((x.to(tl.uint16, bitcast=True).to(tl.uint32)) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def lanes():
    return tl.arange(0, LANES)[None, None, None, :]


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """`x` as the nearest number of `dtype`."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = bits_of(x)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def mixed(x):
    """Half of `hashed`."""
    x = x ^ (x >> 16)
    x = x * MIX_1
    return x ^ (x >> 15)


@triton.jit
def hashed(x):
    """Every bit of 32 mixed into every other: NOTE [Random numbers without a state] in groups.py."""
    x = mixed(x) * MIX_2
    return x ^ (x >> 16)
