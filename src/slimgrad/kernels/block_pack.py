"""Triton kernels that find the strongest blocks of a matrix, gather them and put them back. See blocks.py.

NOTE [Selection without a kernel of its own]
The norms of one column of blocks are a few hundred numbers: every program that gathers blocks of that column finds the
threshold by itself, instead of waiting for a launch that finds it for all.

NOTE [Steps in units]
Triton reads several elements at once only where it knows that addresses are multiples of so many, which it takes from
numbers divisible by 16. Steps of 196 elements are not; so steps other than 1 come divided by the largest power of two
that divides them all, UNIT, and are multiplied by that constant again.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels import blocks
from slimgrad.kernels.tiles import hashed

ONE_CHANCE = tl.constexpr(blocks.ONE)
CERTAIN = tl.constexpr(blocks.CERTAIN)
LEAST_REST = tl.constexpr(blocks.LEAST_REST)
INF = tl.constexpr(float("inf"))
UNROLL = tl.constexpr(8)
"""Rows that are read before one is waited for."""
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
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BESIDE: tl.constexpr, SQUARES: tl.constexpr, SAMPLE: tl.constexpr,
):  # fmt: skip
    """The norms of BESIDE blocks that lie side by side.

    The last rows come first: they were written last, and lie in the cache if any do.
    """
    row, group = down - 1 - tl.program_id(0) // groups, tl.program_id(0) % groups
    r = row * HEIGHT + tl.arange(0, HEIGHT // SAMPLE) * SAMPLE
    c = group * (BESIDE * WIDTH) + tl.arange(0, BESIDE * WIDTH)
    at = addresses(r, c, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP)
    found = tl.load(x + at, mask=fits(r, c, rows, columns, UNIT), other=0.0).to(tl.float32)
    found = found * found if SQUARES else tl.abs(found)
    if BESIDE == 1:  # each thread adds up all it has before it asks others
        total = tl.sum(tl.sum(tl.reshape(found, [HEIGHT // SAMPLE * WIDTH // 8, 8]), 1), 0)
        tl.store(norms + group * down + row, total)
    else:
        store_norms(norms, tl.sum(found, 0), row, group, down, columns * UNIT, WIDTH, BESIDE)


@triton.jit(do_not_specialize=[*COUNTS, "groups"])
def means_kernel(
    x, norms, means, rows, columns, inner, outer_step, inner_step, step, down, groups,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BESIDE: tl.constexpr, SQUARES: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The means of the groups of rows of BESIDE blocks, and the norms of what they do not tell.

    Row by row of all groups at once, and twice: the second time from the cache. No thread waits for another.
    """
    row, group = down - 1 - tl.program_id(0) // groups, tl.program_id(0) % groups
    first = row * HEIGHT + tl.arange(0, HEIGHT // GROUP) * GROUP
    c = group * (BESIDE * WIDTH) + tl.arange(0, BESIDE * WIDTH)
    total = tl.zeros([HEIGHT // GROUP, BESIDE * WIDTH], tl.float32)
    for number in tl.range(0, GROUP, loop_unroll_factor=UNROLL):
        at = addresses(first + number, c, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP)
        total += tl.load(x + at, mask=fits(first + number, c, rows, columns, UNIT), other=0.0).to(tl.float32)
    count = tl.minimum(tl.maximum(rows - first, 1), GROUP).to(tl.float32)
    mean = tl.div_rn(total, tl.broadcast_to(count[:, None], [HEIGHT // GROUP, BESIDE * WIDTH]))
    place = (first // GROUP).to(tl.int64)[:, None] * (columns * UNIT) + c[None, :]
    tl.store(means + place, mean, mask=fits(first, c, rows, columns, UNIT))
    total = tl.zeros([HEIGHT // GROUP, BESIDE * WIDTH], tl.float32)
    for number in tl.range(0, GROUP, loop_unroll_factor=UNROLL):
        at = addresses(first + number, c, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP)
        inside = fits(first + number, c, rows, columns, UNIT)
        off = tl.where(inside, tl.load(x + at, mask=inside, other=0.0).to(tl.float32) - mean, 0.0)
        total += off * off if SQUARES else tl.abs(off)
    store_norms(norms, tl.sum(total, 0), row, group, down, columns * UNIT, WIDTH, BESIDE)


@triton.jit
def store_norms(norms, sums, row, group, down, columns, WIDTH: tl.constexpr, BESIDE: tl.constexpr):
    """Of BESIDE blocks, from the sums of their columns."""
    across = group * BESIDE + tl.arange(0, BESIDE)
    total = tl.sum(tl.reshape(sums, [BESIDE, WIDTH]), 1)
    tl.store(norms + across * down + row, total, mask=across * WIDTH < columns)


@triton.jit
def threshold(keys, inside, kept, down):
    """The key that `kept` keys reach; if none does for equal ones, the largest that more reach.

    Between the least and the largest key, by halves. Keys are distinct as a rule, so that a few hundred of them are cut
    at the right place after some ten steps of the 31 that would find the key itself.
    """
    low, high = tl.min(tl.where(inside, keys, 0x7FFFFFFF), 0), tl.max(keys, 0)
    reached = down
    while (low < high) & (reached != kept):
        middle = high - (high - low) // 2
        count = tl.sum((keys >= middle).to(tl.int32), 0)
        enough = count >= kept
        reached = tl.where(enough, count, reached)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def selected(norms, at, kept, down):
    """Which blocks of a column are kept, and in what place each lies among them."""
    inside = at < down
    bits = tl.load(norms + at, mask=inside, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    keys = tl.where(inside, bits, -1)
    least = threshold(keys, inside, kept, down)
    above, equal = keys > least, keys == least
    until = tl.cumsum(above.to(tl.int32) + (equal.to(tl.int32) << 16), 0)  # both counts: neither reaches 2^15
    spare = kept - tl.sum(above.to(tl.int32), 0)
    equals = until >> 16
    return above | (equal & (equals <= spare)), (until & 0xFFFF) + tl.minimum(equals, spare) - 1


@triton.jit
def ratio_of(open, certain, kept):
    """Of a chance and a norm, where so many are certain."""
    rest = tl.maximum(tl.sum(tl.maximum(open, 0.0), 0), LEAST_REST)
    return tl.div_rn(tl.maximum(kept - certain, 0).to(tl.float32), rest)


@triton.jit
def chances(norms, inside, kept):
    """Of ONE: NOTE [Blocks that are right on average] in blocks.py."""
    open = tl.where(norms < INF, norms, CERTAIN)
    certain = tl.sum((open < 0).to(tl.int32), 0)
    ratio = ratio_of(open, certain, kept)
    more = 1
    while more > 0:
        sure = open * ratio >= 1.0
        more = tl.sum(sure.to(tl.int32), 0)
        open = tl.where(sure, CERTAIN, open)
        certain += more
        ratio = ratio_of(open, certain, kept)
    rest = tl.sum(tl.maximum(open, 0.0), 0)
    open = tl.where(inside & (open >= 0), tl.where(rest < LEAST_REST, 1.0, open), open)
    ratio = ratio_of(open, certain, kept)
    chance = tl.minimum(tl.maximum(tl.ceil(open * ratio * ONE_CHANCE), 1.0), ONE_CHANCE).to(tl.int32)
    return tl.where(inside, tl.where(open < 0, ONE_CHANCE, chance), 0)


@triton.jit
def first_point(norms, at, down, total):
    """Where the first point lies, times `kept`: the same for all columns, as far as their chances are."""
    bits = tl.load(norms + at, mask=at < down, other=0.0).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    number = hashed(tl.sum((bits ^ (bits >> 16)) & 0xFFFF, 0).to(tl.uint32))
    return (number.to(tl.int64) * total) >> 32


@triton.jit
def scaled(
    found, scale, means, row, across, rows, columns, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr
):
    """What means do not tell of a block, times its scale."""
    wide = found.to(tl.float32)
    if GROUP > 0:
        r, c = row * HEIGHT + tl.arange(0, HEIGHT), across * WIDTH + tl.arange(0, WIDTH)
        place = (r // GROUP).to(tl.int64)[:, None] * columns + c[None, :]
        wide -= tl.load(means + place, mask=(r < rows)[:, None] & (c < columns)[None, :], other=0.0).to(tl.float32)
    return (wide * scale).to(found.dtype)


@triton.jit(do_not_specialize=[*COUNTS, "kept", "each", "parts"])
def keep_kernel(
    x, values, norms, index, means, rows, columns, inner, outer_step, inner_step, step, down, kept, each, parts,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, ROOM: tl.constexpr, DRAWN: tl.constexpr,
    ROOT: tl.constexpr,
):  # fmt: skip
    """Select or draw in one column of blocks, and gather `each` of those that are kept."""
    across, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    at = tl.arange(0, ROOM)
    if DRAWN:
        norm = tl.load(norms + across * down + at, mask=at < down, other=0.0)
        chance = chances(tl.sqrt(norm) if ROOT else norm, at < down, kept)
        until, total = tl.cumsum(chance, 0), tl.sum(chance, 0)
        point = first_point(norms, at, down, total)
    else:
        chosen, place = selected(norms + across * down, at, kept, down)
    number = part * each
    end = tl.minimum(kept, number + each)
    while number < end:
        if DRAWN:
            row = tl.sum((until <= ((number.to(tl.int64) * total + point) // kept)).to(tl.int32) * (at < down), 0)
            own = tl.sum(tl.where(at == row, chance, 0), 0).to(tl.float32)
            scale = tl.div_rn(total.to(tl.float32), own * kept.to(tl.float32))
        else:
            row = tl.sum(tl.where(chosen & (place == number), at, 0), 0)
        tl.store(index + across * kept + number, row)
        found = read_block(
            x, row, across, rows, columns, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP, HEIGHT, WIDTH
        )
        if DRAWN:
            found = scaled(found, scale, means, row, across, rows, columns * UNIT, HEIGHT, WIDTH, GROUP)
        else:
            forget(means, row, across, rows, columns * UNIT, HEIGHT, WIDTH, GROUP)
        block = values + (across * kept + number).to(tl.int64) * (HEIGHT * WIDTH)
        tl.store(block + within(HEIGHT, WIDTH), found)
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
    x, values, acrosses, downs, means, scales, rows, columns, inner, outer_step, inner_step, step,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, GROUP: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """One block each, of those that are named."""
    number = tl.program_id(0)
    row, across = tl.load(downs + number), tl.load(acrosses + number)
    found = read_block(
        x, row, across, rows, columns, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP, HEIGHT, WIDTH
    )
    if DRAWN:
        scale = tl.load(scales + number)
        found = scaled(found, scale, means, row, across, rows, columns * UNIT, HEIGHT, WIDTH, GROUP)
    else:
        forget(means, row, across, rows, columns * UNIT, HEIGHT, WIDTH, GROUP)
    tl.store(values + number.to(tl.int64) * (HEIGHT * WIDTH) + within(HEIGHT, WIDTH), found)


@triton.jit(do_not_specialize=["inner", "kept"])
def put_kernel(
    values, out, acrosses, downs, rows, columns, inner, outer_step, inner_step, step, kept,
    ONE: tl.constexpr, UNIT: tl.constexpr, INNER: tl.constexpr, STEP: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BALANCED: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """One block each back to where it was. ADDED: to the means that are there."""
    number = tl.program_id(0)
    row = tl.load(downs + number)
    across = number // kept if BALANCED else tl.load(acrosses + number)
    found = tl.load(values + number.to(tl.int64) * (HEIGHT * WIDTH) + within(HEIGHT, WIDTH))
    r, c = row * HEIGHT + tl.arange(0, HEIGHT), across * WIDTH + tl.arange(0, WIDTH)
    at = addresses(r, c, inner, outer_step, inner_step, step, ONE, UNIT, INNER, STEP)
    inside = fits(r, c, rows, columns, UNIT)
    if ADDED:
        found += tl.load(out + at, mask=inside)
    tl.store(out + at, found, mask=inside)


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
    first = row * HEIGHT + tl.arange(0, HEIGHT // GROUP) * GROUP
    c = column * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros([HEIGHT // GROUP, WIDTH], tl.float32)
    for number in tl.range(0, GROUP, loop_unroll_factor=UNROLL):
        at = (first + number).to(tl.int64)[:, None] * (step * UNIT) + c[None, :]
        total += tl.load(dy + at, mask=fits(first + number, c, rows, outputs, UNIT), other=0.0).to(tl.float32)
    place = (first // GROUP).to(tl.int64)[:, None] * (outputs * UNIT) + c[None, :]
    tl.store(sums + place, total, mask=fits(first, c, rows, outputs, UNIT))
