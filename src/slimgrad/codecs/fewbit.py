"""FewBit: keep which of a few intervals x lies in; backward then sees the best few-valued approximation of f'.

What is unpacked is not x but a representative of its interval: an x whose slope f'(x) is the level of the interval. So
the stock backward node computes level * dY by itself, and any call of f anywhere is served.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from slimgrad import kernels
from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed, Recipe
from slimgrad.errors import SpecError
from slimgrad.kernels import Buckets, Layout
from slimgrad.kernels.codes import code_bytes
from slimgrad.spec import Need
from slimgrad.spec.values import tuples
from slimgrad.tables import FAMILIES, Table, fewbit_table
from slimgrad.tables.functions import named
from slimgrad.tables.question import WEIGHTS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
RESULT = "result"
"""The detail `saved` of a demand where the node keeps f(x) instead of x."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FewBit(Codec):
    """The derivative of a pointwise nonlinearity in 1 to 8 bits per element; forward stays exact.

    `interval` and `weight` are those of `fewbit_table`, which solves for the best levels.
    """

    elementwise: ClassVar[bool] = True

    bits: int = 3
    interval: tuple[float, float] = (-10.0, 10.0)
    weight: Literal["uniform", "normal"] = "uniform"

    def __post_init__(self) -> None:
        object.__setattr__(self, "interval", tuples(list(self.interval)))
        if type(self.bits) is not int or not 1 <= self.bits <= 8:
            raise SpecError(f"FewBit: bits must be an integer from 1 to 8, found {self.bits!r}")
        if len(self.interval) != 2 or not -math.inf < self.interval[0] < self.interval[1] < math.inf:
            raise SpecError(f"FewBit: interval must be (low, high) with low < high, found {self.interval!r}")
        if self.weight not in WEIGHTS:
            raise SpecError(f"FewBit: weight must be one of {', '.join(WEIGHTS)}, found {self.weight!r}")

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        """Every named function whose jumps the intervals can keep apart."""
        if demand.need is not Need.DERIVATIVE or dtype not in DTYPES:
            return False
        if demand.fn is None:  # asked in general
            return True
        if demand.fn not in FAMILIES:
            return False
        low, high = self.interval
        jumps = named(demand.fn, _parameters(demand.detail)).jumps or ()
        return len([jump for jump in jumps if low < jump < high]) < 1 << self.bits

    def table(self, fn: str, **parameters: Any) -> Table:
        """The table that serves a function."""
        return fewbit_table(fn, self.bits, self.interval, self.weight, continuous=True, **parameters)

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        found = _recipe if is_compiling() else _known_recipe
        what = (self, demand.fn, tuple(demand.detail.items()))
        return found(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *what).pack(tensor, demand)

    def unpack(self, packed: Packed) -> Tensor:
        return packed.extra.unpack(packed.payload[0])  # type: ignore[no-any-return]

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        return code_bytes(math.prod(shape), self.bits)


def _parameters(detail: Any) -> dict[str, Any]:
    return {key: value for key, value in dict(detail).items() if key != "saved"}


def _recipe(
    shape: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    codec: FewBit,
    fn: str | None,
    detail: tuple[tuple[str, Any], ...],
) -> Recipe:
    if fn is None or not codec.serves(Demand(need=Need.DERIVATIVE, fn=fn, detail=dict(detail)), dtype):
        raise SpecError(
            f"{codec!r} cannot serve {fn} in {dtype}: it keeps derivatives of {', '.join(FAMILIES)}, and needs more "
            "intervals than the derivative has jumps"
        )
    layout = Layout.near(shape, stride, dtype, device)
    return Recipe(layout, layout.stride != stride, kernels.code_packer(layout, buckets_for(codec, fn, detail)))


_known_recipe = lru_cache(maxsize=4096)(_recipe)


@lru_cache(maxsize=1024)
def buckets_for(codec: FewBit, fn: str, detail: tuple[tuple[str, Any], ...]) -> Buckets:
    """The table of the function, for what its node keeps: x, or f(x), which rises with x."""
    parameters = _parameters(detail)
    table = codec.table(fn, **parameters)
    if dict(detail).get("saved") != RESULT:
        return Buckets(table.borders, table.representatives, 0.0, table.even)
    f = named(fn, parameters).f
    borders, values, zero = (
        f(torch.tensor(x, dtype=torch.float64)).tolist() for x in (table.borders, table.representatives, (0.0,))
    )
    centre = zero[0] if table.even else 0.0
    return Buckets(tuple(border - centre for border in borders), tuple(values), centre, table.even)
