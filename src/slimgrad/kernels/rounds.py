"""How the warps of a Triton program read and write tiles of elements and of codes; see NOTE [Tiles of codes], codes.py.

A program has a tile for each of its warps: four rounds of [threads, lanes] elements, or of [threads, lanes / 2] words
of two elements. Rounds are tensors of their own: of one tensor [rounds, threads, lanes], some versions of Triton spread
the rounds over threads, and sums over lanes then cross them.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels.tiles import LANES, ROUNDS, TILE


@triton.jit
def is_whole(n, THREADS: tl.constexpr):
    """Whether all elements of the program's tiles exist. Those programs ask for no element whether it does: the asking
    took a third of their instructions.
    """
    return (tl.program_id(0) + 1).to(tl.int64) * (THREADS * ROUNDS * LANES) <= n


@triton.jit
def _rows(round: tl.constexpr, THREADS: tl.constexpr):
    """Which rows of eight elements the threads have in a round, [threads, 1]."""
    thread = tl.arange(0, THREADS)[:, None]
    tile = tl.program_id(0).to(tl.int64) * (THREADS // 32) + thread // 32
    return tile * (TILE // LANES) + round * 32 + thread % 32


@triton.jit
def _cells(round: tl.constexpr, THREADS: tl.constexpr):
    """Where in memory the elements of a round lie."""
    return _rows(round, THREADS) * LANES + tl.arange(0, LANES)[None, :]


@triton.jit
def _words(round: tl.constexpr, THREADS: tl.constexpr):
    """The same of their words."""
    return _rows(round, THREADS) * (LANES // 2) + tl.arange(0, LANES // 2)[None, :]


@triton.jit
def _load_cells(ptr, round: tl.constexpr, n, THREADS: tl.constexpr, WHOLE: tl.constexpr, PAIRS: tl.constexpr):
    if WHOLE and PAIRS:
        x = tl.load(ptr.to(tl.pointer_type(tl.uint32)) + _words(round, THREADS))
    elif WHOLE:
        x = tl.load(ptr + _cells(round, THREADS))
    else:
        cell = _cells(round, THREADS)
        x = tl.load(ptr + cell, mask=cell < n, other=0.0)
    return x


@triton.jit
def load_rounds(ptr, n, THREADS: tl.constexpr, WHOLE: tl.constexpr, PAIRS: tl.constexpr):
    """All four: words of two elements with PAIRS, if all exist; single elements else."""
    return (
        _load_cells(ptr, 0, n, THREADS, WHOLE, PAIRS),
        _load_cells(ptr, 1, n, THREADS, WHOLE, PAIRS),
        _load_cells(ptr, 2, n, THREADS, WHOLE, PAIRS),
        _load_cells(ptr, 3, n, THREADS, WHOLE, PAIRS),
    )


@triton.jit
def store_cells(
    ptr,
    values,
    round: tl.constexpr,
    n,
    THREADS: tl.constexpr,
    WHOLE: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """A round, as it was loaded."""
    if WHOLE and PAIRS:
        tl.store(ptr.to(tl.pointer_type(tl.uint32)) + _words(round, THREADS), values)
    elif WHOLE:
        tl.store(ptr + _cells(round, THREADS), values)
    else:
        cell = _cells(round, THREADS)
        tl.store(ptr + cell, values, mask=cell < n)


@triton.jit
def nibbles():
    """Where in a row's word the codes of its elements begin: those with even numbers first."""
    lane = tl.arange(0, LANES)[None, :]
    return (lane % 2) * 16 + (lane // 2) * 4


@triton.jit
def _word(ptr, number: tl.constexpr, BITS: tl.constexpr, THREADS: tl.constexpr):
    """Where a word of each thread lies, and in which tile."""
    thread = tl.arange(0, THREADS)
    tile = tl.program_id(0) * (THREADS // 32) + thread // 32
    return ptr.to(tl.pointer_type(tl.int32)) + (tile.to(tl.int64) * BITS + number) * 32 + thread % 32, tile


@triton.jit
def _store_word(ptr, word, tiles, number: tl.constexpr, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr):
    place, tile = _word(ptr, number, BITS, THREADS)
    if WHOLE:
        tl.store(place, word)
    else:
        tl.store(place, word, mask=tile < tiles)


@triton.jit
def _load_word(ptr, tiles, number: tl.constexpr, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr):
    place, tile = _word(ptr, number, BITS, THREADS)
    if WHOLE:  # noqa: SIM108
        word = tl.load(place)
    else:
        word = tl.load(place, mask=tile < tiles, other=0)
    return word


@triton.jit
def _store_plane(
    ptr,
    rows,
    tiles,
    SHIFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    THREADS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """WIDTH bits of every code: 4 / WIDTH rows share a word."""
    SHARE: tl.constexpr = 4 // WIDTH
    MASK: tl.constexpr = 0x11111111 * ((1 << WIDTH) - 1) if WIDTH < 4 else -1
    for number in tl.static_range(WIDTH):
        word = (rows[number * SHARE] >> (SHIFT % 4)) & MASK
        for turn in tl.static_range(1, SHARE):
            word |= ((rows[number * SHARE + turn] >> (SHIFT % 4)) & MASK) << (turn * WIDTH)
        _store_word(ptr, word, tiles, SHIFT + number, BITS, THREADS, WHOLE)


@triton.jit
def store_codes(ptr, low, high, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr):
    """The planes of four rows of codes, as PLANES in codes.py lists them."""
    TWO: tl.constexpr = BITS & 2
    if BITS < 4:
        if TWO:
            _store_plane(ptr, low, tiles, 0, 2, BITS, THREADS, WHOLE)
        if BITS & 1:
            _store_plane(ptr, low, tiles, TWO, 1, BITS, THREADS, WHOLE)
    else:
        _store_plane(ptr, low, tiles, 0, 4, BITS, THREADS, WHOLE)
        if BITS == 8:
            _store_plane(ptr, high, tiles, 4, 4, BITS, THREADS, WHOLE)
        if TWO:
            _store_plane(ptr, high, tiles, 4, 2, BITS, THREADS, WHOLE)
        if BITS & 1:
            _store_plane(ptr, high, tiles, 4 + TWO, 1, BITS, THREADS, WHOLE)


@triton.jit
def load_words(ptr, tiles, BITS: tl.constexpr, THREADS: tl.constexpr, WHOLE: tl.constexpr):
    """All words of the codes: as many as bits, and the first one again up to eight."""
    first = _load_word(ptr, tiles, 0, BITS, THREADS, WHOLE)
    return (
        first,
        _load_word(ptr, tiles, 1, BITS, THREADS, WHOLE) if BITS > 1 else first,
        _load_word(ptr, tiles, 2, BITS, THREADS, WHOLE) if BITS > 2 else first,
        _load_word(ptr, tiles, 3, BITS, THREADS, WHOLE) if BITS > 3 else first,
        _load_word(ptr, tiles, 4, BITS, THREADS, WHOLE) if BITS > 4 else first,
        _load_word(ptr, tiles, 5, BITS, THREADS, WHOLE) if BITS > 5 else first,
        _load_word(ptr, tiles, 6, BITS, THREADS, WHOLE) if BITS > 6 else first,
        _load_word(ptr, tiles, 7, BITS, THREADS, WHOLE) if BITS > 7 else first,
    )


@triton.jit
def _row_part(words, round: tl.constexpr, SHIFT: tl.constexpr, WIDTH: tl.constexpr):
    """The bits of one plane, where they belong in the nibbles of a row."""
    SHARE: tl.constexpr = 4 // WIDTH
    MASK: tl.constexpr = 0x11111111 * ((1 << WIDTH) - 1) if WIDTH < 4 else -1
    return ((words[SHIFT + round // SHARE] >> (round % SHARE * WIDTH)) & MASK) << (SHIFT % 4)


@triton.jit
def codes_of(words, round: tl.constexpr, BITS: tl.constexpr):
    """The code of each element of a round, [threads, lanes]."""
    if BITS == 3:
        row = _row_part(words, round, 0, 2) | _row_part(words, round, 2, 1)
    elif BITS < 4:
        row = _row_part(words, round, 0, BITS)
    else:
        row = _row_part(words, round, 0, 4)
    code = (row[:, None] >> nibbles()) & 15
    if BITS > 4:
        if BITS == 8:
            row = _row_part(words, round, 4, 4)
        elif BITS == 7:
            row = _row_part(words, round, 4, 2) | _row_part(words, round, 6, 1)
        else:
            row = _row_part(words, round, 4, BITS - 4)
        code |= ((row[:, None] >> nibbles()) & 15) << 4
    return code
