"""FewBit: keep which of a few intervals x lies in; backward then sees the best few-valued approximation of f'.

What is unpacked is not x but a representative of its interval: an x whose slope f'(x) is the level of the interval. So
the stock backward node computes level * dY by itself, and any call of f anywhere is served. Modules that are one such
function are computed by a fused op instead (ops/modules.py), which is faster.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed, Treatment, per_layout
from slimgrad.codecs.selection import check_flag
from slimgrad.errors import SpecError
from slimgrad.kernels import Buckets, Layout
from slimgrad.kernels.codes import code_bytes
from slimgrad.spec import Need
from slimgrad.tables import FAMILIES, Table, fewbit_table
from slimgrad.tables.functions import named
from slimgrad.tables.question import WEIGHTS, asked, check_bits, checked_interval

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DATA = "data"
RESULT = "result"
"""The detail `saved` of a demand where the node keeps f(x) instead of x."""


@dataclass(frozen=True, kw_only=True, repr=False)
class FewBit(Codec):
    """The derivative of a pointwise nonlinearity in 1 to 8 bits per element; forward stays exact.

    `interval` and `weight` are those of `fewbit_table`, which solves for the best levels. With `weight="data"`, each
    module that is computed by a fused op gets a table for the inputs it met in its first forward. `fused=False` leaves
    the forward to torch's own kernels, bit for bit.
    """

    elementwise: ClassVar[bool] = True

    bits: int = 3
    interval: tuple[float, float] = (-10.0, 10.0)
    weight: Literal["uniform", "normal", "data"] = "uniform"
    fused: bool = True

    def __post_init__(self) -> None:
        check_bits("FewBit", self.bits)
        object.__setattr__(self, "interval", checked_interval("FewBit", self.interval))  # JSON has lists
        if self.weight not in (*WEIGHTS, DATA):
            raise SpecError(f"FewBit: weight must be one of {', '.join((*WEIGHTS, DATA))}, found {self.weight!r}")
        check_flag("FewBit", "fused", self.fused)

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        """Every named function whose jumps the intervals can keep apart."""
        if demand.need is not Need.DERIVATIVE or dtype not in DTYPES:
            return False
        if demand.fn is None:  # asked in general
            return True
        try:
            asked(demand.fn, self.bits, self.interval, self.known_weight, None, True, _parameters(demand.detail))
        except SpecError:  # no such function, or more jumps than borders
            return False
        return True

    @property
    def known_weight(self) -> str:
        """The weight where no data is looked at."""
        return "uniform" if self.weight == DATA else self.weight

    def table(self, fn: str, **parameters: Any) -> Table:
        """The table that serves a function."""
        return fewbit_table(fn, self.bits, self.interval, self.known_weight, continuous=True, **parameters)

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        return _treatment(tensor, self, demand.fn, tuple(demand.detail.items())).pack(tensor, demand)

    def unpack(self, packed: Packed) -> Tensor:
        return Treatment.unpack(packed)

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        return code_bytes(math.prod(shape), self.bits)


def _parameters(detail: Any) -> dict[str, Any]:
    return {key: value for key, value in dict(detail).items() if key != "saved"}


@per_layout
def _treatment(layout: Layout, codec: FewBit, fn: str | None, detail: tuple[tuple[str, Any], ...]) -> kernels.Packer:
    if fn is None or not codec.serves(Demand(need=Need.DERIVATIVE, fn=fn, detail=dict(detail)), layout.dtype):
        raise SpecError(
            f"{codec!r} cannot serve {fn} in {layout.dtype}: it keeps derivatives of {', '.join(FAMILIES)}, and needs "
            "more intervals than the derivative has jumps"
        )
    return kernels.code_packer(layout, buckets_for(codec, fn, detail))


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
