"""Pure functions tensor -> tensor, each a plain-torch reference and a Triton twin with the same bits.

CUDA tensors go to Triton where it is installed, all others to the reference. Triton is imported when the first CUDA
tensor arrives, never before. `force="torch"` or `force="triton"` picks a twin by hand, for tests and benchmarks.

A compiler sees each as one op, `torch.ops.slimgrad.<name>` (library.py). Otherwise the twins are called as they are: to
go through torch's dispatcher would double the host time of a launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from slimgrad.kernels import library
from slimgrad.kernels.blocks import Grid
from slimgrad.kernels.bounds import Coding
from slimgrad.kernels.chains import DERIVATIVES, SAME, Chain, Step
from slimgrad.kernels.codes import Buckets, Pointwise
from slimgrad.kernels.geometry import Layout, Windows, is_dense, is_dense_layout
from slimgrad.kernels.groups import Groups
from slimgrad.kernels.packers import (
    Blocker,
    BlockerByFunctions,
    ByFunctions,
    Chainer,
    Fusion,
    FusionByFunctions,
    FusionByGroups,
    Packer,
    Picker,
    PickerByFunctions,
)
from slimgrad.kernels.picks import Kind, Picks
from slimgrad.kernels.predicate import Interval
from slimgrad.kernels.reference import narrow_dtype, narrow_int, widen_int
from slimgrad.kernels.reference_bounds import BoundedParts
from slimgrad.kernels.reference_picks import pick
from slimgrad.kernels.transfer import Parcel, lane_of
from slimgrad.kernels.twins import Backend, backend, twin

__all__ = [
    "Backend",
    "Blocker",
    "BoundedParts",
    "Buckets",
    "Chain",
    "Chainer",
    "Coding",
    "Fusion",
    "FusionByFunctions",
    "FusionByGroups",
    "Grid",
    "Groups",
    "Interval",
    "Kind",
    "Layout",
    "Packer",
    "Parcel",
    "Picker",
    "Picks",
    "Pointwise",
    "Step",
    "Windows",
    "backend",
    "bit_packer",
    "block_product",
    "blocker",
    "chainer",
    "code_packer",
    "fusion",
    "gated_backward",
    "gated_forward",
    "group_packer",
    "grouped_fusion",
    "is_dense",
    "is_dense_layout",
    "keep_blocks",
    "lane_of",
    "narrow_dtype",
    "narrow_int",
    "pack_bits",
    "pack_bounded",
    "pack_codes",
    "pack_groups",
    "pack_window",
    "pick",
    "pick_largest",
    "picker",
    "pointwise_backward",
    "pointwise_forward",
    "put_back",
    "put_blocks_back",
    "unpack_bits",
    "unpack_bounded",
    "unpack_chain",
    "unpack_codes",
    "unpack_groups",
    "unpack_window",
    "widen_int",
]


def pack_bits(x: Tensor, rule: Interval, *, force: Backend | None = None) -> Tensor:
    """One bit per element of a flat contiguous tensor: element 8j+k is bit k of byte j; the last byte's tail is 0."""
    if is_compiling():
        return library.pack_bits(x, *library.flat_interval(rule))  # type: ignore[no-any-return]
    return twin("bits", x.device, force).pack_bits(x, rule)  # type: ignore[no-any-return]


def unpack_bits(
    packed: Tensor, n: int, on: float, off: float, dtype: torch.dtype, *, force: Backend | None = None
) -> Tensor:
    """The n bits of `pack_bits` as values `on` and `off` of `dtype`."""
    if is_compiling():
        return library.unpack_bits(packed, n, on, off, dtype)  # type: ignore[no-any-return]
    return twin("bits", packed.device, force).unpack_bits(packed, n, on, off, dtype)  # type: ignore[no-any-return]


def pack_groups(x: Tensor, how: Groups, *, force: Backend | None = None) -> Tensor:
    """A dense tensor, in memory order, as few-bit codes with an offset and a step per group: see groups.py."""
    if is_compiling():
        return library.pack_groups(x, *how)  # type: ignore[no-any-return]
    return twin("quant", x.device, force).pack_groups(x, how)  # type: ignore[no-any-return]


def unpack_groups(
    packed: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    how: Groups,
    dtype: torch.dtype,
    *,
    force: Backend | None = None,
) -> Tensor:
    """What was packed, as a tensor of that dense layout; each element within half a step, a whole one if stochastic."""
    if is_compiling():
        return library.unpack_groups(packed, shape, stride, *how, dtype)  # type: ignore[no-any-return]
    return twin("quant", packed.device, force).unpack_groups(packed, shape, stride, how, dtype)  # type: ignore[no-any-return]


def unpack_chain(
    packed: Tensor, chain: Chain, operands: Sequence[Tensor], layout: Layout, *, force: Backend | None = None
) -> Tensor:
    """What elementwise steps make of what was packed, as a tensor of that dense layout, in whose memory elements lie in
    the order of the packed one: see chains.py. Eager only.
    """
    return twin("chaining", packed.device, force).unpack_chain(packed, chain, operands, layout)  # type: ignore[no-any-return]


def pack_codes(x: Tensor, buckets: Buckets, *, force: Backend | None = None) -> Tensor:
    """Which interval each element of a dense tensor lies in, in few bits: see codes.py."""
    if is_compiling():
        return library.pack_codes(x, *library.flat_buckets(buckets))  # type: ignore[no-any-return]
    return twin("buckets", x.device, force).pack_codes(x, buckets)  # type: ignore[no-any-return]


def unpack_codes(
    packed: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    buckets: Buckets,
    dtype: torch.dtype,
    *,
    force: Backend | None = None,
) -> Tensor:
    """The value that stands for each code, as a tensor of that dense layout."""
    if is_compiling():
        return library.unpack_codes(packed, shape, stride, *library.flat_buckets(buckets), dtype)  # type: ignore[no-any-return]
    return twin("buckets", packed.device, force).unpack_codes(packed, shape, stride, buckets, dtype)  # type: ignore[no-any-return]


def pointwise_forward(
    x: Tensor, unit: Pointwise, out: Tensor | None = None, *, force: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """f(x) of a dense x, and the codes of f'(x); with `out=x` in the place of x. Eager only."""
    return twin("pointwise", x.device, force).pointwise_forward(x, unit, out)  # type: ignore[no-any-return]


def pointwise_backward(codes: Tensor, dy: Tensor, unit: Pointwise, *, force: Backend | None = None) -> Tensor:
    """level * dY, where dY is dense and lies in memory as x did."""
    return twin("pointwise", dy.device, force).pointwise_backward(codes, dy, unit)  # type: ignore[no-any-return]


def gated_forward(a: Tensor, b: Tensor, function: str, *, force: Backend | None = None) -> Tensor:
    """f(a) * b, as a dense tensor in the layout nearest to that of a; to rounding. Eager only."""
    return twin("gated", a.device, force).gated_forward(a, b, function)  # type: ignore[no-any-return]


def gated_backward(
    a: Tensor, b: Tensor, dy: Tensor, function: str, *, force: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """The gradients of a and b, in the layout of the result; to rounding. Eager only."""
    return twin("gated", a.device, force).gated_backward(a, b, dy, function)  # type: ignore[no-any-return]


def pick_largest(x: Tensor, picks: Picks, *, force: Backend | None = None) -> tuple[Tensor, ...]:
    """The elements of a dense tensor that are largest in magnitude, in memory order, and their places; and the signs of
    the others, if the picks are signed: see picks.py.
    """
    if is_compiling():
        values, places, signs = library.pick_largest(x, picks.k, picks.signed)
        return (values, places, signs) if picks.signed else (values, places)
    return twin("picking", x.device, force).pick_largest(x, picks)  # type: ignore[no-any-return]


def put_back(
    values: Tensor,
    places: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    picks: Picks,
    signs: Tensor | None = None,
    *,
    force: Backend | None = None,
) -> Tensor:
    """A tensor of that dense layout with picked elements where they were; elsewhere zeros, or by the signs."""
    if is_compiling():
        return library.put_back(values, places, shape, stride, signs)  # type: ignore[no-any-return]
    return twin("picking", values.device, force).put_back(values, places, shape, stride, picks, signs)  # type: ignore[no-any-return]


def keep_blocks(x: Tensor, grid: Grid, *, force: Backend | None = None) -> tuple[Tensor, ...]:
    """The strongest blocks of a tensor, taken for a matrix, an index of where they were, and means of the others, if
    the grid has groups: see blocks.py.
    """
    if is_compiling():
        values, index, means = library.keep_blocks(x, *grid)
        return (values, index, means) if grid.group else (values, index)
    return twin("blocking", x.device, force).keep_blocks(x, grid)  # type: ignore[no-any-return]


def put_blocks_back(
    values: Tensor,
    index: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    grid: Grid,
    means: Tensor | None = None,
    *,
    force: Backend | None = None,
) -> Tensor:
    """A tensor of that dense layout with the blocks where they were; elsewhere zeros, or means."""
    if is_compiling():
        return library.put_blocks_back(values, index, means, shape, stride, *grid)  # type: ignore[no-any-return]
    return twin("blocking", values.device, force).put_blocks_back(values, index, shape, stride, grid, means)  # type: ignore[no-any-return]


def block_product(
    values: Tensor,
    index: Tensor,
    dy: Tensor,
    grid: Grid,
    means: Tensor | None = None,
    *,
    turned: bool = False,
    force: Backend | None = None,
) -> Tensor:
    """dY^T X by what is kept of X, for dY of [rows, outputs]; turned, its transpose. Eager only."""
    return twin("blocking", dy.device, force).block_product(values, index, dy, grid, means, turned=turned)  # type: ignore[no-any-return]


def pack_bounded(
    x: Tensor, bound: Tensor, how: Coding, capacity: int | None = None, *, force: Backend | None = None
) -> BoundedParts:
    """A dense tensor with each element within a bound (one float32), in memory order: see bounds.py. With a capacity,
    what does not fit is missing; the last of `places` tells. Eager only.
    """
    return twin("bounding", x.device, force).pack_bounded(x, bound, how, capacity)  # type: ignore[no-any-return]


def unpack_bounded(kept: BoundedParts, layout: Layout, how: Coding, *, force: Backend | None = None) -> Tensor:
    """What was packed, as a tensor of that dense layout."""
    return twin("bounding", kept.bound.device, force).unpack_bounded(kept, layout, how)  # type: ignore[no-any-return]


def group_packer(layout: Layout, how: Groups) -> Packer:
    """`pack_groups` and `unpack_groups` for one layout."""
    return _launched("quant", layout, how) or ByFunctions(
        lambda x: pack_groups(x, how),
        lambda packed: unpack_groups(packed, layout.shape, layout.stride, how, layout.dtype),
    )


def chainer(layout: Layout, chain: Chain, dtypes: tuple[torch.dtype, ...]) -> Chainer:
    """`unpack_chain` for one layout and operands of these dtypes. Eager only."""
    return twin("chaining", layout.device, None).chainer(layout, chain, dtypes)  # type: ignore[no-any-return]


def bit_packer(layout: Layout, rule: Interval, on: float, off: float) -> Packer:
    """`pack_bits` and `unpack_bits` for one layout, of any shape."""
    n = math.prod(layout.shape)
    return _launched("bits", layout, rule, on, off) or ByFunctions(
        lambda x: pack_bits(layout.flat(x), rule),
        lambda packed: layout.restore(unpack_bits(packed, n, on, off, layout.dtype)),
    )


def code_packer(layout: Layout, buckets: Buckets) -> Packer:
    """`pack_codes` and `unpack_codes` for one layout."""
    return _launched("buckets", layout, buckets) or ByFunctions(
        lambda x: pack_codes(x, buckets),
        lambda packed: unpack_codes(packed, layout.shape, layout.stride, buckets, layout.dtype),
    )


def fusion(layout: Layout, unit: Pointwise) -> Fusion:
    """`pointwise_forward` and `pointwise_backward` for one layout. Eager only."""
    return _launched("pointwise", layout, unit) or FusionByFunctions(
        lambda x, out: pointwise_forward(x, unit, out), lambda codes, dy: pointwise_backward(codes, dy, unit)
    )


def grouped_fusion(layout: Layout, how: Groups, function: str, *, force: Backend | None = None) -> FusionByGroups:
    """f(x), to rounding, with what `pack_groups` makes of x; then f' * dY, and f(x) once more. Eager only."""
    value, slope = Chain(how, (Step(function),)), Chain(how, (Step(DERIVATIVES[function]), Step("mul", SAME)))
    chaining, quant = twin("chaining", layout.device, force), twin("quant", layout.device, force)
    values, slopes = chaining.chainer(layout, value, ()), chaining.chainer(layout, slope, (layout.dtype,))
    return FusionByGroups(quant.grouping(layout, how, function), value, values, slopes)


def picker(layout: Layout, picks: Picks) -> Picker:
    """`pick_largest` and `put_back` for one layout."""
    return _launched("picking", layout, picks) or PickerByFunctions(
        lambda x: pick_largest(x, picks),
        lambda values, places, signs=None: put_back(values, places, layout.shape, layout.stride, picks, signs),
    )


def blocker(layout: Layout, grid: Grid) -> Blocker:
    """`keep_blocks`, `put_blocks_back` and `block_product` for one layout."""
    return _launched("blocking", layout, grid) or BlockerByFunctions(
        grid,
        lambda x: keep_blocks(x, grid),
        lambda values, index, means=None: put_blocks_back(values, index, layout.shape, layout.stride, grid, means),
        lambda held, dy, turned: block_product(
            held[0], held[1], dy, grid, held[2] if grid.group else None, turned=turned
        ),
    )


def _launched(name: str, layout: Layout, *what: Any) -> Any:
    """What launches kernels; None off a GPU, while a compiler looks, and for dtypes without a kernel."""
    if is_compiling() or backend(layout.device) != "triton":
        return None
    return twin(name, layout.device, None).packer(layout, *what)


def pack_window(indices: Tensor, pool: Windows, *, force: Backend | None = None) -> Tensor:
    """Max-pool indices (int64, flat in the input plane) as positions inside their windows (uint8), row-major.

    Contiguous and channels_last layouts are kept. `Windows.fits` says beforehand whether a geometry can be packed.
    """
    if is_compiling():
        return library.pack_window(indices, *pool)  # type: ignore[no-any-return]
    return twin("pooling", indices.device, force).pack_window(indices, pool)  # type: ignore[no-any-return]


def unpack_window(codes: Tensor, pool: Windows, *, force: Backend | None = None) -> Tensor:
    """The exact inverse of `pack_window`."""
    if is_compiling():
        return library.unpack_window(codes, *pool)  # type: ignore[no-any-return]
    return twin("pooling", codes.device, force).unpack_window(codes, pool)  # type: ignore[no-any-return]
