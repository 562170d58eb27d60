"""The contract of a codec: value <-> Packed, knowing what backward demands of the value and nothing of autograd."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from slimgrad.kernels import is_dense_layout
from slimgrad.spec import Need, Value


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What backward asks of a saved tensor; the default asks for the tensor itself."""

    need: Need = Need.EXACT
    fn: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    parameter: Tensor | None = None
    """The parameter whose copy this is, for WEIGHT."""
    zeros: bool = False
    """Whether exact zeros must stay zeros, and nothing else become one: a ReLU's mask is read off the same Packed."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Two demands on the same view with the same key are served by one Packed."""
        return self.need, self.fn, tuple(self.detail.items()), self.zeros


ITSELF = Demand()


class Layout(NamedTuple):
    """Shape, strides, dtype and device: all that is left of a tensor whose values are not kept."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        """The tensor's layout; where memory is shared or skipped, the dense layout nearest to it."""
        if tensor.is_contiguous():
            return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        return cls.near(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    @classmethod
    def near(cls, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Layout:
        """The dense layout nearest to this one; this one, if it is dense."""
        if not is_dense_layout(shape, stride):
            tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            stride = torch.empty_like(tensor).stride()
        return cls(shape, stride, dtype, device)

    def flat(self, tensor: Tensor) -> Tensor:
        """The elements in the order of this layout's memory, without a copy where the tensor has this layout."""
        if tensor.stride() != self.stride:
            tensor = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device).copy_(tensor)
        return tensor.as_strided((tensor.numel(),), (1,))

    def restore(self, flat: Tensor) -> Tensor:
        """The inverse of `flat`."""
        return flat.as_strided(self.shape, self.stride)

    def empty(self) -> Tensor:
        """A tensor of this layout with no defined values; no kernel runs."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(eq=False, slots=True)
class Packed:
    """What is kept instead of a tensor. Not frozen, because that would double the time it takes to make one."""

    layout: Layout
    demand: Demand
    payload: tuple[Tensor, ...] = ()
    extra: Any = None
    """What else the codec needs to unpack; no tensors."""
    unpacked: StorageWeakRef | None = None
    """The memory that was unpacked to last, for as long as somebody else holds it."""

    @property
    def nbytes(self) -> int:
        """Bytes really held: the payload's storages, each counted once."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in self.payload}
        return sum(storages.values())


@dataclass(frozen=True, kw_only=True, repr=False)
class Codec(Value, ABC):
    """One way to keep less. Frozen, validated on construction, written to JSON, usable by itself."""

    lossy: ClassVar[bool] = True
    """Whether unpack may give backward other values than stock autograd would."""
    elementwise: ClassVar[bool] = False
    """Whether shape and strides are nothing to it, so that one Packed serves every view of the same memory."""

    @abstractmethod
    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        """Whether this codec can deliver what is demanded of a tensor of this dtype."""

    @abstractmethod
    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        """Keep less of `tensor`; never aliases it, so that later in-place changes do no harm."""

    @abstractmethod
    def unpack(self, packed: Packed) -> Tensor:
        """A tensor of the packed one's shape, strides, dtype and device that delivers what was demanded."""

    @abstractmethod
    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        """Bytes that `pack` will hold, by arithmetic."""

    def joint(self, demands: Sequence[Demand]) -> Demand | None:
        """One demand whose Packed serves all of these, made of the same elements; None if there is none."""
        return None

    def needs_served(self) -> tuple[Need, ...]:
        """The needs this codec is for, for messages and documentation."""
        return tuple(need for need in Need if self.serves(Demand(need=need), torch.float32))
