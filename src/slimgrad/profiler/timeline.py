"""timeline: one step of forward and backward on fake tensors, with the bytes that are alive at each operator.

NOTE [A step in which autograd keeps nothing]
Saved tensors are dropped by hooks, so that a storage dies when forward itself lets go of it, and backward is handed
stand-ins, which are born when they are read. What is not autograd's own (parameters, buffers, inputs) is handed
through, and so is what is saved and let go of again within the forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import saved_tensors_hooks

from slimgrad.errors import UnsupportedModelError
from slimgrad.profiler.clock import Block, Clock, single_holder
from slimgrad.profiler.visits import Visits, holding_in
from slimgrad.runtime.batches import call, split
from slimgrad.runtime.fake import Faked, faked
from slimgrad.runtime.frame import storage_of
from slimgrad.runtime.graph import tensors_in
from slimgrad.runtime.lesson import Lesson, owners_of
from slimgrad.spec.timeline import Given, Timeline


def timeline(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    lesson: Lesson,
    *,
    device: torch.device | str | None = None,
) -> Timeline:
    """The bytes of one step, event by event; `lesson` is that of a watched forward, fake or real, of the same batch.

    The step is `loss_fn(model(batch)).backward()` with no gradients there before: the output is let go of when the loss
    is computed, and backward runs outside of autocast. Where nothing is a loss, it starts at all that is returned.
    """
    single = single_holder()
    arguments, _ = split(batch, loss_fn)
    with torch.enable_grad(), faked(model, arguments, device) as pretend:
        like_batch = pretend.like(batch)
        clock = Clock(owners_of(model, (pretend.arguments, like_batch), pretend).storages, single)
        shelf, visits = Shelf(clock, lesson), Visits(clock)
        try:
            backward = _step(model, pretend, split(like_batch, loss_fn)[1], clock, shelf, visits)
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot run forward and backward on fake tensors ({error})"
            ) from error
    return _told(clock, shelf, backward, visits, lesson)


def _told(clock: Clock, shelf: Shelf, backward: int, visits: Visits, lesson: Lesson) -> Timeline:
    end, marks, blocks = clock.now, shelf.marks, shelf.blocks()
    numbers = {id(block): number for number, block in enumerate(blocks) if block is not None}
    regions, given = visits.regions(holding_in(lesson))
    operators = {text: number for number, text in enumerate(dict.fromkeys(clock.operators))}
    return Timeline(
        floor=tuple(clock.floor),
        backward=backward,
        saved=tuple(mark.saved for mark in marks),
        read=tuple(mark.read for mark in marks),
        done=tuple(mark.done for mark in marks),
        born=tuple(0 if block is None else block.born for block in blocks),
        freed=tuple(end if block is None or block.died is None else block.died for block in blocks),
        flops=tuple(clock.flops),
        moved=tuple(clock.moved),
        made=tuple(clock.made),
        operators=tuple(operators),
        kinds=tuple(operators[text] for text in clock.operators),
        regions=regions,
        pointwise=visits.pointwise,
        given=tuple(_given(block, numbers.get(id(block)), end) for block in given),
    )


def _given(block: Block, storage: int | None, end: int) -> Given:
    return Given(bytes=block.bytes, born=block.born, freed=end if block.died is None else block.died, storage=storage)


def _step(
    model: nn.Module,
    pretend: Faked,
    to_loss: Callable[[Any], Any],
    clock: Clock,
    shelf: Shelf,
    visits: Visits,
) -> int:
    """Run it, and return the event with which backward begins."""
    with clock:
        with visits.of(model), saved_tensors_hooks(shelf.pack, shelf.unpack):
            loss = to_loss(call(pretend.call, pretend.arguments))
        shelf.check()
        with _autocast_left():
            backward = clock.now
            _backward(loss)
        clock.stop()
    return backward


def _backward(loss: Any) -> None:
    tensors = list({id(tensor): tensor for tensor in tensors_in(loss) if tensor.requires_grad}.values())
    if len(tensors) == 1 and tensors[0].numel() == 1:
        torch.autograd.backward(tensors)
    elif tensors:
        torch.autograd.backward(tensors, [torch.ones_like(tensor) for tensor in tensors])


@contextmanager
def _autocast_left() -> Iterator[None]:
    """As after the end of the caller's `with torch.autocast(...)`, which lets go of the copies of weights.

    What enters and leaves autocast in backward, such as a checkpointed region, must find that it is the outermost.
    """
    enabled = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    depth = torch.autocast_increment_nesting() - 1
    for _ in range(depth + 1):
        torch.autocast_decrement_nesting()
    for kind in enabled:
        torch.set_autocast_enabled(kind, False)
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        for kind in enabled:
            torch.set_autocast_enabled(kind, True)
        for _ in range(depth):
            torch.autocast_increment_nesting()


# --- what is saved ---


@dataclass(eq=False)
class Mark:
    """The events of one site."""

    saved: int = 0
    read: int | None = None
    done: int | None = None
    block: Block | None = None


class Ticket:
    """What the hooks hand to autograd: the tensor itself, or a stand-in that takes memory only once it is read."""

    __slots__ = ("__weakref__", "is_counted", "mark", "tensor")

    def __init__(self, tensor: Tensor, mark: Mark | None, is_counted: bool) -> None:
        self.tensor = tensor
        self.mark = mark
        self.is_counted = is_counted


class Shelf:
    """The saved-tensor hooks: the sites of the lesson are recognised by their place among all that is saved."""

    def __init__(self, clock: Clock, lesson: Lesson) -> None:
        self.marks = [Mark() for _ in lesson.records]
        self._clock = clock
        self._lesson = lesson
        self._places = {record.number: place for place, record in enumerate(lesson.records)}
        self._number = 0

    def pack(self, tensor: Tensor) -> Ticket:
        place = self._places.get(self._number)
        self._number += 1
        with self._clock.aside():
            if place is None:
                return Ticket(_handed(tensor), None, True)
            mark = self._marked(place, tensor)
            storage = storage_of(tensor)
            owned = storage is None or storage._cdata in self._clock.owned
            ticket = Ticket(_handed(tensor) if owned else _stand_in(tensor), mark, owned)
        weakref.finalize(ticket, self._done, mark).atexit = False
        return ticket

    def unpack(self, ticket: Ticket) -> Tensor:
        tensor, mark = ticket.tensor, ticket.mark
        if mark is not None and mark.read is None:
            mark.read = self._clock.now
        if not ticket.is_counted:
            ticket.is_counted = True
            storage = tensor.untyped_storage()
            self._clock.born(storage, min(tensor.numel() * tensor.itemsize, storage.nbytes()))
        return tensor

    def _marked(self, place: int, tensor: Tensor) -> Mark:
        record = self._lesson.records[place]
        if tensor.shape != record.shape:  # dtypes may differ: statistics of norms, where the first forward was real
            raise RuntimeError(
                f"its second forward saved a tensor of shape {tuple(tensor.shape)} where the first saved one of shape "
                f"{tuple(record.shape)}"
            )
        mark = self.marks[place]
        mark.saved = self._clock.now
        storage = storage_of(tensor)
        mark.block = None if storage is None else self._clock.block(storage)
        return mark

    def _done(self, mark: Mark) -> None:
        mark.done = self._clock.at_death()

    def check(self) -> None:
        if self._number != len(self._lesson.trail):
            raise RuntimeError(f"its second forward saved {self._number} tensors, the first {len(self._lesson.trail)}")

    def blocks(self) -> list[Block | None]:
        """Of each storage of the profile."""
        return [self.marks[storage.savers[0]].block for storage in self._lesson.profile.storages]


def _handed(tensor: Tensor) -> Tensor:
    """Not what a node made: one that saves its own output would otherwise keep itself alive for ever."""
    return tensor if tensor.is_leaf else tensor.detach()


def _stand_in(tensor: Tensor) -> Tensor:
    """A tensor of the same layout in memory of its own; real integers keep their values, since backward may ask."""
    if not isinstance(tensor, FakeTensor):
        return tensor.detach().clone()
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
