"""dW = dY^T X by the blocks of X that are kept, on tensor cores: a Triton kernel that skips all others.

NOTE [What the product waits for]
With a tenth of the blocks the product is bound by the memory on its way from L2, not by arithmetic: dY is read once for
each column of blocks that keeps a row. So tiles are as wide as blocks are (128 columns read half as much of dY as 64
do), both operands come by the tensor memory accelerator several blocks ahead, and the row of the next block is asked
for one iteration early: Triton's pipeline would give stages to that load. It matters where few fit: with blocks of
128x128, 27.8 instead of 35.5 us for 8192x1024x4096 on an H200; with 64x128, 0 to 10 %.

Where the tiles of dW are fewer than multiprocessors, the blocks of a column are split among several programs. Their
sums are written one beside the other and added in their order by a second kernel: the same bits every time.
"""
# mypy: disable-error-code="no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

from slimgrad.kernels.block_pack import within


@triton.jit
def share(bounds, kept, column, split, splits, BALANCED: tl.constexpr):
    """Of the blocks of a column: the first that a program treats, the one behind its last, and the last of all."""
    if BALANCED:
        first = column * kept
        count = kept
    else:
        first = tl.load(bounds + column)
        count = tl.load(bounds + column + 1) - first
    each = (count + splits - 1) // splits
    low = first + tl.minimum(split * each, count)
    high = first + tl.minimum((split + 1) * each, count)
    return low, high, tl.maximum(first + count - 1, 0)


@triton.jit(do_not_specialize=["kept", "rows", "tiles", "across", "splits", "split_step"])
def product_kernel(
    values, dy, out, downs, order, bounds, kept, rows, outputs, columns, dy_step, tiles, across, splits, split_step,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OUT: tl.constexpr, UNIT: tl.constexpr, BALANCED: tl.constexpr,
    TURNED: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of dW, [OUT, WIDTH], or a part of its sum. TURNED: the tile of its transpose."""
    pid = tl.program_id(0)
    o, column, split = pid % tiles, (pid // tiles) % across, pid // (tiles * across)
    low, high, last = share(bounds, kept, column, split, splits, BALANCED)
    out_c = o * OUT + tl.arange(0, OUT)
    total = tl.zeros([WIDTH, OUT], tl.float32)
    row = tl.load(downs + tl.minimum(low, last))
    place = low if BALANCED else tl.load(order + tl.minimum(low, last))
    for number in tl.range(low, high, num_stages=STAGES):
        if TMA:
            x = values.load([place * HEIGHT, 0])
            g = dy.load([row * HEIGHT, o * OUT])
        else:
            x = tl.load(values + place.to(tl.int64) * (HEIGHT * WIDTH) + within(HEIGHT, WIDTH))
            r = row * HEIGHT + tl.arange(0, HEIGHT)
            inside = (r < rows)[:, None] & (out_c < outputs * UNIT)[None, :]
            g = tl.load(dy + r.to(tl.int64)[:, None] * (dy_step * UNIT) + out_c[None, :], mask=inside, other=0.0)
        following = tl.minimum(number + 1, last)
        row = tl.load(downs + following)
        place = following if BALANCED else tl.load(order + following)
        total = tl.dot(tl.trans(x), g, total, input_precision=PRECISION)
    c = column * WIDTH + tl.arange(0, WIDTH)
    target = out + split.to(tl.int64) * split_step
    if TURNED:
        at = c[:, None] * (outputs * UNIT) + out_c[None, :]
        tl.store(target + at, total, mask=(c < columns)[:, None] & (out_c < outputs * UNIT)[None, :])
    else:
        at = out_c[:, None] * columns + c[None, :]
        tl.store(target + at, tl.trans(total), mask=(out_c < outputs * UNIT)[:, None] & (c < columns)[None, :])


@triton.jit(do_not_specialize=["splits"])
def sum_kernel(parts, out, n, splits, SIZE: tl.constexpr):
    """The sum of `splits` rows of n, in their order."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    total = tl.load(parts + at, mask=inside)
    for number in range(1, splits):
        total += tl.load(parts + number * n + at, mask=inside)
    tl.store(out + at, total, mask=inside)
