"""A device whose copies run beside what it computes, on a CPU: a stand-in for `torch.cuda` that shows who did not wait.

What computes runs at once, as CPUs do. Copies run as late as they may ("slow": when somebody waits for them) or as soon
as they may ("fast"). A copy into memory which is gone by then, as an allocator could have given it to somebody else, is
an error, and so is one from such memory, unless nobody can read what it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

Link = Literal["slow", "fast"]


class Event:
    def __init__(self, stream: Stream, place: int) -> None:
        self._stream, self._place = stream, place

    def query(self) -> bool:
        return self._stream.done >= self._place

    def happen(self) -> None:
        self._stream.run_until(self._place)


class Stream:
    """Work that is waiting, in order."""

    def __init__(self, link: Link = "slow", *, leaves: bool = False) -> None:
        self._link = link
        self.leaves = leaves
        """Whether its copies go to the host."""
        self.has_waited = False
        """Whether it waited for the computing stream since its last copy."""
        self._work: list[Callable[[], None]] = []
        self.done = 0

    def add(self, work: Callable[[], None]) -> None:
        self._work.append(work)
        if self._link == "fast":
            self.run_until(len(self._work))

    def run_until(self, place: int) -> None:
        while self.done < place:
            self._work[self.done]()
            self.done += 1

    def record_event(self) -> Event:
        return Event(self, len(self._work))

    def wait_event(self, event: Event) -> None:
        self.add(event.happen)

    def wait_stream(self, other: Stream) -> None:
        self.has_waited = self.has_waited or isinstance(other, Computing)
        self.wait_event(other.record_event())


class Computing(Stream):
    """The stream that is never behind."""

    def wait_event(self, event: Event) -> None:
        event.happen()


class Copies(TorchFunctionMode):
    """Puts copies on a stream instead of making them, without holding what they copy."""

    def __init__(self, stream: Stream, made: list[int]) -> None:
        super().__init__()
        self._stream, self._made = stream, made

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.copy_:
            return func(*args, **(kwargs or {}))
        to, source = args
        assert self._stream.has_waited, "a copy must wait for what was computed before"
        self._stream.has_waited = False
        parts = [(StorageWeakRef(t.untyped_storage()), t.dtype, t.storage_offset(), t.shape, t.stride()) for t in args]
        self._made.append(source.nbytes)

        def copy() -> None:
            to, source = (_again(*part) for part in parts)
            if to is None and self._stream.leaves:
                return  # nobody has the copy any more
            assert to is not None and source is not None, "a copy ran on memory that had been given back"
            with torch.utils._python_dispatch._disable_current_modes():
                to.copy_(source)

        self._stream.add(copy)
        return to


def _again(storage: StorageWeakRef, dtype: torch.dtype, offset: int, shape: Any, stride: Any) -> Tensor | None:
    memory = torch.UntypedStorage._new_with_weak_ptr(storage.cdata)
    return None if memory is None else torch.empty(0, dtype=dtype).set_(memory, offset, shape, stride)


class SimulatedCuda:
    """What a Lane asks of `torch.cuda`."""

    def __init__(self, link: Link) -> None:
        self.link: Link = link
        self._computing = Computing()
        self.copied: list[int] = []
        """Bytes of each copy, in the order in which they were asked for."""
        self.streams: list[Stream] = []

    def Stream(self, device: Any) -> Stream:  # noqa: N802 - as torch calls it
        self.streams.append(Stream(self.link, leaves=len(self.streams) % 2 == 0))
        return self.streams[-1]

    def current_stream(self, device: Any) -> Stream:
        return self._computing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        with Copies(stream, self.copied):
            yield
