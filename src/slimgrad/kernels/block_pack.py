"""Triton kernels that find the strongest blocks of a matrix, gather them and put them back. See blocks.py.

NOTE [Selection without a kernel of its own]
The norms of one column of blocks are a few hundred numbers: every program that gathers blocks of that column finds the
threshold by itself, bit by bit, in less time than another launch would take.

NOTE [Steps in units]
Triton reads several elements at once only where it knows that addresses are multiples of so many, which it takes from
numbers divisible by 16. Steps of 196 elements are not; so steps other than 1 come divided by the largest power of two
that divides them all, UNIT, and are multiplied by that constant again.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

COUNTS = ["inner", "down"]
"""Numbers that no variant of a kernel should be compiled for."""


@triton.jit
def addresses(
    r, c, inner, outer_step, inner_step, step, ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Where the elements of rows r and columns c lie. ONE if all rows are one step apart."""
    if ONE:
        down = r.to(tl.int64) * (inner_step * INNER)
    else:
        down = (r // inner).to(tl.int64) * (outer_step * UNIT) + (r % inner).to(tl.int64) * (inner_step * INNER)
    return down[:, None] + c[None, :] * (step * STEP)


@triton.jit
def fits(r, c, rows, columns, UNIT: tl.constexpr):
    return (r < rows)[:, None] & (c < columns * UNIT)[None, :]


@triton.jit(do_not_specialize=[*COUNTS, "groups"])
def norms_kernel(
    x, norms, rows, columns, inner, outer_step, inner_step, step, down, groups,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BESIDE: tl.constexpr, SQUARES: tl.constexpr,
):  # fmt: skip
    """The norms of BESIDE blocks that lie side by side."""
    row, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    r = row * HEIGHT + tl.arange(0, HEIGHT)
    c = group * (BESIDE * WIDTH) + tl.arange(0, BESIDE * WIDTH)
    at = addresses(r, c, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP)
    found = tl.load(x + at, mask=fits(r, c, rows, columns, UNIT), other=0.0).to(tl.float32)
    found = found * found if SQUARES else tl.abs(found)
    if BESIDE == 1:  # each thread adds up all it has before it asks others
        tl.store(norms + group * down + row, tl.sum(tl.sum(tl.reshape(found, [HEIGHT * WIDTH // 8, 8]), 1), 0))
    else:
        across = group * BESIDE + tl.arange(0, BESIDE)
        total = tl.sum(tl.reshape(tl.sum(found, 0), [BESIDE, WIDTH]), 1)
        tl.store(norms + across * down + row, total, mask=across * WIDTH < columns * UNIT)


@triton.jit
def threshold(keys, kept):
    """The `kept`-th largest of nonnegative numbers, as bits; padding is negative."""
    found = 0
    for number in range(31):
        trial = found | (1 << (30 - number))
        enough = tl.sum((keys >= trial).to(tl.int32), 0) >= kept
        found = tl.where(enough, trial, found)
    return found


@triton.jit(do_not_specialize=[*COUNTS, "kept", "each", "parts"])
def keep_kernel(
    x, values, norms, index, rows, columns, inner, outer_step, inner_step, step, down, kept, each, parts,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Select in one column of blocks, and gather `each` of those that are kept."""
    across, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    at = tl.arange(0, ROOM)
    inside = at < down
    bits = tl.load(norms + across * down + at, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    keys = tl.where(inside, bits, -1)
    least = threshold(keys, kept)
    above, equal = (keys > least).to(tl.int32), (keys == least).to(tl.int32)
    first = tl.cumsum(equal, 0) <= kept - tl.sum(above, 0)
    chosen = (above == 1) | ((equal == 1) & first)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    if part == 0:
        tl.store(index + across * kept + place, at, mask=chosen)
    number = part * each
    end = tl.minimum(kept, number + each)
    while number < end:
        row = tl.sum(tl.where(chosen & (place == number), at, 0), 0)
        block = values + (across * kept + number).to(tl.int64) * (HEIGHT * WIDTH)
        found = read_block(
            x, row, across, rows, columns, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP, HEIGHT, WIDTH
        )
        tl.store(block + within(HEIGHT, WIDTH), found)
        number += 1


@triton.jit
def within(HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Where the elements of a block lie among its values."""
    return tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]


@triton.jit
def read_block(
    x, row, across, rows, columns, inner, outer_step, inner_step, step,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One block of the matrix, filled up with zeros."""
    r, c = row * HEIGHT + tl.arange(0, HEIGHT), across * WIDTH + tl.arange(0, WIDTH)
    at = addresses(r, c, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP)
    return tl.load(x + at, mask=fits(r, c, rows, columns, UNIT), other=0.0)


@triton.jit(do_not_specialize=["inner"])
def gather_kernel(
    x, values, acrosses, downs, rows, columns, inner, outer_step, inner_step, step,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One block each, of those that are named."""
    number = tl.program_id(0)
    row, across = tl.load(downs + number), tl.load(acrosses + number)
    found = read_block(
        x, row, across, rows, columns, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP, HEIGHT, WIDTH
    )
    tl.store(values + number.to(tl.int64) * (HEIGHT * WIDTH) + within(HEIGHT, WIDTH), found)


@triton.jit(do_not_specialize=["inner", "kept"])
def put_kernel(
    values, out, acrosses, downs, rows, columns, inner, outer_step, inner_step, step, kept,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BALANCED: tl.constexpr,
):  # fmt: skip
    """One block each back to where it was."""
    number = tl.program_id(0)
    row = tl.load(downs + number)
    across = number // kept if BALANCED else tl.load(acrosses + number)
    found = tl.load(values + number.to(tl.int64) * (HEIGHT * WIDTH) + within(HEIGHT, WIDTH))
    r, c = row * HEIGHT + tl.arange(0, HEIGHT), across * WIDTH + tl.arange(0, WIDTH)
    at = addresses(r, c, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP)
    tl.store(out + at, found, mask=fits(r, c, rows, columns, UNIT))
