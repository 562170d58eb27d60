"""Stores and additions to scattered addresses, from the registers in which the values are.

Triton arranges elements anew for a store to addresses it knows nothing of, by way of shared memory and barriers, which
takes longer than the store itself. Instructions written out are left where they are. Elsewhere (the interpreter, other
GPUs) plain Triton says the same.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


def _compaction(lanes: int, width: int, mark: str) -> tuple[str, str]:
    """The instructions that write a row of elements, those at or above a bound one after another, and their places.

    Operands: two or one registers that nobody reads; the row, packed; its magnitudes; and then, once per element as
    all operands are but used once, the bound, where the first element goes and where its place goes; the places.
    """
    unread, packed = lanes // 4, lanes * width // 32
    values, sizes = unread, unread + packed
    bound, target, marks = sizes + lanes, sizes + 2 * lanes, sizes + 3 * lanes
    places = sizes + 4 * lanes
    step = {"BYTES": 1, "WORDS": 2}.get(mark, 0)
    lines = [
        "{ .reg .pred p; .reg .b64 a, m; .reg .b16 low, high, place;",
        f"mov.b64 a, ${target}; mov.b64 m, ${marks};",
    ]
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
    lines += [f"mov.b32 ${number}, 0;" for number in range(unread)]
    registers = ["=r"] * unread + ["r"] * (packed + 2 * lanes) + ["l"] * (2 * lanes)
    registers += ["r"] * lanes
    return "\n".join([*lines, "}"]), ",".join(registers)


HALF_BITS, HALF_BITS_OPERANDS = map(tl.constexpr, _compaction(8, 16, "BITS"))
HALF_BYTES, HALF_BYTES_OPERANDS = map(tl.constexpr, _compaction(8, 16, "BYTES"))
HALF_WORDS, HALF_WORDS_OPERANDS = map(tl.constexpr, _compaction(8, 16, "WORDS"))
FULL_BITS, FULL_BITS_OPERANDS = map(tl.constexpr, _compaction(4, 32, "BITS"))
FULL_BYTES, FULL_BYTES_OPERANDS = map(tl.constexpr, _compaction(4, 32, "BYTES"))
FULL_WORDS, FULL_WORDS_OPERANDS = map(tl.constexpr, _compaction(4, 32, "WORDS"))


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
    """Stores integers of 8, 16 or 32 bits."""
    SIZE: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth
    if NATIVE and SIZE == 32:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointer.to(tl.int64), value.to(tl.int32), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif NATIVE and SIZE == 16:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; .reg .b16 v; setp.ne.s32 p, $3, 0; cvt.u16.u32 v, $2; "
            "@p st.global.b16 [$1], v; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointer.to(tl.int64), value.to(tl.int32), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif NATIVE:
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b8 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,r,r",
            [pointer.to(tl.int64), value.to(tl.int32), mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def _asm(CODE: tl.constexpr, OPERANDS: tl.constexpr, bits, magnitude, bound, target, marks, place):
    tl.inline_asm_elementwise(
        CODE, OPERANDS, [bits, magnitude, bound, target, marks, place], dtype=tl.int8, is_pure=False, pack=bits.shape[1]
    )


@triton.jit
def compact(values_ptr, marks_ptr, slot, bits, magnitude, bound, place, KIND: tl.constexpr):
    """Writes the elements of each row whose magnitude is not below the bound, from the row's slot on, and their places.

    For native code only. `marks_ptr` is not read for BITS, which lie elsewhere.
    """
    target = (values_ptr + slot)[:, None].to(tl.int64) + tl.zeros_like(magnitude).to(tl.int64)
    marks = (marks_ptr + slot)[:, None].to(tl.int64) + tl.zeros_like(magnitude).to(tl.int64)
    bounds = bound + tl.zeros_like(magnitude)
    if bits.dtype == tl.int16:
        if KIND == "BITS":
            _asm(HALF_BITS, HALF_BITS_OPERANDS, bits, magnitude, bounds, target, marks, place)
        elif KIND == "BYTES":
            _asm(HALF_BYTES, HALF_BYTES_OPERANDS, bits, magnitude, bounds, target, marks, place)
        else:
            _asm(HALF_WORDS, HALF_WORDS_OPERANDS, bits, magnitude, bounds, target, marks, place)
    else:
        if KIND == "BITS":
            _asm(FULL_BITS, FULL_BITS_OPERANDS, bits, magnitude, bounds, target, marks, place)
        elif KIND == "BYTES":
            _asm(FULL_BYTES, FULL_BYTES_OPERANDS, bits, magnitude, bounds, target, marks, place)
        else:
            _asm(FULL_WORDS, FULL_WORDS_OPERANDS, bits, magnitude, bounds, target, marks, place)
