"""Writing what is picked, and putting it back, in Triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels.pick_threshold import STATE, TILE, magnitude_of
from slimgrad.kernels.scatter import compact, scatter


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
    magnitude, size = magnitude_of(bits), magnitude_of(more)
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
    offset = magnitude_of(bits) - first
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
def write_kernel(
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
def put_bits_kernel(values_ptr, out_ptr, places_ptr, n):
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
def put_kernel(values_ptr, out_ptr, places_ptr, n, KIND: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr):
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
