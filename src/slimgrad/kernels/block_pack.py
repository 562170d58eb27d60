"""Triton kernels that find the strongest blocks of a matrix, gather them and put them back. See blocks.py.

NOTE [Selection without a kernel of its own]
The norms of one column of blocks are a few hundred numbers: every program that gathers blocks of that column finds the
threshold by itself, bit by bit, instead of waiting for a launch that finds it for all.

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
    x, norms, means, rows, columns, inner, outer_step, inner_step, step, down, groups,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BESIDE: tl.constexpr, GROUP: tl.constexpr, SAMPLE: tl.constexpr,
    SQUARES: tl.constexpr,
):  # fmt: skip
    """The norms of BESIDE blocks that lie side by side, and the means of their groups of rows.

    The last rows come first: they were written last, and lie in the cache if any do.
    """
    row, group = down - 1 - tl.program_id(0) // groups, tl.program_id(0) % groups
    r = row * HEIGHT + tl.arange(0, HEIGHT // SAMPLE) * SAMPLE
    c = group * (BESIDE * WIDTH) + tl.arange(0, BESIDE * WIDTH)
    at = addresses(r, c, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP)
    inside = fits(r, c, rows, columns, UNIT)
    found = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if GROUP > 0:
        grouped = tl.reshape(found, [HEIGHT // GROUP, GROUP, BESIDE * WIDTH])
        first = row * HEIGHT + tl.arange(0, HEIGHT // GROUP) * GROUP
        count = tl.minimum(tl.maximum(rows - first, 1), GROUP).to(tl.float32)
        mean = tl.sum(grouped, 1) / count[:, None]
        place = (first // GROUP).to(tl.int64)[:, None] * (columns * UNIT) + c[None, :]
        tl.store(means + place, mean, mask=fits(first, c, rows, columns, UNIT))
        found = tl.where(inside, tl.reshape(grouped - mean[:, None, :], [HEIGHT, BESIDE * WIDTH]), 0.0)
    found = found * found if SQUARES else tl.abs(found)
    if BESIDE == 1:  # each thread adds up all it has before it asks others
        tl.store(
            norms + group * down + row, tl.sum(tl.sum(tl.reshape(found, [HEIGHT // SAMPLE * WIDTH // 8, 8]), 1), 0)
        )
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
    x, values, norms, index, means, rows, columns, inner, outer_step, inner_step, step, down, kept, each, parts,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr,
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
        forget(means, row, across, rows, columns * UNIT, HEIGHT, WIDTH, GROUP)
        number += 1


@triton.jit
def forget(means, row, across, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr):
    """The means of a block that is kept."""
    if GROUP > 0:
        first = row * HEIGHT + tl.arange(0, HEIGHT // GROUP) * GROUP
        c = across * WIDTH + tl.arange(0, WIDTH)
        place = (first // GROUP).to(tl.int64)[:, None] * columns + c[None, :]
        nothing = tl.zeros([HEIGHT // GROUP, WIDTH], tl.float32)
        tl.store(means + place, nothing, mask=(first < rows)[:, None] & (c < columns)[None, :])


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
    x, values, acrosses, downs, means, rows, columns, inner, outer_step, inner_step, step,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One block each, of those that are named."""
    number = tl.program_id(0)
    row, across = tl.load(downs + number), tl.load(acrosses + number)
    found = read_block(
        x, row, across, rows, columns, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP, HEIGHT, WIDTH
    )
    tl.store(values + number.to(tl.int64) * (HEIGHT * WIDTH) + within(HEIGHT, WIDTH), found)
    forget(means, row, across, rows, columns * UNIT, HEIGHT, WIDTH, GROUP)


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


@triton.jit(do_not_specialize=["inner", "groups"])
def fill_kernel(
    means, out, rows, columns, inner, outer_step, inner_step, step, groups,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Every element as the mean of its group."""
    row, column = tl.program_id(0) // groups, tl.program_id(0) % groups
    r, c = row * HEIGHT + tl.arange(0, HEIGHT), column * WIDTH + tl.arange(0, WIDTH)
    inside = fits(r, c, rows, columns, UNIT)
    mean = tl.load(means + (r // GROUP).to(tl.int64)[:, None] * (columns * UNIT) + c[None, :], mask=inside)
    tl.store(out + addresses(r, c, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP), mean, mask=inside)


@triton.jit(do_not_specialize=["rows", "groups"])
def group_kernel(
    dy, sums, rows, outputs, step, groups, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """The sums of groups of rows."""
    row, column = tl.program_id(0) // groups, tl.program_id(0) % groups
    r, c = row * HEIGHT + tl.arange(0, HEIGHT), column * WIDTH + tl.arange(0, WIDTH)
    at = r.to(tl.int64)[:, None] * (step * UNIT) + c[None, :]
    found = tl.load(dy + at, mask=fits(r, c, rows, outputs, UNIT), other=0.0).to(tl.float32)
    total = tl.sum(tl.reshape(found, [HEIGHT // GROUP, GROUP, WIDTH]), 1)
    first = row * (HEIGHT // GROUP) + tl.arange(0, HEIGHT // GROUP)
    place = first.to(tl.int64)[:, None] * (outputs * UNIT) + c[None, :]
    tl.store(sums + place, total, mask=fits(first * GROUP, c, rows, outputs, UNIT))
