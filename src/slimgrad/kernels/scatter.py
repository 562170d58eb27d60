"""Stores to scattered addresses, from the registers in which the values are.

Triton arranges elements anew for a store to addresses it knows nothing of, by way of shared memory and barriers, which
takes longer than the store itself. Instructions written out are left where they are. Elsewhere (the interpreter, other
GPUs) plain Triton says the same.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

STORE_16 = tl.constexpr(
    "{ .reg .pred p; .reg .b16 v; setp.ne.s32 p, $3, 0; cvt.u16.u32 v, $2; @p st.global.b16 [$1], v; mov.b32 $0, 0; }"
)
STORE_32 = tl.constexpr("{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b32 [$1], $2; mov.b32 $0, 0; }")


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
