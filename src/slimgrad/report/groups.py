"""Storages of repeated layers taken together, so that the top of a list says something new on every line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimgrad.report.human import need_name, path_name, plural, short_slot, shorten, tensor_name

if TYPE_CHECKING:
    from slimgrad.spec import Profile, Site, Storage

LAYER_NUMBER = re.compile(r"(?<![^.])[0-9]+(?![^.])")


@dataclass(frozen=True)
class Group:
    """Storages that differ in nothing but the number of their layer; most often just one."""

    path: str
    lead: Site
    """The saver that asks for most, of the first of them."""
    others: int
    """How many more savers the first of them has."""
    count: int
    bytes: int

    def place(self, width: int, *, times: bool) -> str:
        """Module path and slot in at most `width` characters; where both are long, each gets half."""
        path = path_name(self.path) + call_suffix(self.lead)
        more = f" +{plural(self.others, 'saver')}" if self.others else ""
        tail = more + (f" ×{self.count}" if times and self.count > 1 else "")
        room = max(width // 2, width - len(path) - 1) - len(tail)
        slot = shorten(short_slot(self.lead), room) + tail
        return f"{shorten(path, width - len(slot) - 1)} {slot}"


def call_suffix(site: Site) -> str:
    return f"#{site.call}" if site.call else ""


def grouped(profile: Profile, limit: int | None) -> list[Group]:
    """The counted storages by falling bytes: one by one, or by repeated layer if there are more than `limit`."""
    counted = [storage for storage in profile.storages if storage.counted]
    together = limit is not None and len(counted) > limit
    members: dict[tuple[object, ...], list[Storage]] = {}
    for i, storage in enumerate(counted):
        members.setdefault(family(profile, storage) if together else (i,), []).append(storage)
    groups = [group_of(profile, storages) for storages in members.values()]
    return sorted(groups, key=lambda group: -group.bytes)


def family(profile: Profile, storage: Storage) -> tuple[object, ...]:
    """What the storages of a group have in common."""
    lead = profile.lead(storage)
    tensor, savers = tensor_name(lead.shape, lead.dtype), len(storage.savers)
    return open_path(lead.path), lead.call, lead.module, short_slot(lead), need_name(lead.need), tensor, savers


def open_path(path: str) -> str:
    """The path with layer numbers left open: 'layers.*.mlp'."""
    return LAYER_NUMBER.sub("*", path)


def group_of(profile: Profile, storages: list[Storage]) -> Group:
    first, lead = storages[0], profile.lead(storages[0])
    paths = {profile.lead(storage).path for storage in storages}
    return Group(
        path=lead.path if len(paths) == 1 else open_path(lead.path),
        lead=lead,
        others=len(first.savers) - 1,
        count=len(storages),
        bytes=sum(storage.bytes for storage in storages),
    )
