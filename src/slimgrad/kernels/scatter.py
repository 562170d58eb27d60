"""Putting elements back where they were, by way of a tile in shared memory.

Elements that are scattered over zeros in global memory are written twice, the second time two or four bytes at a time:
64 Mi bf16 took 65 us. In shared memory that costs nothing to speak of, and what leaves it is written once, 16 bytes to
a thread. Triton has no name for such memory, so these are instructions.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels import picks
from slimgrad.kernels.rows import act
from slimgrad.kernels.signs import signed_words

TILE = tl.constexpr(picks.TILE)
AT_ONCE = 4
"""Elements that a thread has on their way at once: a block of 256 has 26 of its 64 when a tenth are picked."""
VECTOR = tl.constexpr(16)
"""Bytes."""


def _tile(width: int) -> tl.constexpr:
    return tl.constexpr(f"{{ .shared .align 16 .b8 tile[{picks.TILE * width}]; mov.u32 $0, tile; }}")


def _spread(width: int, mark: int, step: int) -> tl.constexpr:
    """Instructions that write elements of so many bytes into the tile. Operands: a result that nobody reads, where the
    first element is, where its place (of `mark` bytes) is, how many are left, and where place 0 is in the tile. The
    next element of a thread is `step` further on.
    """
    several = range(AT_ONCE)
    lines = [f"{{ .reg .pred p<{AT_ONCE}>; .reg .b64 a, m; .reg .b32 left, place<{AT_ONCE}>;"]
    lines += [
        f".reg .b{8 * width} v<{AT_ONCE}>; mov.b64 a, $1; mov.b64 m, $2; mov.b32 left, $3;",
        'AGAIN: .pragma "nounroll";',
    ]
    for number in several:
        lines += [
            f"setp.gt.s32 p{number}, left, {number * step};",
            f"@p{number} ld.global.b{8 * width} v{number}, [a+{number * step * width}];",
            f"@p{number} ld.global.u{8 * mark} place{number}, [m+{number * step * mark}];",
        ]
    for number in several:
        lines += [
            f"mad.lo.u32 place{number}, place{number}, {width}, $4;",
            f"@p{number} st.shared.b{8 * width} [place{number}], v{number};",
        ]
    lines += [
        f"sub.s32 left, left, {AT_ONCE * step}; setp.gt.s32 p0, left, 0;",
        f"add.s64 a, a, {AT_ONCE * step * width}; add.s64 m, m, {AT_ONCE * step * mark}; @p0 bra AGAIN;",
        "mov.b32 $0, 0; }",
    ]
    return tl.constexpr("\n".join(lines))


THREADS = tl.constexpr(256)
BLOCKS = picks.TILE // picks.Kind.BYTES.block
HALF_TILE, FULL_TILE = _tile(2), _tile(4)
HALF_BYTES, FULL_BYTES = _spread(2, 1, THREADS.value // BLOCKS), _spread(4, 1, THREADS.value // BLOCKS)
HALF_WORDS, FULL_WORDS = _spread(2, 2, THREADS.value), _spread(4, 2, THREADS.value)
CLEAR = tl.constexpr("{ .reg .b32 z; mov.b32 z, 0; st.shared.v4.b32 [$1], {z, z, z, z}; mov.b32 $0, 0; }")
FILL = tl.constexpr("st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;")
COPY = tl.constexpr(
    "{ .reg .b32 a, b, c, d; ld.shared.v4.b32 {a, b, c, d}, [$1]; st.global.v4.b32 [$2], {a, b, c, d}; mov.b32 $0, 0; }"
)


@triton.jit
def put_tile(
    values_ptr, marks_ptr, first_ptr, signs_ptr, out_ptr, tile_number, n,
    KIND: tl.constexpr, BLOCK: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """Zeros, or what the signs say, and over them the values of the blocks that begin at `first_ptr`: a whole tile.
    Needs all THREADS.
    """
    WIDTH: tl.constexpr = 2 if out_ptr.dtype.element_ty == tl.int16 else 4
    EACH: tl.constexpr = THREADS * BLOCK // TILE  # threads of a block
    thread = tl.arange(0, THREADS)
    block = thread // EACH
    slot = tl.load(first_ptr + block) + thread % EACH
    end = tl.load(first_ptr + block + 1)
    tile = act(HALF_TILE if WIDTH == 2 else FULL_TILE, "=r,r", (thread,))
    for number in tl.static_range(TILE * WIDTH // (THREADS * VECTOR)):
        vector = number * THREADS + thread
        mine = tile + vector * VECTOR
        if SIGNED:
            a, b, c, d = signed_words(signs_ptr, tile_number, n, vector, WIDTH)
            act(FILL, "=r,r,r,r,r,r", (mine, a, b, c, d))
        else:
            act(CLEAR, "=r,r", (mine,))
    tl.debug_barrier()
    half: tl.constexpr = HALF_BYTES if KIND == "BYTES" else HALF_WORDS
    full: tl.constexpr = FULL_BYTES if KIND == "BYTES" else FULL_WORDS
    from_values, from_marks = (values_ptr + slot).to(tl.int64), (marks_ptr + slot).to(tl.int64)
    arguments = from_values, from_marks, end - slot, tile + block * (BLOCK * WIDTH)
    act(half if WIDTH == 2 else full, "=r,l,l,r,r", arguments)
    tl.debug_barrier()
    for number in tl.static_range(TILE * WIDTH // (THREADS * VECTOR)):
        place = (number * THREADS + thread) * VECTOR
        act(COPY, "=r,r,l", (tile + place, out_ptr.to(tl.int64) + place))
