"""Rows of 8 elements, one to a thread: which of them are marked, and what is done with these alone.

All elements are looked at, those of 16 bits two at a time: a subtraction leaves a bit for each. Then every thread walks
through its own marks, and reads these elements again from the cache that is nearest. A warp takes as many steps as its
fullest row has marks: 2.9 where a tenth of all are marked at random, while looking at each would take 8.

What a step does to memory is written as instructions: Triton arranges elements anew for a store to addresses it knows
nothing of, by way of shared memory and barriers, which takes longer than the store itself. Elsewhere (the interpreter,
other GPUs) plain Triton says the same.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, assignment"

from __future__ import annotations

import triton
import triton.language as tl

ROW = tl.constexpr(8)
LANES = tl.constexpr(32)
"""Of a warp."""
DEPTH = tl.constexpr(4)
"""Rows that a thread holds at once: their marks fill a word."""


@triton.jit
def act(ASM: tl.constexpr, OPERANDS: tl.constexpr, arguments):
    """What these instructions do, for each element; the first operand is an int32 that they return."""
    return tl.inline_asm_elementwise(ASM, OPERANDS, arguments, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def magnitude_of(bits):
    """Of floats, by their bits, in int32; it orders as the magnitudes do."""
    return bits.to(tl.int32) & (0x7FFF if bits.dtype == tl.int16 else 0x7FFFFFFF)


@triton.jit
def rows_of_warps(ROWS: tl.constexpr):
    """The first of DEPTH rows of each thread, LANES apart, so that the rows of a warp follow each other."""
    number = tl.arange(0, ROWS)
    return (number // LANES) * (DEPTH * LANES) + number % LANES


@triton.jit
def _four_words(words_ptr):
    cell = tl.arange(0, 4)[None, :]
    even, odd = tl.split(tl.reshape(tl.load(words_ptr[:, None] + cell), [words_ptr.shape[0], 2, 2]))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def load_rows(rows_ptr):
    """The words of each row, of which these are the first elements: 4 or 8."""
    words_ptr = rows_ptr.to(tl.pointer_type(tl.int32))
    a, b, c, d = _four_words(words_ptr)
    if rows_ptr.dtype.element_ty == tl.int16:
        rows = a, b, c, d
    else:
        e, f, g, h = _four_words(words_ptr + 4)
        rows = a, b, c, d, e, f, g, h
    return rows


# With its highest bit set, a magnitude stays above that bit when a bound (which is at most the bit) is subtracted, or
# falls below. So two are compared in a word, and no borrow reaches the other.


@triton.jit
def _less(word, bound, HALF: tl.constexpr):
    """Two magnitudes, or one, less a bound that is there as often; the highest bits say whether they reach it."""
    return (word.to(tl.uint32, bitcast=True) | (0x80008000 if HALF else 0x80000000)) - bound


@triton.jit
def _as_often(bound, HALF: tl.constexpr):
    return ((bound | (bound << 16)) if HALF else bound).to(tl.uint32, bitcast=True)


@triton.jit
def _shifted_in(mask, left, HALF: tl.constexpr):
    """The mask, with the highest bits as its lowest. Bits 15 and 31 are brought to 30 and 31 by a multiplication."""
    return ((mask << 2) | (((left & 0x80008000) * 0x8001) >> 30)) if HALF else ((mask << 1) | (left >> 31))


@triton.jit
def reaching(rows, bound, HALF: tl.constexpr):
    """A bit for each element, that of the first lowest: whether its magnitude is `bound` at least."""
    WORDS: tl.constexpr = 4 if HALF else 8
    bound = _as_often(bound, HALF)
    mask = tl.zeros([rows[0].shape[0]], tl.uint32)
    for number in tl.static_range(WORDS - 1, -1, -1):
        mask = _shifted_in(mask, _less(rows[number], bound, HALF), HALF)
    return mask.to(tl.int32, bitcast=True)


@triton.jit
def negative_in(rows, HALF: tl.constexpr):
    """A bit for each element: its sign."""
    WORDS: tl.constexpr = 4 if HALF else 8
    mask = tl.zeros([rows[0].shape[0]], tl.uint32)
    for number in tl.static_range(WORDS - 1, -1, -1):
        mask = _shifted_in(mask, rows[number].to(tl.uint32, bitcast=True), HALF)
    return mask.to(tl.int32, bitcast=True)


@triton.jit
def magnitude_in(rows, LANE: tl.constexpr, HALF: tl.constexpr):
    """Of one element of each row, by its bits."""
    return ((rows[LANE // 2] >> (LANE % 2 * 16)) & 0x7FFF) if HALF else (rows[LANE] & 0x7FFFFFFF)


@triton.jit
def between(rows, first, end, HALF: tl.constexpr):
    """A bit for each element, that of the first lowest: whether its magnitude is `first` at least and below `end`; and
    how many reach `end`, where those in the upper halves of words count 2**16: so up to 16383 rows may be added up.
    """
    WORDS: tl.constexpr = 4 if HALF else 8
    first, end = _as_often(first, HALF), _as_often(end, HALF)
    mask = tl.zeros([rows[0].shape[0]], tl.uint32)
    beyond = tl.zeros([rows[0].shape[0]], tl.uint32)
    for number in tl.static_range(WORDS - 1, -1, -1):
        inside, over = _less(rows[number], first, HALF), _less(rows[number], end, HALF)
        mask = _shifted_in(mask, inside ^ (inside & over), HALF)  # and not; Triton 3.7 interprets no ~ of uint32
        beyond += ((over >> 15) & 0x00010001) if HALF else (over >> 31)
    return mask.to(tl.int32, bitcast=True), beyond.to(tl.int32, bitcast=True)


@triton.jit
def marks_in(masks):
    """How many bits are set in each byte, in the same byte: of up to four rows at once."""
    pairs = masks - ((masks >> 1) & 0x55555555)
    fours = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    return (fours + (fours >> 4)) & 0x0F0F0F0F


# --- walking through the marks, natively ------------------------------------------------------------------------------


def _walk(*steps: str, unbranched: int) -> str:
    """Instructions that do `steps` for each mark: `e` is the number of the element in its row, {n} how many marks came
    before. Operands: a result that nobody reads, the address of the row, its marks, and what the steps need.

    So many of the first steps are taken by warps without asking whether any thread has marks left; most do.
    """
    lines = ["{ .reg .pred p; .reg .b64 a; .reg .b32 left, e, one, v<8>; .reg .b16 h<8>; brev.b32 left, $2;"]
    for number in range(ROW.value):
        lines.append("setp.ne.u32 p, left, 0;")
        if number >= unbranched:
            lines.append("@!p bra DONE;")
        only = "@p" if number < unbranched else ""
        lines += [
            "bfind.shiftamt.u32 e, left; shr.u32 one, 0x80000000, e; xor.b32 left, left, one;",
            *(step.format(n=number, n2=2 * number, n4=4 * number, only=only) for step in steps),
        ]
    return "\n".join([*lines, "DONE: mov.b32 $0, 0; }"])


LOAD_HALF = "mad.wide.u32 a, e, 2, $1; {only} ld.global.u16 h{n}, [a];"
LOAD_FULL = "mad.wide.u32 a, e, 4, $1; {only} ld.global.u32 v{n}, [a];"
STORE_HALF = LOAD_HALF + "{only} st.global.b16 [$3+{n2}], h{n};"
STORE_FULL = LOAD_FULL + "{only} st.global.b32 [$3+{n4}], v{n};"
STORE_BYTE = "add.u32 one, $5, e; {only} st.global.b8 [$4+{n}], one;"
STORE_WORD = "add.u32 one, $5, e; cvt.u16.u32 h{n}, one; {only} st.global.b16 [$4+{n2}], h{n};"
MAGNITUDE_HALF = "cvt.u32.u16 v{n}, h{n}; and.b32 v{n}, v{n}, 0x7fff;"
MAGNITUDE_FULL = "and.b32 v{n}, v{n}, 0x7fffffff;"
COUNT = (
    "sub.u32 v{n}, v{n}, $4; shr.u32 v{n}, v{n}, $5; mad.lo.u32 v{n}, v{n}, 4, $3; {only} red.shared.add.u32 [v{n}], 1;"
)


def _stores(*steps: str) -> tl.constexpr:
    return tl.constexpr(_walk(*steps, unbranched=2))


HALF_BITS, HALF_BYTES, HALF_WORDS = (
    _stores(STORE_HALF),
    _stores(STORE_HALF, STORE_BYTE),
    _stores(STORE_HALF, STORE_WORD),
)
FULL_BITS, FULL_BYTES, FULL_WORDS = (
    _stores(STORE_FULL),
    _stores(STORE_FULL, STORE_BYTE),
    _stores(STORE_FULL, STORE_WORD),
)
HALF_COUNT = tl.constexpr(_walk(LOAD_HALF, MAGNITUDE_HALF, COUNT, unbranched=0))
FULL_COUNT = tl.constexpr(_walk(LOAD_FULL, MAGNITUDE_FULL, COUNT, unbranched=0))


@triton.jit
def count_marked(rows_ptr, masks, bins, first, shift, NATIVE: tl.constexpr):
    """Adds one to the bin (an int32) of each marked element: (magnitude - first) >> shift.

    `bins` is where the first bin is: natively an address in shared memory for each thread, otherwise a pointer.
    """
    HALF: tl.constexpr = rows_ptr.dtype.element_ty == tl.int16
    if NATIVE:
        none = tl.zeros_like(masks)
        arguments = rows_ptr.to(tl.int64), masks, bins, none + first, none + shift
        act(HALF_COUNT if HALF else FULL_COUNT, "=r,l,r,r,r,r", arguments)
    else:
        for lane in tl.static_range(ROW):
            is_marked = ((masks >> lane) & 1) != 0
            offset = magnitude_of(tl.load(rows_ptr + lane, mask=is_marked, other=0)) - first
            tl.atomic_add(bins + (offset >> shift), 1, mask=is_marked, sem="relaxed")


# Bins in shared memory: additions to bins in global memory wait for each other. For 4 % of 64 Mi elements that took 6
# of 62 us in 16 bits, and 15 of 99 us in float32.


SHARED_512, SHARED_2048 = (
    tl.constexpr(f"{{ .shared .align 16 .b32 bins[{number}]; mov.u32 $0, bins; }}") for number in (512, 2048)
)


@triton.jit
def shared_bins(ROWS: tl.constexpr, BINS: tl.constexpr):
    """The address of bins that are all zero, for each thread, of which there must be as many as rows."""
    tl.static_assert(BINS == 512 or BINS == 2048)
    thread = tl.arange(0, ROWS)
    bins = act(SHARED_512 if BINS == 512 else SHARED_2048, "=r,r", (thread,))
    for number in tl.static_range(BINS // ROWS):
        act("st.shared.u32 [$1], 0; mov.u32 $0, 0;", "=r,r", (bins + (thread + number * ROWS) * 4,))
    return bins


@triton.jit
def add_shared_bins(bins, sums_ptr, BINS: tl.constexpr):
    """Adds the bins to as many sums of this program alone."""
    ROWS: tl.constexpr = bins.shape[0]
    for number in tl.static_range(BINS // ROWS):
        cell = tl.arange(0, ROWS) + number * ROWS
        counted = act("ld.shared.u32 $0, [$1];", "=r,r", (bins + cell * 4,))
        tl.store(sums_ptr + cell, tl.load(sums_ptr + cell, volatile=True) + counted)


@triton.jit
def store_marked(rows_ptr, masks, slot, place, values_ptr, marks_ptr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Writes the marked elements of each row one after another, from the row's slot on, and their places, where `place`
    is that of the row's first element. `marks_ptr` is not used for BITS, which lie elsewhere.
    """
    HALF: tl.constexpr = rows_ptr.dtype.element_ty == tl.int16
    if NATIVE:
        half: tl.constexpr = HALF_BITS if KIND == "BITS" else HALF_BYTES if KIND == "BYTES" else HALF_WORDS
        full: tl.constexpr = FULL_BITS if KIND == "BITS" else FULL_BYTES if KIND == "BYTES" else FULL_WORDS
        source, target, mark = rows_ptr.to(tl.int64), (values_ptr + slot).to(tl.int64), (marks_ptr + slot).to(tl.int64)
        act(half if HALF else full, "=r,l,r,l,l,r", (source, masks, target, mark, place))
    else:
        for lane in tl.static_range(ROW):
            is_marked = ((masks >> lane) & 1) != 0
            tl.store(values_ptr + slot, tl.load(rows_ptr + lane, mask=is_marked, other=0), mask=is_marked)
            if KIND != "BITS":
                tl.store(marks_ptr + slot, (place + lane).to(marks_ptr.dtype.element_ty), mask=is_marked)
            slot += is_marked.to(tl.int32)
