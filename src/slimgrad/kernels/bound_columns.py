"""What packing and unpacking within a bound share: chunks as columns, and numbers. See bounds.py for what is written.

NOTE [A chunk to a thread]
Symbols have any length, and where one begins is known after all before it. A thread that tells a chunk alone keeps
that in a register, and a warp needs no word from another: a tile is LANES chunks, one for each of its threads. Memory
is read and written by rows of GROUP elements all the same, and arranged anew by way of shared memory (`columns_of`):
threads that each read 16 bytes of their own chunk, 512 apart, made packing 1.3 times and unpacking twice as long.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels import bounds
from slimgrad.kernels.tiles import GOLDEN, INTERPRETED, float_of, hashed

CHUNK, LANES, TILE = tl.constexpr(bounds.CHUNK), tl.constexpr(bounds.LANES), tl.constexpr(bounds.TILE)
GROUP, DOUBLINGS = tl.constexpr(32), tl.constexpr(5)
"""Elements of a chunk that are read or written at once, and the power of two that they are."""
WORD_BITS = tl.constexpr(bounds.WORD_BITS)
SIGNED, HAS_ZEROS = tl.constexpr(bounds.SIGNED), tl.constexpr(bounds.HAS_ZEROS)
PREDICTED, LEVEL_SHIFT = tl.constexpr(bounds.PREDICTED), tl.constexpr(bounds.LEVEL_SHIFT)
MOST_LEVEL, LEAST_MIDDLE = tl.constexpr(bounds.MOST_LEVEL), tl.constexpr(bounds.LEAST_MIDDLE)
STEP_OF_BOUND, STEP_OF_LEVEL = tl.constexpr(bounds.STEP_OF_BOUND), tl.constexpr(bounds.STEP_OF_LEVEL)
STATE_MASK, ONE_BITS = tl.constexpr(bounds.STATE_MASK), tl.constexpr(bounds.ONE_BITS)
MULTIPLIER = tl.constexpr(bounds.MULTIPLIER)


@triton.jit
def columns_of(x):
    """Of GROUP columns each, by threads that have a row for themselves."""
    parts = (x,)
    for level in tl.static_range(DOUBLINGS):
        even, odd = (), ()
        for i in tl.static_range(1 << level):
            some, others = tl.split(tl.reshape(parts[i], [LANES, GROUP >> (level + 1), 2]))
            even, odd = even + (some,), odd + (others,)  # noqa: RUF005
        parts = even + odd
    columns = ()
    for i in tl.static_range(GROUP):
        columns = columns + (tl.reshape(parts[i], [LANES]),)  # noqa: RUF005
    return columns


@triton.jit
def side_by_side(columns):
    """The counterpart of `columns_of`."""
    parts = columns
    for level in tl.static_range(DOUBLINGS):
        joined = ()
        for i in tl.static_range(GROUP >> (level + 1)):
            joined = joined + (tl.join(parts[i], parts[i + (GROUP >> (level + 1))]),)  # noqa: RUF005
        parts = joined
    return tl.reshape(parts[0], [LANES, GROUP])


@triton.jit
def load_group(x, first, left):
    """GROUP elements of each chunk; zeros from `left` on. Only at the end is there need for a mask."""
    at = tl.arange(0, LANES)[:, None] * CHUNK + first + tl.arange(0, GROUP)[None, :]
    if left >= TILE:  # noqa: SIM108
        value = tl.load(x + at)
    else:
        value = tl.load(x + at, mask=at < left, other=0.0)
    return value


@triton.jit
def store_columns(out, first, left, columns):
    at = tl.arange(0, LANES)[:, None] * CHUNK + first + tl.arange(0, GROUP)[None, :]
    if left >= TILE:
        tl.store(out + at, side_by_side(columns))
    else:
        tl.store(out + at, side_by_side(columns), mask=at < left)


@triton.jit
def first_state(chunk):
    return hashed(chunk.to(tl.uint32) * GOLDEN) | 1


@triton.jit
def next_state(state, DITHER: tl.constexpr):
    return state * MULTIPLIER if DITHER else state


@triton.jit
def offset_of(state, one, BETWEEN: tl.constexpr, DITHER: tl.constexpr, NATIVE: tl.constexpr):
    """What is added before a number is cut. `one` has the bits of 1.0, and is nothing the compiler knows: or else it
    takes two instructions for what one can do.
    """
    if DITHER and NATIVE:
        asm: tl.constexpr = "lop3.b32 $0, $1, 0x7fffff, $2, 0xea;"
        found = float_of(tl.inline_asm_elementwise(asm, "=r,r,r", [state, one], dtype=tl.int32, is_pure=True, pack=1))
    elif DITHER:
        found = float_of(((state & STATE_MASK) | ONE_BITS).to(tl.int32))
    else:
        found = tl.full([LANES], 1.0 if BETWEEN else 0.5, tl.float32)
    return found


@triton.jit
def size_of(x, inverse, offset):
    """|x| * inverse + offset, rounded once, and cut."""
    if INTERPRETED:
        found = (tl.abs(x).to(tl.float64) * inverse.to(tl.float64) + offset.to(tl.float64)).to(tl.float32)
    else:
        found = tl.fma(tl.abs(x), inverse, offset)
    return found.to(tl.int32)


@triton.jit
def value_of(less, offset, step, ZEROS: tl.constexpr):
    """What a number stands for, one less than which is given: the middle of an interval."""
    middle = less.to(tl.float32) + (1.5 - offset)
    if ZEROS:
        middle = tl.maximum(middle, LEAST_MIDDLE)
    return middle * step


@triton.jit
def sign_of(x):
    """0 or 1."""
    return (x.to(tl.uint32, bitcast=True) >> 31).to(tl.int32)


@triton.jit
def step_of(bound, level):
    return bound * (STEP_OF_BOUND - level.to(tl.float32) * STEP_OF_LEVEL)
