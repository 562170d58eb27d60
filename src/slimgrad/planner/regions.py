"""Which modules may run again: of modules within modules, the level that leaves least in memory."""

from __future__ import annotations

from collections.abc import Iterable

from slimgrad.spec import Profile
from slimgrad.spec.timeline import Region

COVERS = 0.8
"""How much of what a module saves must be saved in the smaller ones that may take its place."""


def is_in(path: str, module: str) -> bool:
    return path == module or path.startswith(f"{module}.")


def regions_of(profile: Profile) -> tuple[Region, ...]:
    """Regions that do not overlap. What runs again needs its inputs all the while, and all it saves at once when it
    runs: beginning with the outermost, one is split as long as inputs and the largest region together become less.
    """
    timeline = profile.timeline
    if timeline is None:
        return ()
    sizes = Sizes(profile)
    chosen = [region for region in timeline.regions if not _around(region, timeline.regions)]
    while chosen:
        largest = max(chosen, key=sizes.saved)
        inner = [region for region in timeline.regions if is_in(region.path, largest.path) and region is not largest]
        parts = [region for region in inner if not _around(region, inner)]
        split = [region for region in chosen if region is not largest] + parts
        covered = sum(map(sizes.saved, parts)) >= COVERS * sizes.saved(largest)
        if not (covered and sizes.together(split) < sizes.together(chosen)):
            break
        chosen = split
    return tuple(sorted(chosen, key=lambda region: region.start))


def _around(region: Region, others: Iterable[Region]) -> bool:
    return any(other is not region and is_in(region.path, other.path) for other in others)


class Sizes:
    """Bytes of regions."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile

    def saved(self, region: Region) -> int:
        """What is born in it and saved there."""
        return sum(size for size, born in self._storages(region) if born >= region.start)

    def input(self, region: Region) -> int:
        """The largest that it is given."""
        return max((size for size, born in self._storages(region) if born < region.start), default=0)

    def together(self, regions: list[Region]) -> int:
        return sum(map(self.input, regions)) + max(map(self.saved, regions), default=0)

    def _storages(self, region: Region) -> list[tuple[int, int]]:
        """(bytes, when it was born) of each storage that is saved in the region."""
        timeline, sites = self._profile.timeline, self._profile.sites
        assert timeline is not None
        return [
            (storage.bytes, timeline.born[number])
            for number, storage in enumerate(self._profile.storages)
            if storage.counted and any(is_in(sites[saver].path, region.path) for saver in storage.savers)
        ]
