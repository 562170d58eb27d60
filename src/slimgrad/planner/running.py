"""What is known of modules that may run again: what each makes, is given, and when backward enters and leaves it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from slimgrad.planner.offers import Item
from slimgrad.planner.regions import is_in
from slimgrad.spec import Profile
from slimgrad.spec.timeline import Region


@dataclass(frozen=True)
class Running:
    """Regions of one profile, by their places."""

    profile: Profile
    items: tuple[Item, ...]
    regions: tuple[Region, ...]

    @cached_property
    def inside(self) -> dict[int, int]:
        """Item -> the region that makes all of it."""
        return {item.number: place for item in self.items for place in self._makers(item)}

    def _makers(self, item: Item) -> list[int]:
        return [place for place in range(len(self.regions)) if self.makes(place, item.storages, item.sites)]

    def makes(self, place: int, storages: Iterable[int], sites: Iterable[int]) -> bool:
        """Whether these are made in a region, and saved nowhere else."""
        timeline, region = self.profile.timeline, self.regions[place]
        inside = all(is_in(self.profile.sites[site].path, region.path) for site in sites)
        return inside and timeline is not None and all(timeline.born[number] >= region.start for number in storages)

    def given_to(self, item: Item) -> list[int]:
        """The regions that are given it, and save it."""
        timeline, sites = self.profile.timeline, self.profile.sites
        if timeline is None:
            return []
        return [
            place
            for place, region in enumerate(self.regions)
            if any(is_in(sites[site].path, region.path) for site in item.sites)
            and any(timeline.born[number] < region.start for number in item.storages)
        ]

    def entered(self, region: int) -> int:
        """The event at which backward first reads what the region saved, which is when it runs again."""
        timeline, path = self.profile.timeline, self.regions[region].path
        assert timeline is not None
        reads = [
            read
            for number, site in enumerate(self.profile.sites)
            if is_in(site.path, path) and (read := timeline.read[number]) is not None
        ]
        return min(reads, default=timeline.backward)

    def small_in(self, place: int) -> list[int]:
        """Storages that are nobody's item, because they are small, and that a region makes: they go with it."""
        decided = {number for item in self.items for number in item.storages}
        return [
            number
            for number, storage in enumerate(self.profile.storages)
            if storage.counted and number not in decided and self.makes(place, [number], storage.savers)
        ]

    @cached_property
    def unsaved_in(self) -> list[list[int]]:
        """Of each region: what it is given and does not save. Whoever runs it again holds that as it is."""
        timeline = self.profile.timeline
        saved: list[set[int]] = [set() for _ in self.regions]
        for item in self.items:
            for place in self.given_to(item):
                saved[place] |= set(item.storages)
        return [
            [number for number in region.given if timeline is not None and timeline.given[number].storage not in known]
            for region, known in zip(self.regions, saved, strict=True)
        ]

    @cached_property
    def unsaved(self) -> list[int]:
        """The same of all regions, each once."""
        return sorted({number for numbers in self.unsaved_in for number in numbers})

    def left(self, region: int) -> int:
        """The event from which on backward needs nothing of a region."""
        timeline, path = self.profile.timeline, self.regions[region].path
        assert timeline is not None
        return max(timeline.end(number) for number, site in enumerate(self.profile.sites) if is_in(site.path, path))

    def above_saved(self, place: int) -> int:
        """By how much a region's forward, while it saves, is above all that it has saved in the end."""
        region, timeline = self.regions[place], self.profile.timeline
        assert timeline is not None
        inside = [n for i, p in self.inside.items() if p == place for n in self.items[i].storages]
        sizes = {number: self.profile.storages[number].bytes for number in inside}
        before = timeline.floor[region.start - 1] if region.start else 0
        most = max(
            timeline.floor[event] - before + sum(size for n, size in sizes.items() if timeline.freed[n] <= event)
            for event in range(region.start, region.stop)
        )
        return max(0, most - sum(sizes.values()))
