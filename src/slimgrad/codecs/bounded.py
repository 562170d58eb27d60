"""Bounded: keep every value within a bound, in as many bits as that takes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling

from slimgrad import kernels
from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed, per_layout, values_and_masks
from slimgrad.codecs.selection import check_choice, check_flag
from slimgrad.errors import SavedTensorModifiedError, SpecError
from slimgrad.kernels import BoundedParts, Coding, Layout
from slimgrad.kernels.bounds import AUTO, MANTISSA, MOST_ELEMENTS, PREDICTIONS, WORD_BITS, Extent
from slimgrad.spec import Need

SERVED = (Need.OPERAND, Need.VALUES)
GUESSED_BITS = 4
"""For an element, before one is packed."""
GUESSED_STEPS = 0.4
"""The same where the bound is a part of the range: normal values take log2(0.4 / bound) bits, ReLU's outputs fewer."""
REMEMBERED = 16
"""Sizes of tensors of one layout, the largest of which the next one gets room for."""
HEADROOM = 1.125
SPARE_WORDS = 2048
TOO_MUCH = 1.5
"""Room, of what is used, from which on it is worth a copy to give some back."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Bounded(Codec):
    """Every value within `bound` of what it was, and zeros exactly; what is not finite is kept as it is.

    Values become multiples of twice the bound, and each chunk of 128 tells them in a code that gives small ones fewer
    bits than large ones, and zeros one. With `relative=True` the bound is that part of the tensor's range, as
    compressors of scientific data have it. `predict` tells the difference of each value to the one before: "lorenzo"
    wherever it can, "auto" where that promises to take less, chunk by chunk. `dither` rounds each element in a way of
    its own, so that errors of neighbours do not add up in a gradient; it takes 2 to 7 % more bytes.

    How many bytes that makes depends on the data; see NOTE [Sizes that the host does not know].
    """

    holds_values: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True
    sized: ClassVar[bool] = False

    bound: float = 0.01
    relative: bool = False
    predict: Literal["none", "lorenzo", "auto"] = AUTO  # type: ignore[assignment]
    dither: bool = False

    def __post_init__(self) -> None:
        number = isinstance(self.bound, (int, float)) and not isinstance(self.bound, bool)
        if not number or not 0 < self.bound < math.inf or not _below(self.bound) > 0:
            raise SpecError(f"Bounded: bound must be a positive number that float32 can hold, found {self.bound!r}")
        check_flag("Bounded", "relative", self.relative)
        check_flag("Bounded", "dither", self.dither)
        check_choice("Bounded", "predict", self.predict, PREDICTIONS)

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        return demand.need in SERVED and dtype in MANTISSA

    def joint(self, demands: Sequence[Demand]) -> Demand | None:
        """All values by one Packed; with a code of its own for zero, the mask of the ReLU that made them too."""
        return values_and_masks(demands, SERVED)

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        packed = self.start(tensor, demand)
        packed.settle()
        return packed

    def start(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        if is_compiling():
            raise SpecError(f"{self!r}: how many bytes it takes depends on the data, which torch.compile cannot follow")
        found = _treatment(tensor, self, demand.zeros)
        return found.packer.start(found.dense(tensor), demand)  # type: ignore[no-any-return]

    def unpack(self, packed: Packed) -> Tensor:
        packed.settle()
        packer: _Packer = packed.extra
        return kernels.unpack_bounded(BoundedParts(*packed.payload), packer.layout, packer.how)

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        """A guess."""
        n = math.prod(shape)
        bits = max(1.0, math.log2(GUESSED_STEPS / self.bound)) if self.relative else GUESSED_BITS
        return Extent(n, dtype.itemsize).nbytes(int(n * bits) // WORD_BITS)


class _Packer:
    """Tensors of one layout within one bound, and how much room the last of them took."""

    def __init__(self, layout: Layout, codec: Bounded, zeros: bool) -> None:
        n = math.prod(layout.shape)
        if n > MOST_ELEMENTS:
            raise SpecError(f"{codec!r}: expected at most {MOST_ELEMENTS} elements in a tensor, found {n}")
        self.layout = layout
        self.how = Coding(codec.predict, zeros, codec.dither)
        self.relative = codec.relative
        self.bound = torch.full((1,), _below(codec.bound), dtype=torch.float32, device=layout.device)
        self.sizes: deque[int] = deque(maxlen=REMEMBERED)
        self.misfits = 0
        """How often there was not enough room at first."""

    def start(self, x: Tensor, demand: Demand) -> Packed:
        bound = self.bound * spread(x) if self.relative else self.bound
        guesses = knows_later(x.device)
        capacity = self.capacity if guesses else None
        kept = kernels.pack_bounded(x, bound, self.how, capacity)
        packed = Packed(self.layout, demand, tuple(kept), self)
        if guesses:
            packed.pending = _Pending(x, kept, self)
            if capacity is None:
                packed.settle()
        return packed

    @property
    def capacity(self) -> int | None:
        """Words for the next tensor; None if nothing is known yet."""
        return int(max(self.sizes) * HEADROOM) + SPARE_WORDS if self.sizes else None


class _Pending:
    """A packed tensor of which the host does not know yet whether there was enough room for it.

    NOTE [Sizes that the host does not know]
    How many words a tensor takes is known to the device alone, and memory must be had before: to ask would make the
    host wait for all that it has launched. So a tensor gets as much room as the largest of the last ones took, and an
    eighth more; its size is sent to the host meanwhile, and until it arrives the tensor itself is held too. Two tensors
    later it has arrived, as a rule: the host then waits for work that is two layers old, and the device for nothing.
    If there was not enough room, the tensor is packed once more with what it takes. The first tensor of a layout gets
    room for anything, and the host waits for its size.
    """

    def __init__(self, x: Tensor, kept: BoundedParts, packer: _Packer) -> None:
        self.x = x.detach()
        self.version = x._version
        self.packer = packer
        self.event: torch.cuda.Event | None = None
        self.used = kept.places[-1:]
        if x.is_cuda:
            self.used = torch.empty(1, dtype=torch.int32, pin_memory=True).copy_(self.used, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(x.device))

    @property
    def ready(self) -> bool:
        return self.event is None or self.event.query()

    @property
    def nbytes(self) -> int:
        return self.x.untyped_storage().nbytes()

    def settled(self, payload: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """What is kept in the end."""
        if self.event is not None:
            self.event.synchronize()
        used, packer, kept = int(self.used), self.packer, BoundedParts(*payload)
        packer.sizes.append(used)
        if used > len(kept.words):
            packer.misfits += 1
            if self.x._version != self.version:
                raise SavedTensorModifiedError(
                    f"a {self.x.dtype} tensor of shape {list(self.x.shape)} was changed in place while it was packed, "
                    f"and took more room than the last ones: {used} words instead of {len(kept.words)}. Exempt its "
                    "module with a Rule(..., Keep())."
                )
            return tuple(kernels.pack_bounded(self.x, kept.bound, packer.how, used))
        if len(kept.words) > TOO_MUCH * (used + SPARE_WORDS):
            return (kept.words[:used].clone(), *kept[1:])
        return payload


_treatment = per_layout(_Packer)


def knows_later(device: torch.device) -> bool:
    """Whether sizes are known on the device before they are known here."""
    return device.type == "cuda"


def spread(x: Tensor) -> Tensor:
    """The range of a tensor's values, as [1]; 0 if it has none, or one that is not finite."""
    if not x.numel():
        return torch.zeros(1, device=x.device)
    low, high = x.detach().aminmax()
    return (high.float() - low.float()).nan_to_num(0, 0, 0).view(1)


def _below(bound: float) -> float:
    """The largest float32 that is no larger."""
    found = torch.tensor(bound, dtype=torch.float32)
    return float(found if float(found) <= bound else torch.nextafter(found, torch.zeros(())))
