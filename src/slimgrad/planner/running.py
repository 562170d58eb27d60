"""What is known of modules that may run again: what each makes, is given, and when backward enters and leaves it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from slimgrad.planner.offers import Item
from slimgrad.planner.problem import Span
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

    @cached_property
    def sites_in(self) -> list[frozenset[int]]:
        """Of each region: what is saved while it runs. A module in it may be called once more, from elsewhere."""
        timeline, sites = self.profile.timeline, list(enumerate(self.profile.sites))
        if timeline is None:
            return [frozenset() for _ in self.regions]
        return [
            frozenset(n for n, site in sites if is_in(site.path, r.path) and r.start <= timeline.saved[n] <= r.stop)
            for r in self.regions
        ]

    def makes(self, place: int, storages: Iterable[int], sites: Iterable[int]) -> bool:
        """Whether these are made in a region, and saved nowhere else."""
        timeline, region = self.profile.timeline, self.regions[place]
        inside = self.sites_in[place].issuperset(sites)
        return inside and timeline is not None and all(timeline.born[number] >= region.start for number in storages)

    def shared_with(self, item: Item) -> list[int]:
        """The regions that save it, where others save it too, or made it."""
        if self.profile.timeline is None or item.number in self.inside:
            return []
        return [place for place, sites in enumerate(self.sites_in) if not sites.isdisjoint(item.sites)]

    def given_to(self, item: Item) -> list[int]:
        """The regions that are given it, and save it."""
        timeline = self.profile.timeline
        return [
            place
            for place in self.shared_with(item)
            if timeline is not None
            and any(timeline.born[number] < self.regions[place].start for number in item.storages)
        ]

    def left_by(self, place: int) -> list[int]:
        """Storages that a region makes and saves, and that others save too: they are there twice when it runs again."""
        timeline, start = self.profile.timeline, self.regions[place].start
        shared = [item for item in self.items if place in self.shared_with(item)]
        saved = (n for item in shared for n in item.storages if not self.sites_in[place].isdisjoint(self._savers(n)))
        return [number for number in saved if timeline is not None and timeline.born[number] >= start]

    def _savers(self, storage: int) -> tuple[int, ...]:
        return self.profile.storages[storage].savers

    def span_in(self, place: int, storage: int) -> Span:
        """Where a region that runs again holds a storage that it saves."""
        timeline, start = self.profile.timeline, self.entered(place)
        assert timeline is not None
        ends = (timeline.end(site) for site in self._savers(storage) if site in self.sites_in[place])
        return Span(start, max(ends, default=start), self.profile.storages[storage].bytes)

    def entered(self, region: int) -> int:
        """The event at which backward first reads what the region saved, which is when it runs again."""
        timeline = self.profile.timeline
        assert timeline is not None
        reads = [read for number in self.sites_in[region] if (read := timeline.read[number]) is not None]
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
        timeline = self.profile.timeline
        assert timeline is not None
        return max(map(timeline.end, self.sites_in[region]))

    def above_saved(self, place: int, workspaces: Sequence[int]) -> int:
        """By how much a region's forward, which runs again until it has saved the last, is above all that it has saved
        then. `workspaces` are what operators take for themselves, by event.
        """
        region, timeline = self.regions[place], self.profile.timeline
        assert timeline is not None
        inside = [n for i, p in self.inside.items() if p == place for n in self.items[i].storages]
        inside += self.left_by(place)
        sizes = {number: self.profile.storages[number].bytes for number in inside}
        before = timeline.floor[region.start - 1] if region.start else 0
        most = max(
            timeline.floor[event]
            + workspaces[event]
            - before
            + sum(size for n, size in sizes.items() if timeline.freed[n] <= event)
            for event in range(region.start, max(region.start + 1, self._last_saved(place)))
        )
        return max(0, most - sum(sizes.values()))

    def _last_saved(self, place: int) -> int:
        """The event before which a region has saved all."""
        region, timeline = self.regions[place], self.profile.timeline
        assert timeline is not None
        return max((timeline.saved[number] for number in self.sites_in[place]), default=region.stop)
