"""The functions whose backward reads one bit per element: which bit, and two values that stand for it.

Each entry says for which x stock backward lets the gradient pass, and gives a value `on` inside and a value `off`
outside that set; handing those to the stock backward node gives the same gradient bit for bit. NaN follows stock
backward too: ReLU tests `x <= 0`, which NaN fails, so the gradient passes; LeakyReLU tests `x > 0`, so it does not.
Hardtanh and the shrinks let NaN pass as CUDA does; on a CPU stock torch itself blocks it in vectors, not in their tail.

The bounds must be exact in the tensor's dtype: kernels differ in whether they compare in it or in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slimgrad.kernels import Interval

INF = float("inf")


@dataclass(frozen=True)
class Bit:
    """One bit of x, and the values that stand for it."""

    rule: Interval
    on: float
    off: float


def above(bound: float, *, nan: bool) -> Bit:
    """The gradient passes where x > bound."""
    return Bit(Interval(lo=-INF, hi=bound, closed=True, outside=True, nan=nan), on=INF, off=-INF)


def between(low: float, high: float, *, nan: bool) -> Bit | None:
    """The gradient passes where low < x < high."""
    if not low < high or not -INF < (low + high) / 2 < INF:
        return None
    return Bit(Interval(lo=low, hi=high, closed=False, outside=False, nan=nan), on=(low + high) / 2, off=high)


def within(low: float, high: float) -> Bit | None:
    """The gradient passes where low <= x <= high; never for NaN."""
    if not low <= high or (low == -INF and high == INF):
        return None
    inside = low if low > -INF else high
    outside = INF if high < INF else -INF
    return Bit(Interval(lo=low, hi=high, closed=True, outside=False, nan=False), on=inside, off=outside)


def beyond(bound: float) -> Bit | None:
    """The gradient passes where |x| > bound."""
    if not 0 <= bound < INF:
        return None
    return Bit(Interval(lo=-bound, hi=bound, closed=True, outside=True, nan=True), on=INF, off=0.0)


def _clamp(detail: Mapping[str, Any]) -> Bit | None:
    low, high = detail.get("min"), detail.get("max")
    return within(-INF if low is None else low, INF if high is None else high)


NON_ZERO = Bit(Interval(lo=0.0, hi=0.0, closed=True, outside=True, nan=True), on=1.0, off=0.0)

MASKS: dict[str, Callable[[Mapping[str, Any]], Bit | None]] = {
    "relu": lambda detail: above(0.0, nan=True),
    "leaky_relu": lambda detail: above(0.0, nan=False),
    "threshold": lambda detail: above(detail["threshold"], nan=True),
    "hardtanh": lambda detail: between(detail["min_val"], detail["max_val"], nan=True),
    "hardsigmoid": lambda detail: between(-3.0, 3.0, nan=False),
    "shrink": lambda detail: beyond(detail["lambd"]),
    "clamp": _clamp,
    "bool": lambda detail: NON_ZERO,
    "dropout": lambda detail: NON_ZERO,
}
"""`dropout` is the CPU's float mask of zeros and 1/(1-p); its `on` value is read off the mask itself."""


def bit_of(fn: str | None, detail: Mapping[str, Any], dtype: torch.dtype) -> Bit | None:
    """The bit that serves `fn` on tensors of `dtype`, or None where one bit cannot be exact."""
    if fn not in MASKS or (dtype == torch.bool) != (fn == "bool") or not (dtype.is_floating_point or fn == "bool"):
        return None
    bit = MASKS[fn](detail)
    if bit is None or not all(_exact(value, dtype) for value in (bit.rule.lo, bit.rule.hi, bit.on, bit.off)):
        return None
    return bit


def _exact(value: float, dtype: torch.dtype) -> bool:
    if dtype == torch.bool:
        return True
    return all(float(torch.tensor(value, dtype=kind)) == value for kind in (dtype, torch.float32))
