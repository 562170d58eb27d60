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
    for first, last in chunks(whole):
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
    for first, last in chunks(whole):
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


def chunks(n: int) -> Iterator[tuple[int, int]]:
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


def woven(codes: Tensor, shift: int, width: int) -> Tensor:
    """`width` bits from bit `shift` on of each code in rows, as rows of bytes, the first code in the low bits."""
    per_byte, mask = 8 // width, (1 << width) - 1
    out = codes[:, ::per_byte] >> shift & mask
    for lane in range(1, per_byte):
        out |= (codes[:, lane::per_byte] >> shift & mask) << lane * width
    return out


def unwoven(rows: Tensor, width: int) -> Tensor:
    """The inverse of `woven` with shift 0."""
    per_byte, mask = 8 // width, (1 << width) - 1
    codes = rows.new_empty(*rows.shape, per_byte)
    for lane in range(per_byte):
        torch.bitwise_and(rows >> lane * width, mask, out=codes[:, :, lane])
    return codes.flatten(1)
