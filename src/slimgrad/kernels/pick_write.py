"""Writing what is picked, and putting it back, in Triton."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels.pick_threshold import STATE, TILE
from slimgrad.kernels.rows import (
    DEPTH,
    LANES,
    ROW,
    load_rows,
    magnitude_of,
    marks_in,
    reaching,
    rows_of_warps,
    store_marked,
)
from slimgrad.kernels.scatter import put_tile
from slimgrad.kernels.signs import signed_means


@triton.jit
def _write_some(
    bits, first, span, wanted, above, equal, values_ptr, starts_ptr, marks_ptr, at, exists,
    KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Picks what lies above the threshold, and at it as many as are wanted; how many were met of either."""
    ROWS: tl.constexpr = bits.shape[0]
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
    tl.store(values_ptr + slot, bits, mask=picked)
    cell = tl.arange(0, ROWS)[:, None] * ROW + tl.arange(0, ROW)[None, :]
    if KIND == "BITS":
        byte = tl.sum(picked.to(tl.int32) << tl.arange(0, ROW)[None, :], 1)
        tl.store(marks_ptr + at // ROW + tl.arange(0, ROWS), byte.to(tl.uint8))
    else:
        tl.store(marks_ptr + slot, ((at + cell) % BLOCK).to(marks_ptr.dtype.element_ty), mask=picked)
    row = at + tl.arange(0, ROWS) * ROW
    begins = (row % BLOCK == 0) & (tl.max(exists.to(tl.int32), 1) != 0)
    tl.store(starts_ptr + row // BLOCK, tl.min(slot, 1), mask=begins)
    return above + (total & 0xFFFF), equal + (total >> 16)


@triton.jit
def _write_chunk(
    x_ptr, bound, done, values_ptr, starts_ptr, marks_ptr, at,
    ROWS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Picks all from `bound` on, of DEPTH rows for each thread; how many.

    Each warp has rows that follow each other, so that only how many it picks in all must be known to the others.
    """
    HALF: tl.constexpr = x_ptr.dtype.element_ty == tl.int16
    WARPS: tl.constexpr = ROWS // LANES
    cell = at + rows_of_warps(ROWS) * ROW
    masks = tl.zeros([ROWS], tl.int32)
    for depth in tl.static_range(DEPTH):
        masks |= reaching(load_rows(x_ptr + cell + depth * LANES * ROW), bound, HALF) << (8 * depth)
    counts = tl.reshape(marks_in(masks), [WARPS, LANES])
    # Bytes again: what the lanes before have is 31 * 8 at most. Whole warps have up to 256, so these sums have 16 bits.
    before = tl.reshape(tl.cumsum(counts, 1) - counts, [ROWS])
    even, odd = tl.sum(counts & 0x00FF00FF, 1), tl.sum((counts >> 8) & 0x00FF00FF, 1)
    both = even + odd
    own = (both & 0xFFFF) + (both >> 16)
    slot = done + tl.cumsum(own, 0) - own
    for depth in tl.static_range(DEPTH):
        rows = cell + depth * LANES * ROW
        first = tl.reshape(tl.broadcast_to(slot[:, None], [WARPS, LANES]), [ROWS]) + ((before >> (8 * depth)) & 0xFF)
        mask = (masks >> (8 * depth)) & 0xFF
        store_marked(x_ptr + rows, mask, first, rows % BLOCK, values_ptr, marks_ptr, KIND, NATIVE)
        tl.store(starts_ptr + rows // BLOCK, first, mask=rows % BLOCK == 0)
        if KIND == "BITS":
            tl.store(marks_ptr + rows // ROW, mask.to(tl.uint8))
        slot += ((even if depth % 2 == 0 else odd) >> (8 * (depth // 2 * 2))) & 0xFFFF
    return tl.sum(own, 0)


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
    ALIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Of the elements at the threshold the first ones are picked: all of them in some spans, none in those after, and
    only in one span both.
    """
    program = tl.program_id(0)
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
    if KIND == "WORDS":
        marks_ptr = marks_ptr.to(tl.pointer_type(tl.int16))
    at = size * 0
    if ALIGNED:
        CHUNK: tl.constexpr = DEPTH * ROWS * ROW
        bound = tl.where(equal < wanted, first, first + span + 1)
        whole = tl.where((equal < wanted) & (wanted < after_own), 0, size // CHUNK * CHUNK)
        while at < whole:
            done = above + tl.minimum(equal, wanted)
            above += _write_chunk(
                x_ptr,
                bound,
                done,
                values_ptr,
                starts_ptr,
                marks_ptr,
                tl.multiple_of(at, CHUNK),
                ROWS,
                KIND,
                BLOCK,
                NATIVE,
            )
            at += CHUNK
    cell = tl.arange(0, ROWS)[:, None] * ROW + tl.arange(0, ROW)[None, :]
    while at < size:
        exists = at + cell < size
        bits = tl.load(x_ptr + at + cell, mask=exists, other=0)
        above, equal = _write_some(
            bits, first, span, wanted, above, equal, values_ptr, starts_ptr, marks_ptr, at, exists, KIND, BLOCK
        )
        at += ROWS * ROW
    if program == programs - 1:
        if KIND == "BITS":  # what is left of the last tile
            rest = at // 8 + tl.arange(0, TILE // 8)
            end = (size + TILE - 1) // TILE * (TILE // 8)
            tl.store(marks_ptr + rest, tl.zeros([TILE // 8], tl.uint8), mask=rest < end)
        tl.store(starts_ptr + blocks - begin // BLOCK, above + tl.minimum(equal, wanted))


# --- putting back ---------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["n"])
def put_bits_kernel(values_ptr, out_ptr, places_ptr, signs_ptr, n, SIGNED: tl.constexpr):
    tile = tl.program_id(0)
    starts_ptr = places_ptr.to(tl.pointer_type(tl.int32))
    marks_ptr = places_ptr + ((n + TILE - 1) // TILE + 1).to(tl.int64) * 4 + tile.to(tl.int64) * (TILE // 8)
    byte = tl.load(marks_ptr + tl.arange(0, TILE // 8)).to(tl.int32)
    bit = tl.reshape((byte[:, None] >> tl.arange(0, 8)[None, :]) & 1, [TILE])
    slot = tl.load(starts_ptr + tile) + tl.cumsum(bit, 0) - bit
    value = tl.load(values_ptr + slot, mask=bit != 0, other=0)
    cell = tl.arange(0, TILE)
    if SIGNED:
        value = tl.where(bit != 0, value, signed_means(signs_ptr, tile, n, cell, out_ptr.dtype.element_ty))
    first = tile.to(tl.int64) * TILE
    if n - first >= TILE:
        tl.store(out_ptr + first + cell, value)
    else:
        tl.store(out_ptr + first + cell, value, mask=cell < n - first)


@triton.jit(do_not_specialize=["n"])
def put_kernel(
    values_ptr,
    out_ptr,
    places_ptr,
    signs_ptr,
    n,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    SIGNED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Zeros, or what the signs say, and over them the values. `signs_ptr` is not read if it is not SIGNED."""
    tile = tl.program_id(0)
    blocks = (n + BLOCK - 1) // BLOCK
    EACH: tl.constexpr = TILE // BLOCK
    first_ptr = places_ptr.to(tl.pointer_type(tl.int32)) + tile * EACH
    marks_ptr = places_ptr + (blocks.to(tl.int64) + 1) * 4
    if KIND == "WORDS":
        marks_ptr = marks_ptr.to(tl.pointer_type(tl.int16))
    first = tile.to(tl.int64) * TILE
    out_ptr += first
    if NATIVE:
        if n - first >= TILE:
            put_tile(values_ptr, marks_ptr, first_ptr, signs_ptr, out_ptr, tile, n, KIND, BLOCK, SIGNED)
        else:
            _put_some(values_ptr, marks_ptr, first_ptr, signs_ptr, out_ptr, tile, n, BLOCK, SIGNED)
    else:
        _put_some(values_ptr, marks_ptr, first_ptr, signs_ptr, out_ptr, tile, n, BLOCK, SIGNED)


@triton.jit
def _put_some(values_ptr, marks_ptr, first_ptr, signs_ptr, out_ptr, tile, n, BLOCK: tl.constexpr, SIGNED: tl.constexpr):
    """All of a tile first, of which perhaps not all exists; when that is there, the values."""
    EACH: tl.constexpr = TILE // BLOCK
    blocks = (n + BLOCK - 1) // BLOCK - tile * EACH
    SLOTS: tl.constexpr = 1024 // EACH
    inner = tl.arange(0, EACH)
    start = tl.load(first_ptr + inner, mask=inner < blocks, other=0)
    count = tl.load(first_ptr + inner + 1, mask=inner < blocks, other=0) - start
    cell = tl.arange(0, TILE)
    under = tl.zeros([TILE], out_ptr.dtype.element_ty)
    if SIGNED:
        under = signed_means(signs_ptr, tile, n, cell, out_ptr.dtype.element_ty)
    tl.store(out_ptr + cell, under, mask=cell < n - tile.to(tl.int64) * TILE)
    tl.debug_barrier()
    done = tl.max(count, 0) * 0
    while done < tl.max(count, 0):
        number = done + tl.arange(0, SLOTS)[None, :]
        there = number < count[:, None]
        slot = start[:, None] + number
        place = tl.load(marks_ptr + slot, mask=there, other=0).to(tl.int32)
        tl.store(out_ptr + inner[:, None] * BLOCK + place, tl.load(values_ptr + slot, mask=there, other=0), mask=there)
        done += SLOTS
