"""The contract of a codec: value <-> Packed, knowing what backward demands of the value and nothing of autograd."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from slimgrad.kernels import Layout
from slimgrad.spec import Need, Value


class Derivation(Protocol):
    """How one site's tensor is made again in backward; runtime knows them."""

    def open_ways(self, *, products: bool) -> Sequence[Any]:
        """Those that are not known to fail; with products of matrices among what runs again, or without."""

    @property
    def exact(self) -> bool:
        """Whether what it is made of is kept exactly."""

    def comes_out(self, tensor: Tensor) -> bool:
        """Whether making it again gives the same bits; if not, that way is not tried again."""

    def handle(self, tensor: Tensor) -> Any:
        """What to hold instead of the tensor."""

    def again(self, packed: Packed) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What backward asks of a saved tensor; the default asks for the tensor itself."""

    need: Need = Need.EXACT
    fn: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    parameter: Tensor | None = None
    """The parameter whose copy this is, for WEIGHT."""
    derivation: Derivation | None = None
    """How the tensor can be made again from what others keep."""
    zeros: bool = False
    """Whether exact zeros must stay zeros, and nothing else become one: a ReLU's mask is read off the same Packed."""

    @property
    def key(self) -> tuple[Any, ...]:
        """Two demands on the same view with the same key are served by one Packed."""
        return self.need, self.fn, tuple(self.detail.items()), self.zeros


ITSELF = Demand()


def values_and_masks(demands: Sequence[Demand], served: Sequence[Need]) -> Demand | None:
    """One demand for all, where each is for values of these needs or for the mask of the ReLU that made them."""
    values = [demand.need for demand in demands if demand.need in served]
    masks = [demand for demand in demands if demand.need is Need.MASK and demand.fn == "relu"]
    if not values or len(values) + len(masks) < len(demands):
        return None
    return Demand(need=max(values, key=lambda need: need.rank), zeros=bool(masks))


class Treatment(NamedTuple):
    """How tensors of one layout are treated. Found once per layout: that takes longer than a kernel's launch."""

    layout: Layout
    has_gaps: bool
    """Whether the tensors are not in `layout` themselves, and must be copied into it."""
    packer: Any
    """What `make` of `per_layout` gave: for codecs a Packer."""

    def dense(self, tensor: Tensor) -> Tensor:
        """The tensor in this layout."""
        return self.layout.dense(tensor) if self.has_gaps else tensor

    def pack(self, tensor: Tensor, demand: Demand) -> Packed:
        return Packed(self.layout, demand, (self.packer.pack(self.dense(tensor)),), self.packer)

    @staticmethod
    def unpack(packed: Packed) -> Tensor:
        return packed.extra.unpack(packed.payload[0])  # type: ignore[no-any-return]


def per_layout(make: Callable[..., Any]) -> Callable[..., Treatment]:
    """From `make(layout, *what)` to `find(tensor, *what)`: the treatment of tensors of this layout, remembered.

    Not while a compiler looks: it would warn of the memory, and needs none.
    """

    def treatment(
        shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device, *what: Any
    ) -> Treatment:
        layout = Layout.near(shape, stride, dtype, device)
        return Treatment(layout, layout.stride != stride, make(layout, *what))

    known = lru_cache(maxsize=4096)(treatment)

    def find(tensor: Tensor, *what: Any) -> Treatment:
        found = treatment if is_compiling() else known
        return found(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, *what)

    return find


class Pending(Protocol):
    """Of a Packed that is not complete yet."""

    @property
    def ready(self) -> bool:
        """Whether nobody has to wait."""

    @property
    def nbytes(self) -> int:
        """Bytes held until then."""

    def settled(self, payload: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The complete payload."""


@dataclass(eq=False, slots=True)
class Packed:
    """What is kept instead of a tensor. Not frozen, because that would double the time it takes to make one."""

    layout: Layout
    demand: Demand
    payload: tuple[Tensor, ...] = ()
    extra: Any = None
    """What else the codec needs to unpack; no tensors."""
    pending: Pending | None = None
    """What holds the tensor itself until it is known whether the payload is complete."""

    @property
    def nbytes(self) -> int:
        """Bytes really held: the payload's storages, each counted once."""
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in self.payload}
        return sum(storages.values()) + (0 if self.pending is None else self.pending.nbytes)

    def settle(self) -> None:
        """Wait until the payload is complete, and hold nothing else from then on."""
        if self.pending is not None:
            self.payload = self.pending.settled(self.payload)
            self.pending = None


@dataclass(frozen=True, kw_only=True, repr=False)
class Codec(Value, ABC):
    """One way to keep less. Frozen, validated on construction, written to JSON, usable by itself."""

    lossy: ClassVar[bool] = True
    """Whether unpack may give backward other values than stock autograd would."""
    holds_values: ClassVar[bool] = False
    """Whether what it unpacks stands for the values themselves, whoever reads them."""
    elementwise: ClassVar[bool] = False
    """Whether shape and strides are nothing to it, so that one Packed serves every view of the same memory."""
    whole: ClassVar[bool] = True
    """Whether one Packed may hold a whole storage for views with gaps that fill it together."""
    sized: ClassVar[bool] = True
    """Whether bytes follow from shape and dtype; if not, `promised` is a guess."""
    device_wanted: ClassVar[str | None] = None
    """The only type of device on which it frees anything; None if it does on all."""

    @abstractmethod
    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        """Whether this codec can deliver what is demanded of a tensor of this dtype."""

    def works_on(self, device: torch.device) -> bool:
        return self.device_wanted in (None, device.type)

    @abstractmethod
    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        """Keep less of `tensor`; never aliases it, so that later in-place changes do no harm."""

    def start(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        """The same, but the Packed may be pending: whoever asks settles it."""
        return self.pack(tensor, demand)

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
