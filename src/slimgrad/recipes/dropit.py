"""DropIT (Chen et al., ICLR 2023): products keep only the largest elements of what they multiply with their weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from slimgrad.codecs import Codec, TopK
from slimgrad.recipes.pruning import Pruning, shared_settings


@dataclass(frozen=True, kw_only=True, repr=False)
class DropIT(Pruning):
    """The recipe that `dropit` makes."""

    called: ClassVar[str] = "dropit"

    scope: Literal["tensor", "sample", "row"] = "tensor"
    values: Literal["same", 8] = "same"
    select: Literal["largest", "random", "channels"] = "largest"
    signs: bool = False

    def codec(self, part: float) -> Codec:
        return TopK(keep=part, scope=self.scope, values=self.values, select=self.select, signs=self.signs)


def dropit(
    keep: float | Mapping[int, float] = 0.1,
    skip: Iterable[str] = ("first", "head"),
    rest: Codec | None = None,
    *,
    layers: Mapping[str, float] | None = None,
    scope: Literal["tensor", "sample", "row"] = "tensor",
    values: Literal["same", 8] = "same",
    select: Literal["largest", "random", "channels"] = "largest",
    signs: bool = False,
) -> DropIT:
    """Linear layers and convolutions keep the part `keep` of their inputs' elements, the largest ones.

    Forward is exact, and so is the gradient that flows on; the gradients of weights see the others as zeros. `keep` may
    be a schedule, {0: 1.0, 500: 0.5, 1000: 0.1}, and `layers` gives some layers a part of their own. As in the paper,
    the "first" layer and the "head" are left out; `skip` may name others. `rest` treats everything else: attention,
    norms and what they share with products; what can be kept exactly in less is, in any case. The other settings are
    those of `TopK`.
    """
    shared = shared_settings(keep, skip, rest, layers)
    return DropIT(**shared, scope=scope, values=values, select=select, signs=signs)
