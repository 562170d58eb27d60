"""Timeline: the bytes of one step, event by event, as far as they do not depend on what is kept."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from slimgrad.spec.values import Value

if TYPE_CHECKING:
    from slimgrad.spec.profile import Profile


@dataclass(frozen=True, kw_only=True, repr=False)
class Given(Value):
    """Memory of a tensor that regions are called with. Whoever runs one again holds it until then."""

    bytes: int
    born: int
    freed: int
    """The event from which on forward itself holds it no more."""
    storage: int | None
    """Of the profile, if anybody saves it."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Region(Value):
    """One call of a module that could do something else than keep what it saves."""

    path: str
    call: int
    start: int
    """The first event of its forward."""
    stop: int
    """The event after the last one of its forward."""
    given: tuple[int, ...] = ()
    """What it is called with, by number in Timeline.given; parameters and inputs of the step are left out."""
    groupable: bool = False
    """Whether a fused op may keep what it is given in groups of a few bits, which tell what it makes."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Timeline(Value):
    """One step of forward and backward, in events: one for each operator that ran.

    NOTE [What a storage adds]
    `floor` is the step as it would be if autograd kept nothing: a saved storage is in it until forward itself lets go
    of it, and a dense copy of each saved view while backward reads it. A storage that is kept as it is adds its bytes
    from `freed` to the last `done` of its savers, less those copies; one that is packed adds what is packed, from the
    first `saved` to the last `done`.
    """

    floor: tuple[int, ...]
    """Bytes alive at each event, the most while it ran: temporaries, outputs, gradients; not parameters or inputs."""
    backward: int
    """The event with which backward begins."""
    saved: tuple[int, ...]
    """Of each site of the profile: the event at which it is saved."""
    read: tuple[int | None, ...]
    """Of each site: the event at which backward begins to read it; None if it never does."""
    done: tuple[int | None, ...]
    """Of each site: the event from which on backward needs it no more, and what was read is gone; None if it is held
    to the end of the step."""
    born: tuple[int, ...]
    """Of each storage of the profile: the event that made it."""
    freed: tuple[int, ...]
    """Of each storage of the profile: the event from which on forward itself holds it no more."""
    flops: tuple[int, ...]
    """Floating-point operations of each event's matrix products and convolutions; 0 for others."""
    moved: tuple[int, ...]
    """Bytes that each event reads and writes."""
    made: tuple[int, ...] = ()
    """Bytes of what each event makes, which are not there yet when it reads what was saved."""
    operators: tuple[str, ...] = ()
    """The kinds of operators that run, each once: its name and arguments, so that it can be timed by itself."""
    kinds: tuple[int, ...] = ()
    """Of each event: which of `operators` it runs."""
    regions: tuple[Region, ...] = ()
    """What could be run again in backward."""
    pointwise: tuple[Region, ...] = ()
    """What is one nonlinearity, element by element, which a fused op could compute."""
    given: tuple[Given, ...] = ()
    """What regions are called with."""

    def untouched(self, profile: Profile) -> tuple[int, ...]:
        """Bytes alive at each event of the step as stock autograd runs it: every storage of `profile` kept as it is."""
        changes = [0] * (len(self.floor) + 1)

        def add(size: int, start: int, stop: int) -> None:
            if start < stop:
                changes[start] += size
                changes[stop] -= size

        for storage, freed in zip(profile.storages, self.freed, strict=True):
            if storage.counted:
                add(storage.bytes, freed, max(self.end(site) for site in storage.savers))
                for site in storage.savers:
                    read = self.read[site]
                    if read is not None:
                        add(-min(profile.sites[site].bytes, storage.bytes), read, self.end(site))
        return tuple(floor + more for floor, more in zip(self.floor, accumulate(changes), strict=False))

    def end(self, site: int) -> int:
        """The event from which on a site holds nothing."""
        done = self.done[site]
        return len(self.floor) if done is None else done
