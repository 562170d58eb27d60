"""Copies between a device and pinned memory of its host, which run while the device computes.

NOTE [Who waits for whom]
Three streams of one device: the one that computes, one for what leaves, one for what comes back (the link carries both
at once). The host waits for none of them.

- What leaves is copied once the computing stream has made it. The device's memory is held until that is done: whoever
  lets go of it has the computing stream wait for the copy first, so that nothing is written there before.
- What comes back is allocated from the computing stream's memory, which kernels launched before may still be using: the
  copy waits for these. The computing stream waits for the copy before it reads; and also where nobody has read it in
  the end, because its memory goes back to that stream.
- Host memory that is let go of while a copy reads or writes it is no danger: torch's allocator of pinned memory
  remembers which streams have used a block.
"""

from __future__ import annotations

import weakref
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slimgrad.errors import SavedTensorModifiedError

AHEAD = 2
"""Tensors on their way back before they are asked for: with one, the link rests whenever a product is short."""


class Copying(NamedTuple):
    """A tensor on the device that is being copied, from or to it."""

    tensor: Tensor
    done: Any
    """The event after the copy."""


class Lane:
    """The two streams of one device, and what was sent last."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device = device
        self._cuda = cuda
        self._leaving, self._returning = cuda.Stream(device), cuda.Stream(device)
        self._last: weakref.ref[Parcel] | None = None

    def send(self, x: Tensor) -> Parcel:
        """Begin to copy a contiguous tensor to the host."""
        parcel = Parcel(self, x, self._last)
        self._last = weakref.ref(parcel)
        return parcel

    def leave(self, x: Tensor) -> tuple[Tensor, Copying]:
        host = torch.empty(x.shape, dtype=x.dtype, pin_memory=self.device.type == "cuda")
        return host, Copying(x, self._copy(host, x, self._leaving))

    def come_back(self, host: Tensor) -> Copying:
        x = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        return Copying(x, self._copy(x, host, self._returning))

    def wait(self, done: Any) -> None:
        """Have the device compute no further until then."""
        self._cuda.current_stream(self.device).wait_event(done)

    def _copy(self, to: Tensor, source: Tensor, stream: Any) -> Any:
        stream.wait_stream(self._cuda.current_stream(self.device))
        with self._cuda.stream(stream):
            to.copy_(source, non_blocking=True)
            return stream.record_event()


lane_of = lru_cache(maxsize=None)(Lane)
"""The lane of a device, which all models share, as they share the link."""


class Parcel:
    """One tensor on the host; until the copy has arrived, the tensor itself too (codecs.base.Pending).

    Backward asks for what was sent last first, so that asking for one has those sent before it come back meanwhile.
    """

    def __init__(self, lane: Lane, x: Tensor, previous: weakref.ref[Parcel] | None) -> None:
        self._lane = lane
        self._previous = previous
        self._version = x._version
        self._leaving: Copying | None
        self._host, self._leaving = lane.leave(x)
        self._returning: Copying | None = None

    # --- while it leaves ---

    @property
    def ready(self) -> bool:
        return self._leaving is None or bool(self._leaving.done.query())

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 0 if self._leaving is None else self._leaving.tensor.untyped_storage().nbytes()

    def settled(self, payload: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """From now on it is on the host alone."""
        if self._leaving is not None:
            self._check(self._leaving.tensor)
            self._lane.wait(self._leaving.done)
            self._leaving = None
        return payload

    def _check(self, x: Tensor) -> None:
        if x._version != self._version:
            raise SavedTensorModifiedError(
                f"a {x.dtype} tensor of {x.numel()} elements was changed in place while it was copied to the host: it "
                f"is at version {x._version}; expected version {self._version}. Autograd refuses that too: exempt its "
                "module with Rule(..., Keep()) to see where"
            )

    # --- when it is asked for ---

    def open(self) -> Tensor:
        """The tensor on the device, in memory of its own."""
        if self._leaving is not None and not self._leaving.tensor.storage_offset():
            self._check(self._leaving.tensor)
            found = self._leaving.tensor  # the last few never need to come back
        else:
            self.hurry()
            assert self._returning is not None
            (found, done), self._returning = self._returning, None
            self._lane.wait(done)
        self._hurry_others()
        return found

    def hurry(self) -> None:
        """Let it come back, if it is not here or on its way."""
        if self._returning is None:
            self.settled(())
            self._returning = self._lane.come_back(self._host)

    def _hurry_others(self) -> None:
        before = self._before()
        for _ in range(AHEAD):
            if before is None:
                return
            if before._leaving is None:
                before.hurry()
            before = before._before()

    def _before(self) -> Parcel | None:
        return None if self._previous is None else self._previous()

    def __del__(self) -> None:
        returning = getattr(self, "_returning", None)
        if returning is not None:  # nobody asked after all
            self._lane.wait(returning.done)
