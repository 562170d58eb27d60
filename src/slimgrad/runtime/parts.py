"""What is packed together: savers of one storage that one Packed can serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slimgrad.codecs import Codec, Demand, Keep, Lossless
from slimgrad.kernels import is_dense_layout
from slimgrad.runtime.lesson import Lesson
from slimgrad.runtime.tickets import Sharing
from slimgrad.runtime.watch import Record
from slimgrad.spec import Need, Storage

WHOLE = "whole"

COVERED = 0.9
"""How much of a storage its savers' views must cover together for it to be packed whole."""


@dataclass(frozen=True, eq=False)
class Part:
    """How the tensor of one saver is packed. Savers with the same codec, demand and region share one Packed."""

    codec: Codec
    demand: Demand
    region: Any = None
    """Which part of the storage; WHOLE where views with gaps fill it together, as q, k and v of one product do."""


def parts_of(storage: Storage, choice: Mapping[int, Codec], lesson: Lesson) -> dict[int, Part]:
    """Saver -> how it is packed; savers that no rule serves are missing, unless another's Packed serves them too."""
    parts: dict[int, Part] = {}
    choice = {saver: _enough(saver, storage, choice, lesson) for saver in storage.savers if saver in choice}
    codecs = dict.fromkeys(choice.values())
    for codec in sorted(codecs, key=lambda codec: not codec.elementwise):  # those that may serve others' masks first
        members = [saver for saver in storage.savers if choice.get(saver) == codec and saver not in parts]
        if not codec.elementwise:
            parts |= {s: Part(codec, lesson.open_demand(s), lesson.records[s].view) for s in members}
            continue
        for region, group in _by_region(codec, members, storage, lesson).items():
            exact = [s for s in _exact_savers(storage, choice, lesson, region) if s not in parts]
            parts |= _joint(codec, group, exact, region, lesson)
    return parts


def _enough(saver: int, storage: Storage, choice: Mapping[int, Codec], lesson: Lesson) -> Codec:
    """The saver's codec; or another's that holds values of the very same elements anyway, which will do as well.

    What attention returns is read by its own backward, by rule in a few bits, and by the product behind it: the largest
    elements for that one alone would come on top, and tell less.
    """
    codec, records = choice[saver], lesson.records
    if codec.holds_values or isinstance(codec, Keep | Lossless):
        return codec
    demand, region = lesson.open_demand(saver), records[saver].region
    for other in storage.savers:
        found = choice.get(other, codec)
        if found.holds_values and records[other].region == region and found.serves(demand, records[saver].dtype):
            return found
    return codec


def _joint(codec: Codec, group: Sequence[int], exact: Sequence[int], region: Any, lesson: Lesson) -> dict[int, Part]:
    """One Packed for the group and for the masks on the same elements, if the codec can; else for the group alone."""
    for savers in ([*group, *exact], group):
        demand = codec.joint([lesson.open_demand(saver) for saver in savers])
        if demand is not None:
            return dict.fromkeys(savers, Part(codec, demand, region))
    return {saver: Part(codec, lesson.open_demand(saver), region) for saver in group}


def _exact_savers(storage: Storage, choice: Mapping[int, Codec], lesson: Lesson, region: Any) -> list[int]:
    """Savers of masks of these very elements that would be kept exactly, or not be served at all."""
    sites, records = lesson.profile.sites, lesson.records
    return [
        saver
        for saver in storage.savers
        if sites[saver].need is Need.MASK
        and isinstance(choice.get(saver), Lossless | None)
        and records[saver].region == region
    ]


def _by_region(codec: Codec, savers: Sequence[int], storage: Storage, lesson: Lesson) -> dict[Any, list[int]]:
    records = [lesson.records[saver] for saver in savers]
    gaps = codec.whole and any(not is_dense_layout(*record.view[1:]) for record in records)
    if gaps and _fill_together(records, storage):
        return {WHOLE: list(savers)}
    found: dict[Any, list[int]] = {}
    for saver, record in zip(savers, records, strict=True):
        found.setdefault(record.region, []).append(saver)
    return found


def _fill_together(records: Sequence[Record], storage: Storage) -> bool:
    """Whether the views make up nearly the whole storage, all of it in the state in which the first was saved."""
    in_one_state = len({(record.dtype, record.version) for record in records}) == 1
    views = {record.view: record.bytes for record in records}
    tracked = all(record.is_tracked_view for record in records)
    return in_one_state and tracked and sum(views.values()) >= COVERED * storage.bytes


def keepers(storage: Storage, parts: Mapping[int, Part]) -> list[int]:
    """Savers that hold the storage as it is."""
    return [saver for saver in storage.savers if saver not in parts or isinstance(parts[saver].codec, Keep)]


def promised_bytes(storage: Storage, parts: Mapping[int, Part], lesson: Lesson) -> int:
    """Bytes that packing the storage for all its savers will hold, each Packed once."""
    packs = {(part.codec, part.demand.key, part.region): saver for saver, part in parts.items()}
    return sum(_promised(parts[saver], storage, lesson.records[saver], lesson, saver) for saver in packs.values())


def _promised(part: Part, storage: Storage, record: Record, lesson: Lesson, saver: int) -> int:
    if part.region == WHOLE:
        return part.codec.promised((storage.bytes // record.dtype.itemsize,), record.dtype, part.demand)
    demand = lesson.demand(saver) if lesson.answers[saver].sibling is not None else part.demand
    return part.codec.promised(record.shape, record.dtype, demand)


def families(parts: Iterable[Part]) -> dict[tuple[Codec, Any], int]:
    """A small number for each pair of codec and demand, because hashing them takes longer than the rest of a key."""
    pairs = dict.fromkeys((part.codec, part.demand.key) for part in parts)
    return {pair: number for number, pair in enumerate(pairs)}


def sharing(parts: Mapping[int, Part], lesson: Lesson, besides: Collection[int]) -> dict[int, Sharing]:
    """Saver -> with whom it shares its Packed. Views of the same memory only where shape and strides are nothing to the
    codec; what they are to others, frames look at. Those `besides` have readers that are no savers.
    """
    sites, records = lesson.profile.sites, lesson.records
    memory, copies = {}, {}
    for saver, part in parts.items():
        what = (part.codec, part.demand.key)
        memory[saver] = (sites[saver].storage, part.region, what)
        copies[saver] = (records[saver].content, what)
    in_memory, as_copies = Counter(memory.values()), Counter(copies.values())
    found = {}
    for saver, part in parts.items():
        elementwise = part.codec.elementwise
        if elementwise and part.region == WHOLE:
            found[saver] = Sharing.WHOLE
        elif elementwise and in_memory[memory[saver]] > 1:
            found[saver] = Sharing.MEMORY
        elif records[saver].origin is not None and as_copies[copies[saver]] > 1:
            found[saver] = Sharing.COPIES
        elif saver in besides:
            found[saver] = Sharing.MEMORY
        else:
            found[saver] = Sharing.NONE
    return found
