"""Few-bit backward (Novikov et al., ICML 2023): every pointwise nonlinearity keeps a few bits per element."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from slimgrad.codecs import FewBit, Lossless
from slimgrad.rules import Rule


def fewbit(
    bits: int = 3,
    *,
    layers: Mapping[str, int] | None = None,
    interval: tuple[float, float] = (-10.0, 10.0),
    weight: Literal["uniform", "normal", "data"] = "uniform",
    fused: bool = True,
) -> tuple[Rule, ...]:
    """Rules for all nonlinearities of a model; the ReLUs and their like keep one exact bit.

    `layers` gives some of them other bits: {"encoder.layer.0.*": 4}. The other settings are those of `FewBit`. What
    shall happen to all the rest may follow: `[*sg.fewbit(bits=3), sg.Rule("*", sg.Quant(bits=4))]`.
    """
    places = {**(layers or {}), "*": bits}
    codecs = {where: FewBit(bits=some, interval=interval, weight=weight, fused=fused) for where, some in places.items()}
    return (*(Rule(where, codec) for where, codec in codecs.items()), Rule("*", Lossless()))
