"""Stores and additions to scattered addresses, from the registers in which the values are.

Triton arranges elements anew for a store to addresses it knows nothing of, by way of shared memory and barriers, which
takes longer than the store itself. Instructions written out are left where they are. Elsewhere (the interpreter, other
GPUs) plain Triton says the same.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


def _compaction(lanes: int, width: int, step: int) -> str:
    """The instructions that write a row of elements, those at or above a bound one after another, and their places.

    Operands, each once per element of the row as inline code has them: registers that nobody reads, four elements each;
    the row, packed; its magnitudes; the bound, where the first element goes and where its place goes, of which the
    first are used; the places, of `step` bytes each.
    """
    values = lanes // 4
    sizes = values + lanes * width // 32
    bound, target, marks, places = (sizes + number * lanes for number in (1, 2, 3, 4))
    lines = [f"mov.b64 a, ${target}; mov.b64 m, ${marks};"]
    for lane in range(lanes):
        value = f"${values + lane}"
        if width == 16:
            value = ("low", "high")[lane % 2]
            if lane % 2 == 0:
                lines.append(f"mov.b32 {{low, high}}, ${values + lane // 2};")
        lines += [
            f"setp.ge.s32 p, ${sizes + lane}, ${bound};",
            f"@p st.global.b{width} [a], {value};",
            f"@p add.s64 a, a, {width // 8};",
        ]
        if step == 1:
            lines.append(f"@p st.global.b8 [m], ${places + lane};")
        elif step == 2:
            lines.append(f"cvt.u16.u32 place, ${places + lane}; @p st.global.b16 [m], place;")
        if step:
            lines.append(f"@p add.s64 m, m, {step};")
    lines += [f"mov.b32 ${number}, 0;" for number in range(values)]
    return "\n".join(["{ .reg .pred p; .reg .b64 a, m; .reg .b16 low, high, place;", *lines, "}"])


def _operands(lanes: int, width: int) -> str:
    packed = lanes * width // 32
    return ",".join(["=r"] * (lanes // 4) + ["r"] * (packed + 2 * lanes) + ["l"] * (2 * lanes) + ["r"] * lanes)


HALF_BITS, HALF_BYTES, HALF_WORDS = (tl.constexpr(_compaction(8, 16, step)) for step in (0, 1, 2))
FULL_BITS, FULL_BYTES, FULL_WORDS = (tl.constexpr(_compaction(4, 32, step)) for step in (0, 1, 2))
HALF_OPERANDS, FULL_OPERANDS = tl.constexpr(_operands(8, 16)), tl.constexpr(_operands(4, 32))

STORE_16 = tl.constexpr(
    "{ .reg .pred p; .reg .b16 v; setp.ne.s32 p, $3, 0; cvt.u16.u32 v, $2; @p st.global.b16 [$1], v; mov.b32 $0, 0; }"
)
STORE_32 = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }")


@triton.jit
def add_one(counter_ptr, mask, NATIVE: tl.constexpr):
    """Adds one to each of these int32 counters."""
    if NATIVE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p red.relaxed.gpu.global.add.u32 [$1], 1; mov.b32 $0, 0; }",
            "=r,l,r",
            [counter_ptr.to(tl.int64), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_add(counter_ptr, 1, mask=mask, sem="relaxed")


@triton.jit
def scatter(pointer, value, mask, NATIVE: tl.constexpr):
    """Stores integers of 16 or 32 bits."""
    if NATIVE:
        tl.inline_asm_elementwise(
            STORE_16 if pointer.dtype.element_ty == tl.int16 else STORE_32,
            "=r,l,r,r",
            [pointer.to(tl.int64), value.to(tl.int32), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def compact(values_ptr, marks_ptr, slot, bits, magnitude, bound, place, KIND: tl.constexpr):
    """Writes the elements of each row whose magnitude is not below the bound, from the row's slot on, and their places.

    For native code only. `marks_ptr` is not read for BITS, which lie elsewhere.
    """
    IS_HALF: tl.constexpr = bits.dtype == tl.int16
    HALF: tl.constexpr = HALF_BITS if KIND == "BITS" else HALF_BYTES if KIND == "BYTES" else HALF_WORDS
    FULL: tl.constexpr = FULL_BITS if KIND == "BITS" else FULL_BYTES if KIND == "BYTES" else FULL_WORDS
    target = (values_ptr + slot)[:, None].to(tl.int64) + tl.zeros_like(magnitude).to(tl.int64)
    marks = (marks_ptr + slot)[:, None].to(tl.int64) + tl.zeros_like(magnitude).to(tl.int64)
    bounds = bound + tl.zeros_like(magnitude)
    tl.inline_asm_elementwise(
        HALF if IS_HALF else FULL,
        HALF_OPERANDS if IS_HALF else FULL_OPERANDS,
        [bits, magnitude, bounds, target, marks, place],
        dtype=tl.int8,
        is_pure=False,
        pack=bits.shape[1],
    )
