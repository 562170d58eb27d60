"""Picking the largest elements in Triton: the twin of reference_picks.

NOTE [How the threshold is found]
Magnitudes are compared as integers (picks.py). A sample of 8192 elements, one at random of each 8192nd part, says in
which window the k-th largest lies: 6 standard deviations of its rank to both sides, so that it is missed once in 10**9
times, and then only nearly right. A round counts how many lie above the window and how many in each of 510 equal parts
of it (2046 for float32); the next round does so for the part that holds the k-th largest, until parts have a width of
one: one round and rarely two for 16-bit floats, two and rarely more for float32. A round that has nothing left to do
ends at once.

Each program counts in a row of its own, for one span of consecutive elements. The last program to end looks at all
rows: it narrows the window, and adds up where in the output each span begins. So the last pass can write values and
places of all spans in parallel: 2 or 3 reads in all, no temporaries but the rows (a sixteenth of the tensor at most),
nothing asked of the device.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slimgrad.kernels import picks as formats
from slimgrad.kernels import reference_picks
from slimgrad.kernels.geometry import Layout, check_dense
from slimgrad.kernels.halves import is_native
from slimgrad.kernels.launch import Launch
from slimgrad.kernels.picks import Kind, Picks, check_picks
from slimgrad.kernels.scatter import add_one, compact, scatter

TILE = tl.constexpr(formats.TILE)
PART = tl.constexpr(2048)
"""Elements that are counted or written at once: 8 for each thread, whose registers suffice for many programs then."""
SAMPLE = tl.constexpr(8192)
COPIES = tl.constexpr(8)
"""Of the sums over all rows, because programs that end together would wait for each other's additions."""
STATE = tl.constexpr(8)
"""Integers that say how far it is: the first magnitude of the window, its span (last minus first), the shift that makes
bins of it, how many elements are wanted of it; and then for each round how many programs have ended it."""
SIGMAS = 6.0

BINS = {2: 512, 4: 2048}
LEAST_SPAN = {2: 16384, 4: 32768}
"""By the bytes of an element: bins of a row, and the elements that a program has at least, lest all rows together take
more than a sixteenth of the tensor."""
PROGRAMS = 8
"""Per multiprocessor: twice as many as find room there at once, so that one ends while others are under way."""
ROUNDS = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 3}
INTEGERS = {2: torch.int16, 4: torch.int32}
WARPS = 8
WINDOW_WARPS = 16
ROUND_REGISTERS = WRITE_REGISTERS = 64


def pick_largest(x: Tensor, picks: Picks) -> tuple[Tensor, Tensor]:
    check_dense("pick_largest", x)
    made = packer(Layout(x.shape, x.stride(), x.dtype, x.device), picks)
    return reference_picks.pick_largest(x, picks) if made is None else made.pick(x)


def put_back(values: Tensor, places: Tensor, shape: Sequence[int], stride: Sequence[int], picks: Picks) -> Tensor:
    check_picks(values, places, picks)
    layout = Layout(torch.Size(shape), tuple(stride), values.dtype, values.device)
    made = packer(layout, picks)
    if made is None:
        return reference_picks.put_back(values, places, shape, stride, picks)
    return made.put_back(values, places)


@lru_cache(maxsize=4096)
def packer(layout: Layout, picks: Picks) -> Picker | None:
    return Picker(layout, picks) if layout.dtype in ROUNDS and picks.k and picks.n < 2**31 else None


class Picker:
    """All launches for one layout."""

    __slots__ = ("layout", "picks", "putting", "rounds", "window", "work", "writing")

    def __init__(self, layout: Layout, picks: Picks) -> None:
        n, k = picks.n, picks.k
        self.layout = layout
        self.picks = picks
        tiles = max(1, math.ceil(n / formats.TILE))
        bins, least = BINS[layout.dtype.itemsize], LEAST_SPAN[layout.dtype.itemsize]
        each = math.ceil(tiles / min(PROGRAMS * multiprocessors(layout.device), math.ceil(n / least) or 1))
        programs = math.ceil(tiles / each)
        count = ROUNDS[layout.dtype]
        reads = INTEGERS[layout.dtype.itemsize]
        most = triton.next_power_of_2(programs)
        self.work = STATE.value + 2 * most + (count * COPIES.value + programs) * bins
        shared = (n, each, programs, most)
        ranks = _ranks(n, k)
        self.window = Launch(
            _window_kernel, 1, n, k, *ranks, most, count, bins, n <= SAMPLE.value, reads=reads, num_warps=WINDOW_WARPS
        )
        native = is_native(layout.device)
        self.rounds = [
            Launch(
                _round_kernel,
                programs,
                *shared,
                count,
                bins,
                number,
                native,
                reads=reads,
                num_warps=WARPS,
                maxnreg=ROUND_REGISTERS,
            )
            for number in range(count)
        ]
        kind, block = picks.kind.name, picks.kind.block
        written = (*shared, kind, block, 32 * WARPS, native)
        how: dict[str, Any] = {"reads": reads, "writes": reads, "num_warps": WARPS}
        self.writing = Launch(_write_kernel, programs, *written, **how, maxnreg=WRITE_REGISTERS)
        if picks.kind is Kind.BITS:
            self.putting = Launch(_put_bits_kernel, tiles, n, **how)
        else:
            self.putting = Launch(_put_kernel, tiles, n, kind, block, native, **how)

    def pick(self, x: Tensor) -> tuple[Tensor, Tensor]:
        picks, device = self.picks, self.layout.device
        places = torch.empty(picks.nbytes, dtype=torch.uint8, device=device)
        values = torch.empty(picks.k, dtype=self.layout.dtype, device=device)
        work = torch.empty(self.work, dtype=torch.int32, device=device)
        self.window(x, work)
        for count in self.rounds:
            count(x, work)
        self.writing(x, values, work, places)
        return values, places

    def put_back(self, values: Tensor, places: Tensor) -> Tensor:
        out = self.layout.empty()
        self.putting(values, out, places)
        return out


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """How many there are; for the interpreter, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _ranks(n: int, k: int) -> tuple[int, int]:
    """Which of the sampled elements, from the largest, bound the window in which the k-th largest of all must lie."""
    taken = min(n, SAMPLE.value)
    expected, part = (taken * k / n, k / n) if n else (0.0, 0.0)
    off = SIGMAS * math.sqrt(taken * part * (1 - part)) + 2 if n > taken else 0
    return math.floor(expected - off), math.ceil(expected + off)


# Loops are written with `while`: the interpreter cannot count up to a number that a kernel computed.


# --- finding the threshold ------------------------------------------------------------------------------------------


@triton.jit
def _magnitude(bits):
    """Of floats, by their bits, in int32; it orders as the magnitudes do."""
    return bits.to(tl.int32) & (0x7FFF if bits.dtype == tl.int16 else 0x7FFFFFFF)


@triton.jit
def _shift_for(span, MOST: tl.constexpr):
    """The least shift by which the span falls into so many bins."""
    shift = span * 0
    while (span >> shift) >= MOST:
        shift += 1
    return shift


@triton.jit(do_not_specialize=["n", "k", "upper", "lower"])
def _window_kernel(
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
        magnitude = tl.where(part < n, _magnitude(tl.load(x_ptr + part, mask=part < n, other=0)), -1)
    else:
        begin = (part.to(tl.int64) * n) // SAMPLE
        size = ((part + 1).to(tl.int64) * n) // SAMPLE - begin
        noise = part.to(tl.uint32) * 0x9E3779B1
        noise = (noise ^ (noise >> 15)) * 0x846CA68B
        noise = noise ^ (noise >> 16)
        magnitude = _magnitude(tl.load(x_ptr + begin + ((noise.to(tl.int64) * size) >> 32)))
    WIDTH: tl.constexpr = 15 if x_ptr.dtype.element_ty == tl.int16 else 31
    last = tl.zeros([], tl.int32)
    first = tl.zeros([], tl.int32)
    for step in tl.static_range(WIDTH):
        high = last | (1 << (WIDTH - 1 - step))
        low = first | (1 << (WIDTH - 1 - step))
        # the sample has 2**13 elements, so both counts fit into one sum
        both = tl.sum(tl.where(magnitude >= high, 1, 0) + tl.where(magnitude >= low, 0x10000, 0), 0)
        last = tl.where((both & 0xFFFF) >= upper, high, last)
        first = tl.where((both >> 16) >= lower, low, first)
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
def _narrow(work_ptr, sums_ptr, rows_ptr, programs, MOST: tl.constexpr, BINS: tl.constexpr, FIRST: tl.constexpr,
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
    at_ptr = rows_ptr + program * BINS + found
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
def _count_part(bits, bins_ptr, first, span, shift, above, exists, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    """Counts what lies in the window, and adds up what lies above it."""
    offset = _magnitude(bits) - first
    inside = offset.to(tl.uint32, bitcast=True) <= span.to(tl.uint32)
    beyond = (span - offset).to(tl.uint32, bitcast=True) >> 31  # the sign bit: one instruction with the addition
    if MASKED:
        inside = inside & exists
        beyond = tl.where(exists, beyond, 0)
    add_one(bins_ptr + (offset >> shift), inside, NATIVE)
    return above + beyond


@triton.jit
def _load_part(x_ptr, at):
    """All of it exists."""
    return tl.load(x_ptr + tl.multiple_of(at, PART) + tl.arange(0, PART))


@triton.jit(do_not_specialize=["n", "each", "programs"])
def _round_kernel(
    x_ptr,
    work_ptr,
    n,
    each,
    programs,
    MOST: tl.constexpr,
    ROUNDS: tl.constexpr,
    BINS: tl.constexpr,
    ROUND: tl.constexpr,
    NATIVE: tl.constexpr,
):
    first, span, shift = tl.load(work_ptr), tl.load(work_ptr + 1), tl.load(work_ptr + 2)
    if (ROUND == 0) | (span > 0):
        program = tl.program_id(0)
        sums_ptr = work_ptr + STATE + 2 * MOST + ROUND * COPIES * BINS
        rows_ptr = work_ptr + STATE + 2 * MOST + ROUNDS * COPIES * BINS
        row_ptr = rows_ptr + program * BINS
        number = tl.arange(0, BINS)
        tl.store(row_ptr + number, tl.zeros([BINS], tl.int32))
        tl.debug_barrier()
        begin = program.to(tl.int64) * each * TILE
        size = tl.minimum(n - begin, each * TILE).to(tl.int32)
        whole = size // PART * PART
        x_ptr += begin
        bins_ptr = row_ptr + 1 if ROUND == 0 else row_ptr
        above = tl.zeros([PART], tl.uint32)
        exists = tl.arange(0, PART) < size - whole
        if whole > 0:
            at = whole * 0
            ahead = _load_part(x_ptr, at)
            while at < whole:
                bits = ahead
                at += PART
                ahead = _load_part(x_ptr, tl.minimum(at, whole - PART))
                above = _count_part(bits, bins_ptr, first, span, shift, above, exists, False, NATIVE)
        if whole < size:
            bits = tl.load(x_ptr + whole + tl.arange(0, PART), mask=exists, other=0)
            above = _count_part(bits, bins_ptr, first, span, shift, above, exists, True, NATIVE)
        tl.debug_barrier()
        counted = tl.load(row_ptr + number, volatile=True)
        if ROUND == 0:
            counted += tl.where(number == BINS - 1, tl.sum(above.to(tl.int32), 0), 0)
        tl.debug_barrier()
        tl.store(row_ptr + number, tl.cumsum(counted, 0, reverse=True))
        copy_ptr = sums_ptr + (program % COPIES) * BINS
        tl.atomic_add(copy_ptr + number, counted, mask=counted != 0, sem="relaxed")
        tl.debug_barrier()
        if tl.atomic_add(work_ptr + 4 + ROUND, 1, sem="acq_rel") == programs - 1:
            WIDTH: tl.constexpr = 15 if x_ptr.dtype.element_ty == tl.int16 else 31
            _narrow(work_ptr, sums_ptr, rows_ptr, programs, MOST, BINS, ROUND == 0, WIDTH)


# --- writing --------------------------------------------------------------------------------------------------------


@triton.jit
def _write_part(
    bits, magnitude, bound, picked, slot, values_ptr, starts_ptr, marks_ptr, at, exists,
    MASKED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Values and places of what is picked of a part, whose rows are what a thread holds.

    `slot` is that of each element; or of each row, which `bound` is enough to write natively.
    """
    LANES: tl.constexpr = bits.shape[1]
    ROWS: tl.constexpr = bits.shape[0]
    cell = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    place = (at + cell) % BLOCK
    if KIND == "WORDS":
        marks_ptr = marks_ptr.to(tl.pointer_type(tl.int16))
    if NATIVE:
        first = slot
        compact(values_ptr, marks_ptr, slot, bits, magnitude, bound, place, KIND)
    else:
        first = tl.min(slot, 1)
        tl.store(values_ptr + slot, bits, mask=picked)
        if KIND != "BITS":
            tl.store(marks_ptr + slot, place.to(marks_ptr.dtype.element_ty), mask=picked)
    row = at + tl.arange(0, ROWS) * LANES
    begins = row % BLOCK == 0
    if MASKED:
        begins = begins & (tl.max(exists.to(tl.int32), 1) != 0)
    tl.store(starts_ptr + row // BLOCK, first, mask=begins)
    if KIND == "BITS":
        bit = picked.to(tl.int32) << (cell % 8)
        byte = tl.sum(tl.reshape(bit, [ROWS * LANES // 8, 8]), 1).to(tl.uint8)
        tl.store(marks_ptr + at // 8 + tl.arange(0, ROWS * LANES // 8), byte)


@triton.jit
def _write_above(
    bits, more, bound, done, values_ptr, starts_ptr, marks_ptr, at, left,
    MASKED: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Picks all from `bound` on, of two parts that follow each other; how many are picked so far."""
    LANES: tl.constexpr = bits.shape[1]
    SIZE: tl.constexpr = bits.shape[0] * LANES
    cell = tl.arange(0, bits.shape[0])[:, None] * LANES + tl.arange(0, LANES)[None, :]
    here, there = cell < left, cell + SIZE < left
    magnitude, size = _magnitude(bits), _magnitude(more)
    if MASKED:
        magnitude = tl.where(here, magnitude, -1)
        size = tl.where(there, size, -1)
    picked, chosen = magnitude >= bound, size >= bound
    counts, others = picked.to(tl.int32), chosen.to(tl.int32)
    rows = tl.sum(counts, 1) + (tl.sum(others, 1) << 16)  # parts have 2**11 elements: one scan for both
    before = tl.cumsum(rows, 0) - rows
    total = tl.sum(rows, 0)
    slot, spot = done + (before & 0xFFFF), done + (total & 0xFFFF) + (before >> 16)
    if not NATIVE:
        slot = slot[:, None] + tl.cumsum(counts, 1) - counts
        spot = spot[:, None] + tl.cumsum(others, 1) - others
    _write_part(
        bits, magnitude, bound, picked, slot, values_ptr, starts_ptr, marks_ptr, at, here, MASKED, KIND, BLOCK, NATIVE
    )
    _write_part(
        more,
        size,
        bound,
        chosen,
        spot,
        values_ptr,
        starts_ptr,
        marks_ptr,
        at + SIZE,
        there,
        MASKED,
        KIND,
        BLOCK,
        NATIVE,
    )
    return done + (total & 0xFFFF) + (total >> 16)


@triton.jit
def _write_both(
    bits, first, span, wanted, above, equal, values_ptr, starts_ptr, marks_ptr, at, exists,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Picks what lies above the threshold, and at it as many as are wanted; how many were met of either."""
    offset = _magnitude(bits) - first
    is_above = (offset > span) & exists
    is_equal = (offset >= 0) & (offset <= span) & exists
    counts = is_above.to(tl.int32) + (is_equal.to(tl.int32) << 16)  # a part has 2**11 elements: one scan for both
    rows = tl.sum(counts, 1)
    before = (tl.cumsum(rows, 0) - rows)[:, None] + tl.cumsum(counts, 1) - counts
    total = tl.sum(rows, 0)
    equals = equal + (before >> 16)
    slot = above + (before & 0xFFFF) + tl.minimum(equals, wanted)
    picked = is_above | (is_equal & (equals < wanted))
    _write_part(
        bits, offset, first, picked, slot, values_ptr, starts_ptr, marks_ptr, at, exists, True, KIND, BLOCK, False
    )
    return above + (total & 0xFFFF), equal + (total >> 16)


@triton.jit(do_not_specialize=["n", "each", "programs"])
def _write_kernel(
    x_ptr,
    values_ptr,
    work_ptr,
    places_ptr,
    n,
    each,
    programs,
    MOST: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Of the elements at the threshold the first ones are picked: all of them in some spans, none in those after, and
    only in one span both.
    """
    program = tl.program_id(0)
    LANES: tl.constexpr = 8 if x_ptr.dtype.element_ty == tl.int16 else 4  # 16 bytes
    SIZE: tl.constexpr = ROWS * LANES
    PAIR: tl.constexpr = 2 * SIZE
    first, span, wanted = tl.load(work_ptr), tl.load(work_ptr + 1), tl.load(work_ptr + 3)
    above_ptr = work_ptr + STATE + program
    above, after_own = tl.load(above_ptr), tl.load(above_ptr + MOST)
    equal = tl.load(above_ptr + MOST - 1, mask=program > 0, other=0)
    blocks = (n + BLOCK - 1) // BLOCK
    begin = program.to(tl.int64) * each * TILE
    size = tl.minimum(n - begin, each * TILE).to(tl.int32)
    x_ptr += begin
    starts_ptr = places_ptr.to(tl.pointer_type(tl.int32)) + begin // BLOCK
    marks_ptr = places_ptr + (blocks.to(tl.int64) + 1) * 4
    if KIND == "BITS":
        marks_ptr += begin // 8
    done = above + tl.minimum(equal, wanted)
    cell = tl.arange(0, ROWS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    at = size * 0
    if (equal < wanted) & (wanted < after_own):
        while at < size:
            exists = at + cell < size
            bits = tl.load(x_ptr + at + cell, mask=exists, other=0)
            above, equal = _write_both(
                bits, first, span, wanted, above, equal, values_ptr, starts_ptr, marks_ptr, at, exists,
                KIND, BLOCK,
            )  # fmt: skip
            at += SIZE
        done = above + wanted
    else:
        bound = tl.where(equal < wanted, first, first + span + 1)
        whole = size // PAIR * PAIR
        if whole > 0:
            ahead, after = tl.load(x_ptr + cell), tl.load(x_ptr + SIZE + cell)
            while at < whole:
                bits, more = ahead, after
                next_ptr = x_ptr + tl.multiple_of(tl.minimum(at + PAIR, whole - PAIR), PAIR)
                ahead, after = tl.load(next_ptr + cell), tl.load(next_ptr + SIZE + cell)
                done = _write_above(
                    bits, more, bound, done, values_ptr, starts_ptr, marks_ptr, at, PAIR, False, KIND, BLOCK, NATIVE
                )
                at += PAIR
        if whole < size:
            left = size - whole
            bits = tl.load(x_ptr + whole + cell, mask=cell < left, other=0)
            more = tl.load(x_ptr + whole + SIZE + cell, mask=cell + SIZE < left, other=0)
            done = _write_above(
                bits, more, bound, done, values_ptr, starts_ptr, marks_ptr, whole, left, True, KIND, BLOCK, NATIVE
            )
            at += PAIR
    if program == programs - 1:
        if KIND == "BITS":  # what is left of the last tile
            rest = at // 8 + tl.arange(0, TILE // 8)
            end = (size + TILE - 1) // TILE * (TILE // 8)
            tl.store(marks_ptr + rest, tl.zeros([TILE // 8], tl.uint8), mask=rest < end)
        tl.store(starts_ptr + blocks - begin // BLOCK, done)


# --- putting back ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n"])
def _put_bits_kernel(values_ptr, out_ptr, places_ptr, n):
    tile = tl.program_id(0)
    starts_ptr = places_ptr.to(tl.pointer_type(tl.int32))
    marks_ptr = places_ptr + ((n + TILE - 1) // TILE + 1).to(tl.int64) * 4 + tile.to(tl.int64) * (TILE // 8)
    byte = tl.load(marks_ptr + tl.arange(0, TILE // 8)).to(tl.int32)
    bit = tl.reshape((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1, [TILE])
    slot = tl.load(starts_ptr + tile) + tl.cumsum(bit, 0) - bit
    value = tl.load(values_ptr + slot, mask=bit != 0, other=0)
    cell = tl.arange(0, TILE)
    first = tile.to(tl.int64) * TILE
    if n - first >= TILE:
        tl.store(out_ptr + first + cell, value)
    else:
        tl.store(out_ptr + first + cell, value, mask=cell < n - first)


@triton.jit(do_not_specialize=["n"])
def _put_kernel(values_ptr, out_ptr, places_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
    """Zeros first; then, when all of these are there, the values over them."""
    tile = tl.program_id(0)
    blocks = (n + BLOCK - 1) // BLOCK
    starts_ptr = places_ptr.to(tl.pointer_type(tl.int32))
    marks_ptr = places_ptr + (blocks.to(tl.int64) + 1) * 4
    EACH: tl.constexpr = TILE // BLOCK
    SLOTS: tl.constexpr = 1024 // EACH
    inner = tl.arange(0, EACH)
    exists = tile * EACH + inner < blocks
    start = tl.load(starts_ptr + tile * EACH + inner, mask=exists, other=0)
    count = tl.load(starts_ptr + tile * EACH + inner + 1, mask=exists, other=0) - start
    cell = tl.arange(0, TILE)
    first = tile.to(tl.int64) * TILE
    out_ptr += first
    zeros = tl.zeros([TILE], out_ptr.dtype.element_ty)
    if n - first >= TILE:
        tl.store(out_ptr + cell, zeros)
    else:
        tl.store(out_ptr + cell, zeros, mask=cell < n - first)
    tl.debug_barrier()
    done = tile * 0
    while done < tl.max(count, 0):
        number = done + tl.arange(0, SLOTS)[None, :]
        there = number < count[:, None]
        slot = start[:, None] + number
        value = tl.load(values_ptr + slot, mask=there, other=0)
        if KIND == "BYTES":
            inside = tl.load(marks_ptr + slot, mask=there, other=0).to(tl.int32)
        else:
            inside = tl.load(marks_ptr.to(tl.pointer_type(tl.int16)) + slot, mask=there, other=0).to(tl.int32)
        scatter(out_ptr + inner[:, None] * BLOCK + inside, value, there, NATIVE)
        done += SLOTS
