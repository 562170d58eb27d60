"""Which elements are the largest: the magnitude from which on they are picked, in Triton.

NOTE [How the threshold is found]
Magnitudes are compared as integers (picks.py). A sample of 2048 elements, one at random of each 2048th part, says in
which window the k-th largest lies: 6 standard deviations of its rank to both sides, so that it is missed once in 10**9
times, and then only nearly right. At keep 0.1, 8 % of all elements lie in the window. (With a sample of 8192 it would
be 4 %, which saves less than it costs: 13 us instead of 6, because one multiprocessor looks at the sample.)

A round counts how many lie above the window and how many in each of 510 equal parts of it (2046 for float32); the next
round does so for the part that holds the k-th largest, until parts have a width of one: one round and rarely two for
16-bit floats, two and rarely more for float32. A round that has nothing left to do ends at once.

Each program counts in a row of its own, for one span of consecutive elements. The last program to end looks at all
rows: it narrows the window, and adds up where in the output each span begins. So the last pass can write values and
places of all spans in parallel: 2 or 3 reads in all, no temporaries but the rows (a sixteenth of the tensor at most),
nothing asked of the device.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels import picks
from slimgrad.kernels.rows import ROW, add_shared_bins, between, count_marked, load_rows, magnitude_of, shared_bins

TILE = tl.constexpr(picks.TILE)
SAMPLE = tl.constexpr(2048)
COPIES = tl.constexpr(8)
"""Of the sums over all rows, because programs that end together would wait for each other's additions."""
STATE = tl.constexpr(8)
"""Integers that say how far it is: the first magnitude of the window, its span (last minus first), the shift that makes
bins of it, how many elements are wanted of it; and then for each round how many programs have ended it."""

# Loops are written with `while`: the interpreter cannot count up to a number that a kernel computed.


@triton.jit
def _shift_for(span, MOST: tl.constexpr):
    """The least shift by which the span falls into so many bins."""
    shift = span * 0
    while (span >> shift) >= MOST:
        shift += 1
    return shift


@triton.jit(do_not_specialize=["n", "k", "upper", "lower"])
def window_kernel(
    x_ptr,
    work_ptr,
    n,
    k,
    upper,
    lower,
    MOST: tl.constexpr,
    ROUNDS: tl.constexpr,
    BINS: tl.constexpr,
    ALL: tl.constexpr,
):
    """The first window; and clears what the rounds add to."""
    part = tl.arange(0, SAMPLE)
    if ALL:
        magnitude = tl.where(part < n, magnitude_of(tl.load(x_ptr + part, mask=part < n, other=0)), -1)
    else:
        begin = (part.to(tl.int64) * n) // SAMPLE
        size = ((part + 1).to(tl.int64) * n) // SAMPLE - begin
        noise = part.to(tl.uint32) * 0x9E3779B1
        noise = (noise ^ (noise >> 15)) * 0x846CA68B
        noise = noise ^ (noise >> 16)
        magnitude = magnitude_of(tl.load(x_ptr + begin + ((noise.to(tl.int64) * size) >> 32)))
    WIDTH: tl.constexpr = 15 if x_ptr.dtype.element_ty == tl.int16 else 31
    COARSE: tl.constexpr = 0 if WIDTH == 15 else 10  # bits of the ends that do not matter: bins are as wide
    last = tl.zeros([], tl.int32)
    first = tl.zeros([], tl.int32)
    for step in tl.static_range(WIDTH - COARSE):
        high = last | (1 << (WIDTH - 1 - step))
        low = first | (1 << (WIDTH - 1 - step))
        # the sample has 2**11 elements, so both counts fit into one sum
        both = tl.sum(tl.where(magnitude >= high, 1, 0) + tl.where(magnitude >= low, 0x10000, 0), 0)
        last = tl.where((both & 0xFFFF) >= upper, high, last)
        first = tl.where((both >> 16) >= lower, low, first)
    last |= (1 << COARSE) - 1
    _store_state(work_ptr, first, last - first, _shift_for(last - first, BINS - 2), k)
    for number in tl.static_range(ROUNDS):
        tl.store(work_ptr + 4 + number, 0)
        cell = tl.arange(0, COPIES * BINS)
        sums_ptr = work_ptr + STATE + 2 * MOST + number * COPIES * BINS
        tl.store(sums_ptr + cell, tl.zeros([COPIES * BINS], tl.int32))


@triton.jit
def _store_state(work_ptr, first, span, shift, wanted):
    tl.store(work_ptr, first)
    tl.store(work_ptr + 1, span)
    tl.store(work_ptr + 2, shift)
    tl.store(work_ptr + 3, wanted)


@triton.jit
def _narrow(work_ptr, sums_ptr, table_ptr, programs, MOST: tl.constexpr, BINS: tl.constexpr, FIRST: tl.constexpr,
            WIDTH: tl.constexpr):  # fmt: skip
    """The last program of a round narrows the window to the bin in which the threshold is, and adds up for each program
    how many elements above the threshold, and in this bin, lie before its span.

    In the first round the lowest bin is for what lies below the window, and the highest for what lies above.
    """
    first, span = tl.load(work_ptr), tl.load(work_ptr + 1)
    shift, wanted = tl.load(work_ptr + 2), tl.load(work_ptr + 3)
    number = tl.arange(0, BINS)
    copy = tl.arange(0, COPIES)
    counted = tl.sum(tl.load(sums_ptr + copy[:, None] * BINS + number[None, :], volatile=True), 0)
    reached = tl.cumsum(counted, 0, reverse=True) >= wanted
    found = tl.max(tl.where(reached, number, 0), 0)
    above = tl.sum(tl.where(number > found, counted, 0), 0)
    begin = first + ((found - 1 if FIRST else found) << shift)
    end = tl.minimum(begin + (1 << shift) - 1, first + span)
    if FIRST:
        most: tl.constexpr = (1 << WIDTH) - 1
        begin = tl.where(found == 0, 0, tl.where(found == BINS - 1, first + span + 1, begin))
        end = tl.where(found == 0, first - 1, tl.where(found == BINS - 1, most, end))
    _store_state(work_ptr, begin, end - begin, _shift_for(end - begin, BINS), wanted - above)

    program = tl.arange(0, MOST)
    at_ptr = table_ptr + program * BINS + found
    reach = tl.load(at_ptr, mask=program < programs, other=0, volatile=True)
    rest = tl.where(found < BINS - 1, programs, 0)  # nothing lies beyond the last bin
    beyond = tl.load(at_ptr + 1, mask=program < rest, other=0, volatile=True)
    above_ptr = work_ptr + STATE + program
    before = tl.cumsum(beyond, 0) - beyond
    if not FIRST:
        before += tl.load(above_ptr)
    tl.store(above_ptr, before)
    tl.store(above_ptr + MOST, tl.cumsum(reach - beyond, 0))


@triton.jit
def _count_some(bits, exists, bins_ptr, first, span, shift):
    """Counts what lies in the window, and adds up what lies above it."""
    offset = magnitude_of(bits) - first
    inside = (offset >= 0) & (offset <= span) & exists
    tl.atomic_add(bins_ptr + (offset >> shift), 1, mask=inside, sem="relaxed")
    return tl.sum(((offset > span) & exists).to(tl.int32), 0)


@triton.jit
def _count_rows(rows, rows_ptr, bins, first, span, shift, NATIVE: tl.constexpr):
    """The same of rows that are whole; how many lie above in each, as `between` counts them."""
    inside, above = between(rows, first, first + span + 1, rows_ptr.dtype.element_ty == tl.int16)
    count_marked(rows_ptr, inside, bins, first, shift, NATIVE)
    return above


@triton.jit(do_not_specialize=["n", "each", "programs"])
def round_kernel(
    x_ptr,
    work_ptr,
    n,
    each,
    programs,
    MOST: tl.constexpr,
    ROUNDS: tl.constexpr,
    BINS: tl.constexpr,
    ROUND: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    first, span, shift = tl.load(work_ptr), tl.load(work_ptr + 1), tl.load(work_ptr + 2)
    if (ROUND == 0) | (span > 0):
        program = tl.program_id(0)
        sums_ptr = work_ptr + STATE + 2 * MOST + ROUND * COPIES * BINS
        table_ptr = work_ptr + STATE + 2 * MOST + ROUNDS * COPIES * BINS
        own_ptr = table_ptr + program * BINS
        number = tl.arange(0, BINS)
        tl.store(own_ptr + number, tl.zeros([BINS], tl.int32))
        LOWEST: tl.constexpr = 1 if ROUND == 0 else 0
        bins_ptr = own_ptr + LOWEST
        bins = shared_bins(ROWS, BINS) + 4 * LOWEST if NATIVE and ALIGNED else bins_ptr
        tl.debug_barrier()
        begin = program.to(tl.int64) * each * TILE
        size = tl.minimum(n - begin, each * TILE).to(tl.int32)
        x_ptr += begin
        SIZE: tl.constexpr = ROWS * ROW
        PAIR: tl.constexpr = 2 * SIZE
        at = size * 0
        above = tl.zeros([ROWS], tl.int32)
        if ALIGNED:
            whole = size // PAIR * PAIR
            if whole > 0:
                row_ptr = x_ptr + tl.arange(0, ROWS) * ROW
                ahead, after = load_rows(row_ptr), load_rows(row_ptr + SIZE)
                while at < whole:
                    rows, more = ahead, after
                    here_ptr = row_ptr + at
                    at += PAIR
                    next_ptr = row_ptr + tl.multiple_of(tl.minimum(at, whole - PAIR), PAIR)
                    ahead, after = load_rows(next_ptr), load_rows(next_ptr + SIZE)
                    above += _count_rows(rows, here_ptr, bins, first, span, shift, NATIVE)
                    above += _count_rows(more, here_ptr + SIZE, bins, first, span, shift, NATIVE)
        rest = size * 0
        cell = tl.arange(0, SIZE)
        while at < size:
            exists = at + cell < size
            bits = tl.load(x_ptr + at + cell, mask=exists, other=0)
            rest += _count_some(bits, exists, bins_ptr, first, span, shift)
            at += SIZE
        tl.debug_barrier()
        if NATIVE and ALIGNED:
            add_shared_bins(bins - 4 * LOWEST, own_ptr, BINS)
            tl.debug_barrier()
        counted = tl.load(own_ptr + number, volatile=True)
        if ROUND == 0:
            counted += tl.where(number == BINS - 1, tl.sum((above & 0xFFFF) + (above >> 16), 0) + rest, 0)
        tl.debug_barrier()
        tl.store(own_ptr + number, tl.cumsum(counted, 0, reverse=True))
        copy_ptr = sums_ptr + (program % COPIES) * BINS
        tl.atomic_add(copy_ptr + number, counted, mask=counted != 0, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(work_ptr + 4 + ROUND, 1, sem="acq_rel") == programs - 1:
            WIDTH: tl.constexpr = 15 if x_ptr.dtype.element_ty == tl.int16 else 31
            _narrow(work_ptr, sums_ptr, table_ptr, programs, MOST, BINS, ROUND == 0, WIDTH)
