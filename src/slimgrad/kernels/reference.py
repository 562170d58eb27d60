"""Every kernel in plain torch: what the Triton twins must equal bit for bit, and what CPU users run.

Work goes in chunks, so that temporaries stay far below the size of the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels.geometry import NO_POSITION, Planes, Windows, checked, dense
from slimgrad.kernels.groups import (
    LANES,
    PLANES,
    ROUNDS,
    SPECIALS,
    TAME,
    THREADS,
    TILE,
    Groups,
    check_dense,
    check_groups,
    check_packed,
)
from slimgrad.kernels.predicate import Interval, byte_count, check_bits, check_flat

CHUNK = 1 << 20
"""Elements treated at a time; a multiple of 8 and of a tile. Smaller chunks pay for Python, larger for cache misses."""

GATHER = 0x0102040810204080
"""Eight bytes of 0 or 1, read as one little-endian word, times this: byte k's bit lands on bit 56 + k, no carries."""

FLOAT_EXACT = 2**22


def pack_bits(x: Tensor, rule: Interval) -> Tensor:
    """One bit per element of the flat tensor `x`: element 8j+k is bit k of byte j; the tail of the last byte is 0."""
    check_flat(x)
    x, n = x.detach(), x.numel()
    out = torch.empty(byte_count(n), dtype=torch.uint8, device=x.device)
    whole = n - n % 8
    for first, last in _chunks(whole):
        out[first // 8 : last // 8] = _gather(_compare(x[first:last], rule))
    if rule.nan:  # see _compare: inverted here, where it is an eighth of the bytes
        out.bitwise_not_()
    if whole < n:
        tail = torch.zeros(8, dtype=torch.bool, device=x.device)
        tail[: n - whole] = _compare(x[whole:], rule).ne(rule.nan)
        out[-1:] = _gather(tail)
    return out


def unpack_bits(bits: Tensor, n: int, on: float, off: float, dtype: torch.dtype) -> Tensor:
    """The n bits of `pack_bits` as values `on` and `off` of `dtype`."""
    check_bits(bits, n)
    out = torch.empty(n, dtype=dtype, device=bits.device)
    table = _byte_values(on, off, dtype, bits.device)
    whole = n - n % 8
    rows = out[:whole].view(-1, 8)
    for first, last in _chunks(whole):
        span = slice(first // 8, last // 8)
        torch.index_select(table, 0, bits[span].int(), out=rows[span])
    if whole < n:
        out[whole:] = table.index_select(0, bits[-1:].int())[0, : n - whole]
    return out


def pack_window(indices: Tensor, pool: Windows) -> Tensor:
    """Max-pool indices (int64, flat in the input plane) as positions inside their windows (uint8), row-major."""
    indices, layout = dense(indices, checked(pool).rank, torch.int64)
    out = torch.empty_like(indices, dtype=torch.uint8)
    starts = _starts(pool, layout, _index_dtype(pool), indices.device)
    for source, target in _slabs(layout, indices, out):
        target.copy_(_positions(source, pool, starts))
    return out


def unpack_window(codes: Tensor, pool: Windows) -> Tensor:
    """The exact inverse of `pack_window`."""
    codes, layout = dense(codes, checked(pool).rank, torch.uint8)
    out = torch.empty_like(codes, dtype=torch.int64)
    base, offsets = _flat_starts(pool, layout, codes.device), _flat_offsets(pool, codes.device)
    for source, target in _slabs(layout, codes, out):
        torch.index_select(offsets, 0, source.reshape(-1).int(), out=target.view(-1))
        target.add_(base).masked_fill_(source == NO_POSITION, 0)
    return out


def narrow_int(values: Tensor, bound: int) -> Tensor:
    """int64 values in [0, bound) as the smallest of uint8, int16 and int32 that can hold them all; always a copy."""
    if values.dtype != torch.int64 or bound < 0:
        raise SpecError(f"narrow_int: expected int64 and a bound >= 0, found {values.dtype} and bound={bound}")
    return values.to(narrow_dtype(bound), copy=True)


def widen_int(values: Tensor) -> Tensor:
    """The inverse of `narrow_int`."""
    return values.to(torch.int64)


def narrow_dtype(bound: int) -> torch.dtype:
    """The dtype that `narrow_int` chooses; int64 itself where int32 is too small."""
    for dtype in (torch.uint8, torch.int16, torch.int32):
        if bound - 1 <= torch.iinfo(dtype).max:
            return dtype
    return torch.int64


def _chunks(n: int) -> Iterator[tuple[int, int]]:
    """Spans of [0, n). A compiler gets one span: it fuses by itself and would otherwise unroll the loop."""
    step = max(n, 1) if torch.compiler.is_compiling() else CHUNK
    return ((first, min(first + step, n)) for first in range(0, n, step))


def _compare(x: Tensor, rule: Interval) -> Tensor:
    """The rule's bits, inverted if `rule.nan`: NaN fails every comparison, so its bit is 0 here."""
    x = _comparable(x)
    lo, hi, closed = _bounds(rule, x.dtype)
    outside = rule.outside != rule.nan
    if outside:
        below, above = (torch.lt, torch.gt) if closed else (torch.le, torch.ge)
    else:
        below, above = (torch.ge, torch.le) if closed else (torch.gt, torch.lt)
    if closed and lo == -math.inf:  # that side tells nothing; one pass less
        return above(x, hi)
    if closed and hi == math.inf:
        return below(x, lo)
    first, second = below(x, lo), above(x, hi)
    return first.logical_or_(second) if outside else first.logical_and_(second)


def _comparable(x: Tensor) -> Tensor:
    if x.dtype == torch.bool:
        return x.view(torch.uint8)
    if x.is_floating_point() and x.element_size() == 1:  # float8 has no comparisons; float32 holds it exactly
        return x.float()
    return x


def _bounds(rule: Interval, dtype: torch.dtype) -> tuple[float, float, bool]:
    """The rule's bounds as `dtype` can compare them; for integers a closed interval of integers."""
    if dtype.is_floating_point:
        return rule.lo, rule.hi, rule.closed
    info = torch.iinfo(dtype)
    lo, hi = max(rule.lo, info.min - 1), min(rule.hi, info.max + 1)  # no infinities left
    first = math.ceil(lo) if rule.closed else math.floor(lo) + 1
    last = math.floor(hi) if rule.closed else math.ceil(hi) - 1
    first, last = max(first, info.min), min(last, info.max)
    return (first, last, True) if first <= last else (info.max, info.min, True)  # the latter holds no integer


def _gather(mask: Tensor) -> Tensor:
    """Eight bools per byte, as words whose low byte counts; overwrites `mask`."""
    return mask.view(torch.int64).mul_(GATHER).bitwise_right_shift_(56)


def _byte_values(on: float, off: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256, 8]: the values that each byte stands for."""
    lanes = torch.arange(8, device=device)
    is_on = (torch.arange(256, device=device)[:, None] >> lanes).bitwise_and_(1).bool()
    kind = float if dtype.is_floating_point else bool if dtype == torch.bool else int
    return torch.full((256, 8), kind(off), dtype=dtype, device=device).masked_fill_(is_on, kind(on))


def _slabs(layout: Planes, source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Both tensors in memory order, a number of whole planes at a time."""
    if source.numel() == 0:
        return iter(())
    sources, targets = layout.slabs(source), layout.slabs(target)
    step = max(1, CHUNK * len(sources) // source.numel())
    step = len(sources) if torch.compiler.is_compiling() else step
    return ((sources[i : i + step], targets[i : i + step]) for i in range(0, len(sources), step))


def _index_dtype(pool: Windows) -> torch.dtype:
    """See _quotient."""
    return torch.float32 if math.prod(pool.input_size) <= FLOAT_EXACT else torch.int64


def _starts(pool: Windows, layout: Planes, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Per dimension, where each window starts (in the padding if negative), shaped to broadcast over a slab."""
    starts = []
    for i, count in enumerate(layout.out):
        along = torch.arange(count, dtype=dtype, device=device) * pool.stride[i] - pool.padding[i]
        starts.append(along.view(-1, *[1] * (pool.rank - i)))
    return starts


def _positions(flat: Tensor, pool: Windows, starts: list[Tensor]) -> Tensor:
    """Row-major position inside its window of each flat index of a slab; NO_POSITION for one that is not in it."""
    rest, code, weight = flat.to(starts[0].dtype), torch.zeros((), dtype=starts[0].dtype, device=flat.device), 1
    outside = None
    for i in reversed(range(pool.rank)):
        above = _quotient(rest, pool.input_size[i]) if i else None
        local = (rest if above is None else torch.add(rest, above, alpha=-pool.input_size[i])) - starts[i]
        if pool.dilation[i] > 1:
            local = _quotient(local, pool.dilation[i])
        missed = _missed(local, pool.kernel[i])
        outside = missed if outside is None else outside if missed is None else outside | missed
        code = torch.add(code, local, alpha=weight)
        weight *= pool.kernel[i]
        rest = rest if above is None else above
    return code if outside is None else code.masked_fill_(outside, NO_POSITION)


def _quotient(x: Tensor, size: int) -> Tensor:
    """floor(x / size). Floats divide several times faster than integers do, and are exact below 2**22: half a step lies
    between x + 0.5 and the next multiple of `size`, and a float32 division is off by less."""
    if x.is_floating_point():
        return torch.add(x, 0.5).div_(size).floor_()
    return torch.div(x, size, rounding_mode="floor")


def _missed(local: Tensor, size: int) -> Tensor | None:
    """Which positions are not in [0, size); None where a look is free and finds none."""
    if not (local.is_cuda or torch.compiler.is_compiling()):
        low, high = local.aminmax()
        if low >= 0 and high < size:
            return None
    return (local < 0) | (local >= size)


def _strides(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]


def _flat_starts(pool: Windows, layout: Planes, device: torch.device) -> Tensor:
    """[*out, 1]: the flat index of each window's first position; may lie outside the plane."""
    starts, strides = _starts(pool, layout, torch.int64, device), _strides(pool.input_size)
    total = starts[0] * strides[0]
    for start, stride in zip(starts[1:], strides[1:], strict=True):
        total = total + start * stride
    return total


def _flat_offsets(pool: Windows, device: torch.device) -> Tensor:
    """[256]: how far each position lies from its window's first one; zero for codes that name none."""
    code = torch.arange(256, device=device)
    steps = zip(pool.kernel, _strides(pool.kernel), pool.dilation, _strides(pool.input_size), strict=True)
    offsets = torch.stack([code // weight % k * (d * stride) for k, weight, d, stride in steps]).sum(0)
    return offsets.masked_fill_(code >= math.prod(pool.kernel), 0)


# --- groups: see groups.py for the format ---------------------------------------------------------------------------


def pack_groups(x: Tensor, how: Groups) -> Tensor:
    """The dense tensor `x`, in the order of its memory, as few-bit codes with an offset and a step per group."""
    check_groups(how, x.dtype)
    check_dense(x)
    n = x.numel()
    x = x.detach().as_strided((n,), (1,))
    out = torch.empty(how.nbytes(n), dtype=torch.uint8, device=x.device)
    planes, scales = _group_views(out, n, how)
    for first, last in _chunks(n):
        values, exists = _tiled(x[first:last], how.group)
        span = slice(how.count(first), how.count(last))
        numbers = torch.arange(span.start, span.stop, device=x.device)
        codes, scales[span] = _encode(values.float(), exists, numbers, how, x.dtype)
        shift = 0
        for width, plane in zip(PLANES[how.bits], planes, strict=True):
            plane[span] = _woven(codes >> shift & (1 << width) - 1, width)
            shift += width
    return out


def unpack_groups(
    packed: Tensor, shape: Sequence[int], stride: Sequence[int], how: Groups, dtype: torch.dtype
) -> Tensor:
    """The inverse of `pack_groups`, each element within half a step of its group (a whole one if stochastic)."""
    n = math.prod(shape)
    check_groups(how, dtype)
    check_packed(packed, n, how.nbytes(n))
    out = torch.empty(n, dtype=dtype, device=packed.device)
    planes, scales = _group_views(packed, n, how)
    for first, last in _chunks(n):
        span = slice(how.count(first), how.count(last))
        codes, shift = torch.zeros((), dtype=torch.int32, device=packed.device), 0
        for width, plane in zip(PLANES[how.bits], planes, strict=True):
            codes = codes | _unwoven(plane[span], width) << shift
            shift += width
        values = _decode(codes, scales[span, None], how, dtype)
        out[first:last] = values.view(-1, THREADS, ROUNDS, LANES).transpose(1, 2).reshape(-1)[: last - first]
    return out.as_strided(shape, stride)


def _group_views(packed: Tensor, n: int, how: Groups) -> tuple[list[Tensor], Tensor]:
    """The planes of codes, a row of bytes per group, and the offsets and steps, an int32 per group."""
    planes, start = [], 0
    for width in PLANES[how.bits]:
        size = how.count(n) * how.plane_bytes(width)
        planes.append(packed[start : start + size].view(how.count(n), how.plane_bytes(width)))
        start += size
    return planes, packed[start:].view(torch.int32)


def _tiled(x: Tensor, group: int) -> tuple[Tensor, Tensor | None]:
    """A row per group, see NOTE [Tiles] in groups.py; and where the last tile is filled up, which elements exist."""
    missing, exists = -x.numel() % TILE, None
    if missing:
        exists = torch.arange(x.numel() + missing, device=x.device) < x.numel()
        exists = _tiled(exists, group)[0]
        x = torch.cat([x, x.new_zeros(missing)])
    return x.view(-1, ROUNDS, THREADS, LANES).transpose(1, 2).reshape(-1, group), exists


def _encode(
    x: Tensor, exists: Tensor | None, numbers: Tensor, how: Groups, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Codes (int32) and scale words of the groups of float32, once `dtype`, in the rows of `x`."""
    wild = ~(x.abs() <= TAME[dtype])
    counted = x.abs() <= torch.finfo(torch.float32).max
    if exists is not None:
        wild, counted = wild & exists, counted & exists
    wild = wild.any(1, keepdim=True)
    none = ~counted.any(1, keepdim=True)
    low = torch.where(counted, x, math.inf).amin(1, keepdim=True).masked_fill(none, 0.0)
    high = torch.where(counted, x, -math.inf).amax(1, keepdim=True).masked_fill(none, 0.0)
    offset = torch.zeros_like(low) if how.zeros else _down_to_bf16(low + 0.0)  # -0.0 becomes 0.0: twins find either
    step = _step(offset, high, wild, how, dtype)
    offset = step * 0.5 if how.zeros else offset
    scales = _bf16_bits(offset) | _bf16_bits(step) << 16 | wild.int() << 31
    place = (x - offset) * torch.where(step > 0, 1.0 / step, 0.0)
    if how.stochastic:
        place = (place + _fractions(scales, numbers[:, None], how)).floor()
    last = torch.where(wild, how.last(wild=True), how.last(wild=False))
    codes = place.round().clamp(min=0).minimum(last).nan_to_num(0.0).int() + torch.where(wild, SPECIALS, how.first)
    for code, kind in _specials(x, how):
        codes = codes.masked_fill(kind, code)
    return codes if exists is None else codes.masked_fill(~exists, 0), scales.squeeze(1)


def _specials(x: Tensor, how: Groups) -> list[tuple[int, Tensor]]:
    """Codes that stand for no number, and where they stand."""
    infinite = [(1, x == -math.inf), (2, x == math.inf)]
    return [(0, x == 0), (1, x.isnan()), *infinite] if how.zeros else [(0, x.isnan()), *infinite]


def _step(offset: Tensor, high: Tensor, wild: Tensor, how: Groups, dtype: torch.dtype) -> Tensor:
    """The step of each group, rounded up; by halves, because the range itself may overflow."""
    step = (high * 0.5 - offset * 0.5) * torch.where(wild, how.factor(wild=True), how.factor(wild=False))
    rounded = (step.view(torch.int32) + 0xFFFF & -0x10000).clamp(max=0x7F7F0000).view(torch.float32)
    return torch.where(step > 0, rounded.clamp(min=how.least_step(dtype)), 0.0)


def _down_to_bf16(x: Tensor) -> Tensor:
    """The largest bfloat16 that is not above x, in float32; never -inf."""
    bits = x.view(torch.int32)
    towards_zero = bits & -0x10000
    away = (bits + 0xFFFF & -0x10000).clamp(max=-0x00810000)  # 0xFF7F0000, the least finite one
    return torch.where(x < 0, away, towards_zero).view(torch.float32)


def _bf16_bits(x: Tensor) -> Tensor:
    """The upper half of float32's bits, which must be all of them."""
    return x.view(torch.int32) >> 16 & 0xFFFF


def _fractions(scales: Tensor, numbers: Tensor, how: Groups) -> Tensor:
    """A number in [0, 1) for each element of the groups; see NOTE [Random numbers without a state]."""
    keys = _hash(scales.long() & 0xFFFFFFFF ^ _hash(numbers + how.seed & 0xFFFFFFFF))
    places = torch.arange(how.group, device=scales.device) * GOLDEN
    return (_hash(keys + places & 0xFFFFFFFF) >> 8).float() * 2.0**-24


GOLDEN = 0x9E3779B9
"""2**32 over the golden ratio: multiples of it are spread evenly."""
HASH_MULTIPLIERS = (0x7FEB352D, 0x846CA68B)


def _hash(x: Tensor) -> Tensor:
    """Every bit of a 32-bit number (held in int64) mixed into every other ("lowbias32")."""
    x = x ^ x >> 16
    x = x * HASH_MULTIPLIERS[0] & 0xFFFFFFFF
    x = x ^ x >> 15
    x = x * HASH_MULTIPLIERS[1] & 0xFFFFFFFF
    return x ^ x >> 16


def _woven(codes: Tensor, width: int) -> Tensor:
    """Rows of codes of `width` bits as rows of bytes, the first code in the low bits."""
    per_byte = 8 // width
    if per_byte == 1:
        return codes.to(torch.uint8)
    lanes = torch.arange(per_byte, device=codes.device, dtype=torch.int32) * width
    return (codes.view(len(codes), -1, per_byte) << lanes).sum(2).to(torch.uint8)


def _unwoven(rows: Tensor, width: int) -> Tensor:
    """The inverse of `_woven`, as int32."""
    per_byte = 8 // width
    lanes = torch.arange(per_byte, device=rows.device, dtype=torch.int32) * width
    return (rows.int()[:, :, None] >> lanes & (1 << width) - 1).flatten(1)


def _decode(codes: Tensor, scales: Tensor, how: Groups, dtype: torch.dtype) -> Tensor:
    """The values, in float32, that the rows of codes stand for."""
    offset = (scales << 16).view(torch.float32)
    step = (scales & 0x7FFF0000).view(torch.float32)
    wild = scales < 0
    base = torch.where(wild, SPECIALS, how.first)
    largest = torch.finfo(dtype).max
    values = (offset + (codes - base) * step).clamp(-largest, largest)
    if how.zeros:
        values = values.masked_fill(codes == 0, 0.0)
    for code, special in enumerate((math.nan, -math.inf, math.inf) if not how.zeros else (0.0, math.nan, math.inf)):
        values = values.masked_fill(wild & (codes == code), special)
    return values
