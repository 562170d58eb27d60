"""What every codec must pass: adding a codec means adding a Case here, and the contract tests apply by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimgrad.codecs import (
    ITSELF,
    Blocks,
    Bounded,
    Channels,
    Codec,
    Demand,
    Derive,
    FewBit,
    Keep,
    Lossless,
    Offload,
    Quant,
    Recompute,
    TopK,
)
from slimgrad.spec import Need
from slimgrad.tables.functions import named

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def normal(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(shape, generator=generator)
    return values > 0 if dtype == torch.bool else values.to(dtype)


@dataclass(frozen=True)
class Case:
    """A codec, a demand it serves, and how to judge what it gives back."""

    name: str
    codec: Codec
    demand: Demand = ITSELF
    dtypes: tuple[torch.dtype, ...] = FLOATS
    delivers: Callable[[Tensor, Tensor], bool] = field(default=lambda before, after: equal(before, after))

    def __str__(self) -> str:
        return self.name


def equal(before: Tensor, after: Tensor) -> bool:
    return (
        torch.equal(before.nan_to_num(7.0), after.nan_to_num(7.0))
        if before.is_floating_point()
        else torch.equal(before, after)
    )


def same_sign_of_life(before: Tensor, after: Tensor) -> bool:
    """The gradient passes the same elements, which is all that ReLU's backward asks."""
    return torch.equal(~(before <= 0), ~(after <= 0))


def inside(low: float, high: float) -> Callable[[Tensor, Tensor], bool]:
    return lambda before, after: torch.equal(~((before <= low) | (before >= high)), ~((after <= low) | (after >= high)))


def within_steps(codec: Quant) -> Callable[[Tensor, Tensor], bool]:
    """Half a step of the group, or a whole one; no step is larger than the tensor's range over the number of steps,
    but for what rounding offset and step to 16 bits adds (2**-7 of each), the wild codes of a group with infinities
    (three fewer, and with two bits one for all), and the rounding of the result to the tensor's own dtype."""

    def delivers(before: Tensor, after: Tensor) -> bool:
        special = ~before.isfinite()
        if not torch.equal(before[special].nan_to_num(7.0), after[special].nan_to_num(7.0)):
            return False
        before, after = before[~special].double(), after[~special].double()
        if not before.numel():
            return True
        numbers = 2**codec.bits - 1 - (3 if special.any() else 0)
        span = (before.max() - before.min()) * (1 + 2**-6) + before.abs().max() * 2**-7
        step = span / numbers if numbers else 2 * span
        bound = step * (1.0 if codec.rounding == "stochastic" else 0.5) + before.abs().max() * 2**-8
        return bool(((before - after).abs() <= bound).all())

    return delivers


QUANTS = tuple(
    Quant(bits=bits, group=group, rounding=rounding)
    for bits, group in ((8, 128), (4, 128), (3, 32), (2, 1024))
    for rounding in ("nearest", "stochastic")
)


def same_level(codec: FewBit, fn: str) -> Callable[[Tensor, Tensor], bool]:
    """What comes back has the level of its interval as slope, as far as rounding x to its dtype allows."""

    def delivers(before: Tensor, after: Tensor) -> bool:
        numbers = ~before.isnan()
        levels = codec.table(fn).slope(before[numbers].double())
        slopes = named(fn, {}).slope(after[numbers].double())
        on_border = torch.isin(before[numbers].float(), torch.tensor(codec.table(fn).borders).float())
        return bool(((slopes - levels).abs() <= 2.0**-6)[~on_border].all())

    return delivers


FEWBITS = tuple(FewBit(bits=bits) for bits in (1, 2, 3, 4, 7))


def largest_kept(codec: TopK) -> Callable[[Tensor, Tensor], bool]:
    """What is kept is equal (in 8 bits nearly) and no smaller than what is dropped; and there is not too much of it."""

    def delivers(before: Tensor, after: Tensor) -> bool:
        most = torch.finfo(before.dtype).max
        before, after = (t.nan_to_num(most, most / 2, -most / 2) for t in (before, after))
        kept = after != 0
        near = 2.0**-6 * before.abs().amax() if codec.values == 8 and before.numel() else 0.0
        if not bool(((before - after).abs()[kept] <= near).all()) or int(kept.sum()) > codec.picks(before.shape).k:
            return False
        if codec.scope != "tensor" or codec.select != "largest" or kept.all() or not kept.any():
            return True
        return bool(before.abs()[kept].min() >= before.abs()[~kept].max() - near)

    return delivers


TOPKS = (
    TopK(),
    TopK(keep=0.01),
    TopK(keep=0.5),
    TopK(keep=1.0),
    TopK(keep=0.2, values=8),
    TopK(keep=0.3, scope="sample"),
    TopK(keep=0.3, scope="row", values=8),
    TopK(keep=0.4, select="channels"),
)


def strongest_kept(codec: Blocks) -> Callable[[Tensor, Tensor], bool]:
    """Elements are what they were or zero, there are not too many, and every column has its share of blocks."""

    def delivers(before: Tensor, after: Tensor) -> bool:
        most = torch.finfo(before.dtype).max
        before, after = (t.nan_to_num(most, most / 2, -most / 2) for t in (before, after))
        kept, grid = after != 0, codec.grid(before.shape)
        if codec.means or codec.unbiased:
            return bool(after.isfinite().all())  # test_block_pruning.py looks at means, and at what is drawn
        if not torch.equal(before[kept], after[kept]) or int(kept.sum()) > grid.blocks * grid.height * grid.width:
            return False
        return codec.keep < 1 or torch.equal(before, after)

    return delivers


BLOCKS = (
    Blocks(),
    Blocks(keep=0.3, block=(16, 32), norm="l2"),
    Blocks(keep=0.3, block=(32, 16), layout="bsr"),
    Blocks(keep=1.0, block=(16, 128)),
    Blocks(keep=0.3, block=(32, 16), means=16),
    Blocks(keep=0.3, block=(16, 16), sample=4),
    Blocks(keep=0.3, block=(16, 16), layout="bsr", means=2),
    Blocks(keep=0.3, block=(16, 16), unbiased=True),
)


def within_bound(codec: Bounded) -> Callable[[Tensor, Tensor], bool]:
    """Each within the bound, zeros zeros, and what is not finite as it was."""

    def delivers(before: Tensor, after: Tensor) -> bool:
        special = ~before.isfinite()
        if not torch.equal(before[special].nan_to_num(7.0), after[special].nan_to_num(7.0)):
            return False
        finite, found = before[~special].double(), after[~special].double()
        bound = codec.bound
        if codec.relative and finite.numel():
            bound *= 0.0 if special.any() else float(finite.max() - finite.min()) * (1 + 2.0**-22)
        return bool(((finite - found).abs() <= bound).all() and (found[finite == 0] == 0).all())

    return delivers


BOUNDEDS = (
    Bounded(),
    Bounded(bound=0.3, predict="none"),
    Bounded(bound=0.3, predict="lorenzo"),
    Bounded(bound=1e-5),
    Bounded(bound=0.05, relative=True),
    Bounded(bound=0.1, dither=True),
)


def channels_kept(codec: Channels) -> Callable[[Tensor, Tensor], bool]:
    """These channels are what they were, the others zero."""

    def delivers(before: Tensor, after: Tensor) -> bool:
        if not before.dim():
            return equal(before if codec.indices else before * 0, after)
        dim = min(codec.dim, before.dim() - 1) % before.dim()
        at = torch.zeros(before.shape[dim], dtype=torch.bool)
        at[list(codec.indices) if len(at) else []] = True
        kept = at.view([-1 if d == dim else 1 for d in range(before.dim())])
        return equal(torch.where(kept, before, torch.zeros_like(before)), after)

    return delivers


CHANNELS = (Channels(), Channels(indices=(0,)), Channels(indices=(0,), dim=0), Channels(indices=(0,), dim=-1))

CASES: tuple[Case, ...] = (
    Case("keep", Keep(), dtypes=(*FLOATS, torch.int64, torch.bool)),
    Case("derive itself", Derive(), dtypes=(*FLOATS, torch.int64, torch.bool)),
    Case("recompute itself", Recompute(), dtypes=(*FLOATS, torch.int64, torch.bool)),
    Case("offload itself", Offload(), dtypes=(*FLOATS, torch.int64, torch.bool)),
    Case("lossless itself", Lossless(), dtypes=(*FLOATS, torch.int64, torch.bool)),
    Case("lossless nothing", Lossless(), Demand(need=Need.NOTHING), delivers=lambda before, after: True),
    Case("lossless relu", Lossless(), Demand(need=Need.MASK, fn="relu"), delivers=same_sign_of_life),
    Case(
        "lossless relu6",
        Lossless(),
        Demand(need=Need.MASK, fn="hardtanh", detail={"min_val": 0, "max_val": 6}),
        delivers=inside(0, 6),
    ),
    *(
        Case(f"{codec!r} {demand.zeros}", codec, demand, dtypes=FLOATS[:3], delivers=within_bound(codec))
        for codec in BOUNDEDS
        for demand in (Demand(need=Need.OPERAND), Demand(need=Need.OPERAND, zeros=True))
    ),
    *(
        Case(repr(codec), codec, demand, dtypes=FLOATS[:3], delivers=within_steps(codec))
        for codec in QUANTS
        for demand in (ITSELF, Demand(need=Need.OPERAND))
    ),
    *(
        Case(f"{codec!r} {fn}", codec, Demand(need=Need.DERIVATIVE, fn=fn), delivers=same_level(codec, fn))
        for codec, fn in (
            *((codec, "gelu") for codec in FEWBITS),
            (FewBit(bits=3), "hardswish"),
            (FewBit(bits=2), "silu"),
        )
    ),
    *(
        Case(
            repr(codec),
            codec,
            Demand(need=Need.OPERAND),
            dtypes=FLOATS if codec.values == "same" else FLOATS[:3],
            delivers=largest_kept(codec),
        )
        for codec in TOPKS
    ),
    *(Case(repr(codec), codec, Demand(need=Need.OPERAND), delivers=strongest_kept(codec)) for codec in BLOCKS),
    *(Case(repr(codec), codec, Demand(need=Need.OPERAND), delivers=channels_kept(codec)) for codec in CHANNELS),
    Case("lossless bool", Lossless(), Demand(need=Need.MASK, fn="bool"), dtypes=(torch.bool,)),
)
