"""What every codec must pass: adding a codec means adding a Case here, and the contract tests apply by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slimgrad.codecs import ITSELF, Codec, Demand, Keep, Lossless
from slimgrad.spec import Need

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


CASES: tuple[Case, ...] = (
    Case("keep", Keep(), dtypes=(*FLOATS, torch.int64, torch.bool)),
    Case("lossless itself", Lossless(), dtypes=(*FLOATS, torch.int64, torch.bool)),
    Case("lossless nothing", Lossless(), Demand(need=Need.NOTHING), delivers=lambda before, after: True),
    Case("lossless relu", Lossless(), Demand(need=Need.MASK, fn="relu"), delivers=same_sign_of_life),
    Case(
        "lossless relu6",
        Lossless(),
        Demand(need=Need.MASK, fn="hardtanh", detail={"min_val": 0, "max_val": 6}),
        delivers=inside(0, 6),
    ),
    Case("lossless bool", Lossless(), Demand(need=Need.MASK, fn="bool"), dtypes=(torch.bool,)),
)
