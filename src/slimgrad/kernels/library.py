"""The kernels as ops of torch, so that a compiler takes each for one node and knows the shape of its result.

Arguments are flat, as schemas are: a rule, a geometry and a format become the fields of their tuples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from slimgrad.kernels.blocks import Grid
from slimgrad.kernels.codes import Buckets, code_bytes
from slimgrad.kernels.geometry import Windows
from slimgrad.kernels.groups import Groups
from slimgrad.kernels.picks import Picks
from slimgrad.kernels.predicate import Interval, byte_count
from slimgrad.kernels.twins import twin


def flat_interval(rule: Interval) -> tuple[float, float, bool, bool, bool]:
    return rule.lo, rule.hi, rule.closed, rule.outside, rule.nan


@custom_op("slimgrad::pack_bits", mutates_args=())
def pack_bits(x: Tensor, lo: float, hi: float, closed: bool, outside: bool, nan: bool) -> Tensor:
    return twin("bits", x.device, None).pack_bits(x, Interval(lo, hi, closed, outside, nan))  # type: ignore[no-any-return]


@pack_bits.register_fake
def _(x: Tensor, *rule: Any) -> Tensor:
    return x.new_empty(byte_count(x.numel()), dtype=torch.uint8)


@custom_op("slimgrad::unpack_bits", mutates_args=())
def unpack_bits(packed: Tensor, n: int, on: float, off: float, dtype: torch.dtype) -> Tensor:
    return twin("bits", packed.device, None).unpack_bits(packed, n, on, off, dtype)  # type: ignore[no-any-return]


@unpack_bits.register_fake
def _(packed: Tensor, n: int, on: float, off: float, dtype: torch.dtype) -> Tensor:
    return packed.new_empty(n, dtype=dtype)


@custom_op("slimgrad::pack_groups", mutates_args=())
def pack_groups(x: Tensor, bits: int, group: int, zeros: bool, stochastic: bool, seed: int) -> Tensor:
    return twin("quant", x.device, None).pack_groups(x, Groups(bits, group, zeros, stochastic, seed))  # type: ignore[no-any-return]


@pack_groups.register_fake
def _(x: Tensor, bits: int, group: int, *rest: Any) -> Tensor:
    return x.new_empty(Groups(bits, group).nbytes(x.numel()), dtype=torch.uint8)


@custom_op("slimgrad::unpack_groups", mutates_args=())
def unpack_groups(
    packed: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    bits: int,
    group: int,
    zeros: bool,
    stochastic: bool,
    seed: int,
    dtype: torch.dtype,
) -> Tensor:
    how = Groups(bits, group, zeros, stochastic, seed)
    return twin("quant", packed.device, None).unpack_groups(packed, shape, stride, how, dtype)  # type: ignore[no-any-return]


@unpack_groups.register_fake
def _(packed: Tensor, shape: Sequence[int], stride: Sequence[int], *how_and_dtype: Any) -> Tensor:
    return packed.new_empty_strided(shape, stride, dtype=how_and_dtype[-1])


def flat_buckets(buckets: Buckets) -> tuple[Sequence[float], Sequence[float], float, bool]:
    return buckets.borders, buckets.values, buckets.centre, buckets.absolute


_buckets = lru_cache(maxsize=1024)(Buckets)  # the twins know them by identity


@custom_op("slimgrad::pack_codes", mutates_args=())
def pack_codes(x: Tensor, borders: Sequence[float], values: Sequence[float], centre: float, absolute: bool) -> Tensor:
    buckets = _buckets(tuple(borders), tuple(values), centre, absolute)
    return twin("buckets", x.device, None).pack_codes(x, buckets)  # type: ignore[no-any-return]


@pack_codes.register_fake
def _(x: Tensor, borders: Sequence[float], values: Sequence[float], centre: float, absolute: bool) -> Tensor:
    bits = _buckets(tuple(borders), tuple(values), centre, absolute).bits
    return x.new_empty(code_bytes(x.numel(), bits), dtype=torch.uint8)


@custom_op("slimgrad::unpack_codes", mutates_args=())
def unpack_codes(
    packed: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    borders: Sequence[float],
    values: Sequence[float],
    centre: float,
    absolute: bool,
    dtype: torch.dtype,
) -> Tensor:
    buckets = _buckets(tuple(borders), tuple(values), centre, absolute)
    return twin("buckets", packed.device, None).unpack_codes(packed, shape, stride, buckets, dtype)  # type: ignore[no-any-return]


@unpack_codes.register_fake
def _(packed: Tensor, shape: Sequence[int], stride: Sequence[int], *rest: Any) -> Tensor:
    return packed.new_empty_strided(shape, stride, dtype=rest[-1])


@custom_op("slimgrad::pack_window", mutates_args=())
def pack_window(
    indices: Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    pool = _windows(input_size, kernel, stride, padding, dilation)
    return twin("pooling", indices.device, None).pack_window(indices, pool)  # type: ignore[no-any-return]


@custom_op("slimgrad::unpack_window", mutates_args=())
def unpack_window(
    codes: Tensor,
    input_size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    pool = _windows(input_size, kernel, stride, padding, dilation)
    return twin("pooling", codes.device, None).unpack_window(codes, pool)  # type: ignore[no-any-return]


@pack_window.register_fake
def _(indices: Tensor, *pool: Sequence[int]) -> Tensor:
    return torch.empty_like(indices, dtype=torch.uint8)


@unpack_window.register_fake
def _(codes: Tensor, *pool: Sequence[int]) -> Tensor:
    return torch.empty_like(codes, dtype=torch.int64)


def _windows(*fields: Sequence[int]) -> Windows:
    return Windows(*(tuple(field) for field in fields))


@custom_op("slimgrad::pick_largest", mutates_args=())
def pick_largest(x: Tensor, k: int, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The signs are empty if they are not asked for: an op returns as many tensors whatever its arguments are."""
    found = twin("picking", x.device, None).pick_largest(x, Picks.of(x.numel(), k, signed))
    return found if signed else (*found, x.new_empty(0, dtype=torch.uint8))


@pick_largest.register_fake
def _(x: Tensor, k: int, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    picks = Picks.of(x.numel(), k, signed)
    places, signs = picks.nbytes, picks.sign_bytes(x.itemsize)
    return x.new_empty(k), x.new_empty(places, dtype=torch.uint8), x.new_empty(signs, dtype=torch.uint8)


@custom_op("slimgrad::put_back", mutates_args=())
def put_back(
    values: Tensor, places: Tensor, shape: Sequence[int], stride: Sequence[int], signs: Tensor | None
) -> Tensor:
    picks = Picks.of(math.prod(shape), values.numel(), signs is not None)
    return twin("picking", values.device, None).put_back(values, places, shape, stride, picks, signs)  # type: ignore[no-any-return]


@put_back.register_fake
def _(values: Tensor, places: Tensor, shape: Sequence[int], stride: Sequence[int], signs: Tensor | None) -> Tensor:
    return values.new_empty_strided(shape, stride)


@custom_op("slimgrad::keep_blocks", mutates_args=())
def keep_blocks(
    x: Tensor,
    rows: int,
    columns: int,
    height: int,
    width: int,
    kept: int,
    layout: str,
    norm: str,
    group: int,
    sample: int,
    unbiased: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The means are empty if there are no groups."""
    grid = Grid(rows, columns, height, width, kept, layout, norm, group, sample, unbiased)
    found = twin("blocking", x.device, None).keep_blocks(x, grid)
    return found if group else (*found, x.new_empty(grid.means_shape))


@keep_blocks.register_fake
def _(x: Tensor, *fields: Any) -> tuple[Tensor, Tensor, Tensor]:
    grid = Grid(*fields)
    index = x.new_empty(grid.index_size, dtype=torch.int32)
    return x.new_empty(grid.values_shape), index, x.new_empty(grid.means_shape)


@custom_op("slimgrad::put_blocks_back", mutates_args=())
def put_blocks_back(
    values: Tensor,
    index: Tensor,
    means: Tensor | None,
    shape: Sequence[int],
    stride: Sequence[int],
    rows: int,
    columns: int,
    height: int,
    width: int,
    kept: int,
    layout: str,
    norm: str,
    group: int,
    sample: int,
    unbiased: bool,
) -> Tensor:
    grid = Grid(rows, columns, height, width, kept, layout, norm, group, sample, unbiased)
    return twin("blocking", values.device, None).put_blocks_back(values, index, shape, stride, grid, means)  # type: ignore[no-any-return]


@put_blocks_back.register_fake
def _(
    values: Tensor, index: Tensor, means: Tensor | None, shape: Sequence[int], stride: Sequence[int], *grid: Any
) -> Tensor:
    return values.new_empty_strided(shape, stride)
