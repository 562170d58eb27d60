"""TopK: keep a few elements, usually the largest, and where they were; the others become zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.codecs import selection
from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed, per_layout
from slimgrad.errors import SpecError
from slimgrad.kernels import Groups, Layout, Picker, Picks
from slimgrad.kernels.groups import DTYPES as QUANTIZED
from slimgrad.spec import Need

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
GROUPS = Groups(bits=8, group=128)
"""How values are held in 8 bits."""
SAME: Literal["same"] = "same"


@dataclass(frozen=True, kw_only=True, repr=False)
class TopK(Codec):
    """The part `keep` of all elements: ceil(keep * n) of n, in all, of each sample or of each row.

    A sample is what the first dimension counts, a row what the last one holds. `values=8` holds what is kept in 8 bits
    instead of the tensor's own dtype. `signs=True` keeps a bit of every other element too: it is put back with its sign
    and the mean magnitude of its neighbours, instead of as zero. `select` is for studies: "random" elements, scaled so
    that sums are right on average, or whole "channels" (those with the largest norm; the second dimension of 4 or more,
    else the last).
    """

    keep: float = 0.1
    scope: Literal["tensor", "sample", "row"] = "tensor"
    values: Literal["same", 8] = SAME
    select: Literal["largest", "random", "channels"] = "largest"
    signs: bool = False

    elementwise: ClassVar[bool] = False

    def __post_init__(self) -> None:
        selection.check_part("TopK", self.keep)
        selection.check_choice("TopK", "scope", self.scope, selection.SCOPES)
        if self.values not in (SAME, 8):
            raise SpecError(f"TopK: values must be 'same' or 8, found {self.values!r}")
        selection.check_choice("TopK", "select", self.select, selection.SELECTIONS)
        if self.select == "channels" and self.scope != "tensor":
            raise SpecError("TopK: channels are selected for the whole tensor; leave scope as it is")
        selection.check_flag("TopK", "signs", self.signs)
        if self.signs and (self.scope, self.select) != ("tensor", "largest"):
            raise SpecError("TopK: signs go with the largest elements of a whole tensor; leave scope and select alone")
        # Where all elements compete, shape and strides do not matter.
        object.__setattr__(self, "elementwise", self.scope == "tensor" and self.select != "channels")

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        return demand.need is Need.OPERAND and dtype in (DTYPES if self.values == SAME else QUANTIZED)

    def joint(self, demands: Sequence[Demand]) -> Demand | None:
        """Products that read the same elements share them."""
        return demands[0] if all(demand.need is Need.OPERAND for demand in demands) else None

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        found = _treatment(tensor, self)
        return Packed(found.layout, demand, found.packer.pick(found.dense(tensor)), found.packer)

    def unpack(self, packed: Packed) -> Tensor:
        return packed.extra.put_back(*packed.payload)  # type: ignore[no-any-return]

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        picks = self.picks(shape)
        held = picks.k * dtype.itemsize if self.values == SAME else GROUPS.nbytes(picks.k)
        return held + picks.nbytes + picks.sign_bytes(dtype.itemsize)

    def picks(self, shape: Sequence[int]) -> Picks:
        """How many elements are kept of a tensor of this shape, and how their places are written."""
        return Picks.of(math.prod(shape), selection.count(shape, self.keep, self.scope, self.select), self.signs)


class Selected(NamedTuple):
    """Picks by a rule for which there is no kernel: torch finds the elements, and the kernels' format holds them."""

    codec: TopK
    layout: Layout
    picks: Picks
    back: Picker

    def pick(self, x: Tensor) -> tuple[Tensor, Tensor]:
        codec, picks = self.codec, self.picks
        picked = selection.picked(x.detach(), codec.keep, codec.scope, codec.select)
        flat = x.detach().as_strided((picks.n,), (1,))
        # From the order of dimensions to the order of memory.
        in_memory = self.layout._replace(dtype=torch.bool).empty().copy_(picked).as_strided((picks.n,), (1,))
        values, places = kernels.pick(flat, in_memory, picks)
        return (values * (picks.n / picks.k) if codec.select == "random" and picks.k else values), places

    def put_back(self, values: Tensor, places: Tensor) -> Tensor:
        return self.back.put_back(values, places)


class Coarse(NamedTuple):
    """Holds the picked values in 8 bits."""

    picker: Any
    groups: kernels.Packer

    def pick(self, x: Tensor) -> tuple[Tensor, ...]:
        values, *others = self.picker.pick(x)
        return self.groups.pack(values), *others

    def put_back(self, values: Tensor, *others: Tensor) -> Tensor:
        return self.picker.put_back(self.groups.unpack(values), *others)  # type: ignore[no-any-return]


@per_layout
def _treatment(layout: Layout, codec: TopK) -> Any:
    picks = codec.picks(layout.shape)
    found: Any = kernels.picker(layout, picks)
    if codec.select != "largest" or codec.scope != "tensor":
        found = Selected(codec, layout, picks, found)
    if codec.values == SAME:
        return found
    flat = Layout(torch.Size([picks.k]), (1,), layout.dtype, layout.device)
    return Coarse(found, kernels.group_packer(flat, GROUPS))
