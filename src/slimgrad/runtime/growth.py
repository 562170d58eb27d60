"""What a forward with larger tensors teaches about one that was learnt from smaller ones: bytes, and nothing else.

Whether a storage is worth packing depends on its size, and the first forward may be a small one: a look at two
samples, a short sentence. So a forward of a new shape, which is watched anyway, is compared; if it keeps more, its
bytes decide. Rules select by the shapes that were learnt.
"""

from __future__ import annotations

from dataclasses import replace

from slimgrad.runtime.lesson import Lesson
from slimgrad.runtime.watch import Record, WatchFrame


def grown(taught: Lesson, frame: WatchFrame) -> Lesson | None:
    """The lesson with the bytes of this forward; None if it kept no more in all, or not the same tensors."""
    seen = {record.key: record for record in frame.records}
    found = [seen.get(record.key) for record in taught.records]
    records = [new for old, new in zip(taught.records, found, strict=True) if new is not None and _alike(old, new)]
    if len(records) < len(found) or not _lie_alike(taught, records):
        return None
    sites = tuple(replace(site, bytes=record.bytes) for site, record in zip(taught.profile.sites, records, strict=True))
    storages = tuple(
        replace(storage, bytes=records[storage.savers[0]].storage_bytes) for storage in taught.profile.storages
    )
    profile = replace(taught.profile, sites=sites, storages=storages)
    if profile.kept_bytes <= taught.profile.kept_bytes:
        return None
    return replace(taught, profile=profile, records=tuple(records))


def _alike(old: Record, new: Record) -> bool:
    """Whether it is the same tensor of another size, as far as orders tell them apart."""
    what = (old.number, old.dtype, old.device, old.producer, old.is_output, old.boundary, len(old.shape))
    return what == (new.number, new.dtype, new.device, new.producer, new.is_output, new.boundary, len(new.shape))


def _lie_alike(taught: Lesson, records: list[Record]) -> bool:
    """Whether savers share storages as they did."""
    groups = [{records[saver].storage_id for saver in storage.savers} for storage in taught.profile.storages]
    return all(len(group) == 1 for group in groups) and len(set().union(*groups)) == len(groups)
