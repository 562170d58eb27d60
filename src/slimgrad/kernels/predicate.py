"""What one bit per element says, and the checks that both twins make before they read memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slimgrad.errors import SpecError


@dataclass(frozen=True)
class Interval:
    """The predicate of one bit: is x in the interval (or, with `outside`, is it not); NaN has a bit of its own.

    The bounds must be exact in the tensor's dtype and in float32, so that every precision compares alike. ReLU's
    backward lets the gradient pass unless x <= 0, for x = +inf and NaN too: Interval(-inf, 0.0, True, True, True).
    """

    lo: float
    hi: float
    closed: bool
    """lo <= x <= hi, else lo < x < hi."""
    outside: bool
    """The bit is set outside the interval instead of inside."""
    nan: bool
    """The bit of a NaN."""

    def __post_init__(self) -> None:
        if math.isnan(self.lo) or math.isnan(self.hi):
            raise SpecError(f"Interval: the bounds must be numbers, found lo={self.lo}, hi={self.hi}")
        # A Triton kernel is compiled for the kind of number it is given, and a module's bounds may be integers.
        object.__setattr__(self, "lo", float(self.lo))
        object.__setattr__(self, "hi", float(self.hi))


def byte_count(n: int) -> int:
    """Bytes that hold n bits."""
    return (n + 7) // 8


def check_flat(x: Tensor) -> None:
    if x.dim() != 1 or not x.is_contiguous() or x.is_complex():
        raise SpecError(
            f"pack_bits: expected a real, contiguous 1-D tensor, found {x.dtype}, shape {tuple(x.shape)}, "
            f"strides {x.stride()}; flatten it first"
        )


def check_bits(bits: Tensor, n: int) -> None:
    if bits.dtype != torch.uint8 or bits.shape != (byte_count(n),) or not bits.is_contiguous():
        raise SpecError(
            f"unpack_bits: expected {byte_count(n)} contiguous bytes (uint8) for {n} bits, "
            f"found {bits.dtype}, shape {tuple(bits.shape)}"
        )
