"""Modules that are one nonlinearity, which a fused op may compute: what that frees, and what it keeps instead."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from slimgrad.codecs import Codec, FewBit, Quant
from slimgrad.planner.calibration import Rate
from slimgrad.planner.offers import DERIVE, FEWBIT, QUANT, Item, dense_again
from slimgrad.planner.problem import Span
from slimgrad.spec import Profile
from slimgrad.spec.timeline import Region

FEWBIT_OP, GROUPED_OP = FewBit(bits=3), Quant(bits=4, fused=True)
"""What trained to the untouched model's accuracy (docs/accuracy.md)."""


@dataclass(frozen=True)
class Fusible:
    """One such module, in all its calls."""

    path: str
    calls: tuple[Region, ...]
    sites: tuple[int, ...]
    """What its own forward saves."""
    items: tuple[int, ...]
    """What is kept for nobody else."""
    dense: int
    """Bytes of what it is given."""
    ops: tuple[Codec, ...]
    """The codecs by which an op may compute it."""
    held: tuple[int, ...]
    """Bytes that each of them keeps."""
    backward: tuple[tuple[int, int], ...]
    """Of each call: from the first event that reads what its own forward saved until the module is left."""

    @property
    def forward(self) -> list[tuple[int, int]]:
        return [(call.start, call.stop) for call in self.calls]


def fusibles_of(profile: Profile, items: Sequence[Item], least: int, names: Collection[str]) -> tuple[Fusible, ...]:
    """Those of which an op keeps less than is then freed, as runtime/swaps.py will find; by what `allow` names."""
    timeline = profile.timeline
    calls: dict[str, list[Region]] = {}
    for region in () if timeline is None else timeline.pointwise:
        calls.setdefault(region.path, []).append(region)
    found = (
        _fusible(profile, items, path, tuple(regions), least, _ops(regions, names)) for path, regions in calls.items()
    )
    return tuple(one for one in found if one is not None)


def _ops(calls: Sequence[Region], names: Collection[str]) -> Iterator[Codec]:
    """Groups are for what is derived of them: they take more bytes than codes of the derivative alone."""
    if FEWBIT in names:
        yield FEWBIT_OP
    if QUANT in names and DERIVE in names and all(call.groupable for call in calls):
        yield GROUPED_OP


def _fusible(
    profile: Profile,
    items: Sequence[Item],
    path: str,
    calls: tuple[Region, ...],
    least: int,
    ops: Iterable[Codec],
) -> Fusible | None:
    """None where no op gains anything."""
    sites = [number for number, site in enumerate(profile.sites) if site.path == path]
    largest: dict[int, int] = {}
    for number in sites:
        call, shape = profile.sites[number].call, profile.sites[number].shape
        largest[call] = max(largest.get(call, 0), torch.Size(shape).numel())
    if not any(profile.sites[number].bytes >= least for number in sites):
        return None
    itemsize = min(
        getattr(torch, profile.sites[number].dtype).itemsize for number in sites
    )  # autocast makes larger ones
    alone = tuple(item.number for item in items if all(profile.sites[site].path == path for site in item.sites))
    freed = sum(profile.storages[number].bytes for place in alone for number in items[place].storages)
    held = {op: sum(op.promised((elements,), torch.float32) for elements in largest.values()) for op in ops}
    gaining = {op: size for op, size in held.items() if size < freed}
    if not gaining:
        return None
    dense, backward = itemsize * sum(largest.values()), tuple(_read(profile, sites))
    return Fusible(path, calls, tuple(sites), alone, dense, tuple(gaining), tuple(gaining.values()), backward)


def _read(profile: Profile, sites: Sequence[int]) -> Iterator[tuple[int, int]]:
    timeline = profile.timeline
    assert timeline is not None
    reads: dict[int, list[int]] = {}
    for number in sites:
        event = timeline.read[number]
        if event is not None:
            reads.setdefault(profile.sites[number].call, []).append(event)
    own = set(sites)
    others = [event for number, event in enumerate(timeline.read) if event is not None and number not in own]
    for events in reads.values():
        first, end = min(events), max(events) + 1
        if end > first + 1:  # the last operator of a formula is followed by some that read nothing saved
            end = min((event for event in others if event >= end), default=end)
        yield first, end


def moments(profile: Profile, items: Sequence[Item], found: Fusible, rate: Rate) -> Iterator[Span]:
    """What the op needs while it runs, beside what the module's own operators need: it reads one tensor and writes one,
    where a formula has several. What is kept of them besides is taken off with the items.
    """
    timeline = profile.timeline
    assert timeline is not None
    copies = Counter[int]()
    for place in found.items:
        for span in dense_again(profile, items[place]):
            copies.update(dict.fromkeys(range(span.start, span.stop), span.bytes))
    dense = found.dense // len(found.calls)
    for scratch, windows in ((rate.pack_scratch, found.forward), (rate.unpack_scratch, found.backward)):
        for start, stop in windows:
            own = [timeline.floor[event] + copies[event] for event in range(start, stop)]
            for event, size in enumerate(own, start):  # the first operator, too, writes one tensor
                yield Span(event, event + 1, own[0] + int(scratch * dense) - size)
