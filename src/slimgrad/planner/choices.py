"""Choices: a profile as a knapsack, with all that does not depend on the budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from slimgrad.codecs import Derive, FewBit, Keep, Lossless, Offload
from slimgrad.kernels.transfer import AHEAD
from slimgrad.planner.bounds import Bound, Tolerance
from slimgrad.planner.calibration import Calibration
from slimgrad.planner.costs import Costs
from slimgrad.planner.fusing import Fusible, fusibles_of, moments
from slimgrad.planner.offers import FEWBIT, RECOMPUTE, Desk, Item, Offer, dense_again, items_of, spans_of
from slimgrad.planner.plan import AGAIN, FUSING
from slimgrad.planner.problem import Option, Problem, Span
from slimgrad.planner.regions import is_in, regions_of
from slimgrad.planner.sensitivity import Sensitivity
from slimgrad.runtime.derivations import MOST_RERUNS
from slimgrad.runtime.orders import least_bytes
from slimgrad.spec import OUTSIDE, Need, Profile
from slimgrad.spec.budgets import as_bytes
from slimgrad.spec.timeline import Region

Link = tuple[int, frozenset[int]]
"""(group, options of it), as Option.needs."""


WAITS = 16
"""Shares of what could be offloaded for which the device may be made to wait, instead of the link for the device."""

CARRIED = 0.8
"""Of the time that forward takes, how much the link to the host is counted on."""


@dataclass(frozen=True)
class Choices:
    """What can be done to each storage and each module. Groups are the items, then the regions, then what a fused op
    may compute, then what regions are given and nobody saves, then how long the device waits for the link to the host,
    if anything goes there.
    """

    profile: Profile
    costs: Costs
    items: tuple[Item, ...]
    offers: tuple[tuple[Offer, ...], ...]
    regions: tuple[Region, ...]
    fusibles: tuple[Fusible, ...]
    reserved: int
    least: int

    @classmethod
    def of(
        cls,
        profile: Profile,
        names: Collection[str],
        calibration: Calibration,
        reserve: str | int,
        min_bytes: int | None = None,
        sensitivity: Sensitivity | None = None,
        *,
        outside: bool = False,
    ) -> Choices:
        least = least_bytes(torch.device(profile.device), min_bytes)
        desk = Desk(profile, names)
        items = tuple(items_of(profile, least, outside=outside))
        regions = regions_of(profile) if RECOMPUTE in names else ()
        fusibles = fusibles_of(profile, items, least) if FEWBIT in names else ()
        offers = tuple(tuple(desk.offers(item)) for item in items)
        costs, reserved = Costs(profile, calibration, sensitivity), as_bytes(reserve)
        return cls(profile, costs, items, _without_codes(offers, fusibles), regions, fusibles, reserved, least)

    @property
    def fixed(self) -> int:
        """Bytes that are there before the step."""
        meta = self.profile.meta
        return int(meta.get("model_bytes", 0)) + int(meta.get("batch_bytes", 0)) + self.reserved

    @property
    def left_outside(self) -> int:
        """Bytes that nobody keeps but what comes after the model, such as the loss, and that are left as they are."""
        sites, decided = self.profile.sites, {number for item in self.items for number in item.storages}
        return sum(
            storage.bytes
            for number, storage in enumerate(self.profile.storages)
            if storage.counted and number not in decided and all(sites[site].path == OUTSIDE for site in storage.savers)
        )

    # --- the problem ---

    @cached_property
    def floor(self) -> tuple[int, ...]:
        """Bytes of each event that no choice changes: the timeline's, and the storages that are left alone."""
        timeline = self.profile.timeline
        if timeline is None:
            return (0,)
        decided = {number for item in self.items for number in item.storages}
        others = [
            replace(storage, kind=storage.kind if number not in decided else "decided")
            for number, storage in enumerate(self.profile.storages)
        ]
        return timeline.untouched(replace(self.profile, storages=tuple(others)))

    @cached_property
    def kept_beside(self) -> int:
        """What is kept and not decided about."""
        decided = sum(self.profile.storages[number].bytes for item in self.items for number in item.storages)
        return self.profile.kept_bytes - decided

    @cached_property
    def _item_of(self) -> dict[int, int]:
        return {site: item.number for item in self.items for site in item.sites}

    @cached_property
    def _inside(self) -> dict[int, int]:
        """Item -> the region that makes all of it."""
        return {item.number: place for item in self.items for place in self._makers(item)}

    def _makers(self, item: Item) -> list[int]:
        return [place for place in range(len(self.regions)) if self._makes(place, item.storages, item.sites)]

    def _makes(self, place: int, storages: Iterable[int], sites: Iterable[int]) -> bool:
        """Whether these are made in a region, and saved nowhere else."""
        timeline, region = self.profile.timeline, self.regions[place]
        inside = all(is_in(self.profile.sites[site].path, region.path) for site in sites)
        return inside and timeline is not None and all(timeline.born[number] >= region.start for number in storages)

    @cached_property
    def groups(self) -> tuple[tuple[Option, ...], ...]:
        items = [self._options(item) for item in self.items]
        regions = [self._region_options(place) for place in range(len(self.regions))]
        fused = [self._fusible_options(fusible) for fusible in self.fusibles]
        given = [self._given_options(number) for number in self._unsaved]
        waits = self._waits(math.fsum(max((option.link for option in group), default=0.0) for group in items))
        return (*items, *regions, *fused, *given, *waits)

    def _waits(self, link: float) -> list[tuple[Option, ...]]:
        """Whatever the link cannot carry meanwhile, the device waits for."""
        if not link:
            return []
        steps = [share * link / WAITS for share in range(WAITS + 1)]
        return [tuple(Option(wait, 0.0, 0, link=-wait) for wait in steps)]

    def _options(self, item: Item) -> tuple[Option, ...]:
        """Its offers, in their order, then those of `beyond`."""
        region, fusible = self._inside.get(item.number), self._fusing.get(item.number)
        needs = [] if region is None else [self._runs(region, again=False)]
        needs += [] if fusible is None else [self._is_fused(fusible, fused=False)]
        options = [self._option(item, offer, tuple(needs)) for offer in self.offers[item.number]]
        again = () if region is None else (self._again(item, region),)
        return (*options, *again, *(() if fusible is None else (self._fused(item, fusible),)))

    def beyond(self, item: Item) -> list[str]:
        """What becomes of an item by what is done to the module around it: the options after its offers."""
        words = ((AGAIN, self._inside), (FUSING, self._fusing))
        return [word for word, around in words if item.number in around]

    def _runs(self, region: int, *, again: bool) -> Link:
        return len(self.items) + region, frozenset([int(again)])

    def _is_fused(self, fusible: int, *, fused: bool) -> Link:
        return len(self.items) + len(self.regions) + fusible, frozenset([int(fused)])

    def _option(self, item: Item, offer: Offer, needs: tuple[Link, ...]) -> Option:
        if offer.derived:  # of a region's input its own node knows no maker where it is saved for another run
            needs = (*needs, *(self._runs(region, again=False) for region in self.given_to(item)))
            needs = (*needs, *(self._is_fused(fusible, fused=False) for fusible in self._makers_fused(offer)))
        kept = offer.held if offer.codecs else self.bytes_of(item)
        spans = [] if self.profile.timeline is None else self._spans(item, offer)
        return Option(
            seconds=self.costs.seconds(offer),
            error=self.costs.error(item, offer),
            kept=kept,
            spans=tuple(spans),
            link=self.costs.link_seconds(offer),
            needs=(*needs, *self._sources(offer)),
        )

    def _spans(self, item: Item, offer: Offer) -> list[Span]:
        return [*spans_of(self.profile, item, offer), *self._scratch(offer), *self._travelling(item, offer)]

    def _travelling(self, item: Item, offer: Offer) -> list[Span]:
        """What goes to the host is on the device until it has arrived there, and comes back before it is read."""
        timeline, costs = self.profile.timeline, self.costs
        assert timeline is not None
        found = []
        for pack in offer.packs:
            if isinstance(pack.codec, Offload):
                rate, freed = (
                    costs.calibration.rate(pack.codec, pack.need),
                    max(timeline.freed[n] for n in item.storages),
                )
                saved = min(timeline.saved[saver] for saver in pack.savers)
                found.append(Span(freed, costs.later(saved, pack.dense * rate.pack), pack.dense))
                reads = {timeline.read[saver] for saver in pack.savers} - {None}
                early = -AHEAD * pack.dense * rate.unpack
                found += [Span(costs.later(read, early), read, pack.dense) for read in reads if read is not None]
        return [span for span in found if span.start < span.stop]

    def bytes_of(self, item: Item) -> int:
        return sum(self.profile.storages[number].bytes for number in item.storages)

    def _scratch(self, offer: Offer) -> list[Span]:
        timeline = self.profile.timeline
        assert timeline is not None
        found = []
        for pack in offer.packs:
            packing, unpacking = self.costs.scratch(pack)
            saved = timeline.saved[pack.savers[0]]
            found.append(Span(saved, saved + 1, packing))
            reads = {timeline.read[site] for site in pack.savers} - {None}
            found += [Span(read, read + 1, unpacking) for read in reads if read is not None]
        for site, way in offer.derived:
            read, profile_site = timeline.read[site], self.profile.sites[site]
            if read is not None and profile_site.reruns[way] > 1:
                found.append(Span(read, read + 1, profile_site.bytes))
        return [span for span in found if span.bytes]

    def _sources(self, offer: Offer) -> list[Link]:
        """What others must do for what is made again: tell the values it is made of."""
        found: dict[int, frozenset[int]] = {}
        for site, way in offer.derived:
            reruns = self.profile.sites[site].reruns[way]
            for source in self.profile.sites[site].sources[way]:
                item = self._item_of.get(source)
                if item is None:
                    continue
                telling = frozenset(
                    number for number, other in enumerate(self.offers[item]) if self._tells(other, source, reruns)
                )
                found[item] = found.get(item, telling) & telling
        return list(found.items())

    def _tells(self, offer: Offer, source: int, reruns: int) -> bool:
        """As runtime/deriving.py: whether what is kept stands for the values."""
        ways = dict(offer.derived)
        if source in ways:
            return self.profile.sites[source].reruns[ways[source]] + reruns <= MOST_RERUNS
        codec = next((pack.codec for pack in offer.packs if source in pack.savers), None)
        if codec is None or isinstance(codec, (Keep, Derive)) or codec.holds_values:
            return True
        site = self.profile.sites[source]
        is_bits = site.need is Need.MASK and site.fn in ("bool", "dropout")
        return isinstance(codec, Lossless) and (site.need in (Need.WEIGHT, Need.INDEX) or is_bits)

    # --- fused ops ---

    @cached_property
    def _fusing(self) -> dict[int, int]:
        """Item -> the module for which alone it is kept, of those that an op may compute."""
        return {item: place for place, fusible in enumerate(self.fusibles) for item in fusible.items}

    def _makers_fused(self, offer: Offer) -> list[int]:
        """The modules whose own forward must run, for what is derived to be made of what it saves."""
        sources = {source for site, way in offer.derived for source in self.profile.sites[site].sources[way]}
        return [place for place, fusible in enumerate(self.fusibles) if not sources.isdisjoint(fusible.sites)]

    def codes_in(self, item: Item) -> int:
        """What is kept of it where a fused op computes the module: of several items, the first has it all."""
        fusible = self.fusibles[self._fusing[item.number]]
        return fusible.codes if fusible.items[0] == item.number else 0

    def _fused(self, item: Item, fusible: int) -> Option:
        """It is not there at all."""
        timeline = self.profile.timeline
        assert timeline is not None
        return Option(0.0, 0.0, 0, tuple(dense_again(self.profile, item)), (self._is_fused(fusible, fused=True),))

    def _fusible_options(self, fusible: Fusible) -> tuple[Option, ...]:
        timeline, costs = self.profile.timeline, self.costs
        assert timeline is not None
        start, stop = min(call.start for call in fusible.calls), max(map(timeline.end, fusible.sites))
        while_it_runs = moments(self.profile, self.items, fusible, costs.calibration.fused)
        around = {self._inside[item] for item in fusible.items if item in self._inside}
        fused = Option(
            seconds=costs.fused_seconds(fusible) - costs.unfused_seconds(fusible),
            error=costs.fused_error(fusible),
            kept=fusible.codes,
            spans=(Span(start, stop, fusible.codes), *while_it_runs),
            needs=tuple(self._runs(region, again=False) for region in sorted(around)),
        )
        return Option(0.0, 0.0, 0), fused

    # --- regions ---

    def _again(self, item: Item, region: int) -> Option:
        """Nothing is kept, and all is there again from where backward enters the region."""
        timeline = self.profile.timeline
        assert timeline is not None
        start = self._entered(region)
        storages = [self.profile.storages[number] for number in item.storages]
        spans = [Span(start, max(map(timeline.end, storage.savers)), storage.bytes) for storage in storages]
        spans += dense_again(self.profile, item)
        needs = (self._runs(region, again=True),)
        return Option(0.0, 0.0, 0, tuple(span for span in spans if span.start < span.stop), needs)

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

    def _entered(self, region: int) -> int:
        """The event at which backward first reads what the region saved, which is when it runs again."""
        timeline, path = self.profile.timeline, self.regions[region].path
        assert timeline is not None
        reads = [
            read
            for number, site in enumerate(self.profile.sites)
            if is_in(site.path, path) and (read := timeline.read[number]) is not None
        ]
        return min(reads, default=timeline.backward)

    def _region_options(self, place: int) -> tuple[Option, ...]:
        region, timeline = self.regions[place], self.profile.timeline
        assert timeline is not None
        start = self._entered(place)
        moment = Span(start, start + 1, self._above_saved(place))
        first = len(self.items) + len(self.regions) + len(self.fusibles)
        held = [n for n, number in enumerate(self._unsaved) if number in region.given]
        needs = tuple((first + n, frozenset([1])) for n in held)
        small = self._small_in(place)
        gone = [Span(timeline.freed[number], start, -self.profile.storages[number].bytes) for number in small]
        spans = [span for span in (moment, *gone) if span.bytes and span.start < span.stop]
        kept = -sum(self.profile.storages[number].bytes for number in small)
        return Option(0.0, 0.0, 0), Option(self.costs.region_seconds(region), 0.0, kept, tuple(spans), needs)

    def _small_in(self, place: int) -> list[int]:
        """Storages that are nobody's item, because they are small, and that a region makes: they go with it."""
        decided = {number for item in self.items for number in item.storages}
        return [
            number
            for number, storage in enumerate(self.profile.storages)
            if storage.counted and number not in decided and self._makes(place, [number], storage.savers)
        ]

    @cached_property
    def _unsaved(self) -> list[int]:
        """What regions are given that no item stands for: whoever runs one again holds it as it is."""
        timeline = self.profile.timeline
        given = {number for region in self.regions for number in region.given}
        items = {number for item in self.items if self.given_to(item) for number in item.storages}
        return [] if timeline is None else sorted(n for n in given if timeline.given[n].storage not in items)

    def _given_options(self, number: int) -> tuple[Option, ...]:
        timeline = self.profile.timeline
        assert timeline is not None
        given = timeline.given[number]
        stop = max(self._left(place) for place, region in enumerate(self.regions) if number in region.given)
        span = Span(given.freed, stop, given.bytes)
        return Option(0.0, 0.0, 0), Option(0.0, 0.0, given.bytes, (span,) if span.start < span.stop else ())

    def _left(self, region: int) -> int:
        """The event from which on backward needs nothing of a region."""
        timeline, path = self.profile.timeline, self.regions[region].path
        assert timeline is not None
        return max(timeline.end(number) for number, site in enumerate(self.profile.sites) if is_in(site.path, path))

    def _above_saved(self, place: int) -> int:
        """By how much a region's forward, while it saves, is above all that it has saved in the end."""
        region, timeline = self.regions[place], self.profile.timeline
        assert timeline is not None
        inside = [n for i, p in self._inside.items() if p == place for n in self.items[i].storages]
        sizes = {number: self.profile.storages[number].bytes for number in inside}
        before = timeline.floor[region.start - 1] if region.start else 0
        most = max(
            timeline.floor[event] - before + sum(size for n, size in sizes.items() if timeline.freed[n] <= event)
            for event in range(region.start, region.stop)
        )
        return max(0, most - sum(sizes.values()))

    def ones(self, choice: Sequence[int]) -> tuple[list[int], list[int]]:
        """The regions that run again, and the modules that a fused op computes."""
        beyond = choice[len(self.items) :]
        again, fused = beyond[: len(self.regions)], beyond[len(self.regions) :][: len(self.fusibles)]
        return [place for place, one in enumerate(again) if one], [place for place, one in enumerate(fused) if one]

    def needed(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same, but nothing is held for regions that do not run again; which costs no time, so that it may be."""
        given = {number for place in self.ones(choice)[0] for number in self.regions[place].given}
        first = len(self.items) + len(self.regions) + len(self.fusibles)
        held = {first + place: int(number in given) for place, number in enumerate(self._unsaved)}
        return tuple(held.get(group, number) for group, number in enumerate(choice))

    def held(self, choice: Sequence[int]) -> list[tuple[str, int]]:
        """(the first region that is given it, bytes) of what is held for regions alone."""
        timeline, found = self.profile.timeline, dict[int, tuple[str, int]]()
        for region in (self.regions[place] for place in self.ones(choice)[0]):
            for number in region.given:
                if timeline is not None and number in self._unsaved:
                    found.setdefault(number, (region.path, timeline.given[number].bytes))
        return list(found.values())

    def problem(self, bound: Bound, tolerance: Tolerance) -> Problem:
        slower = None if tolerance.max_slowdown is None else tolerance.max_slowdown - 1
        return Problem(
            floor=self.floor,
            groups=self.groups,
            most_peak=None if bound.peak is None else bound.peak - self.fixed,
            most_kept=None if bound.kept is None else bound.kept - self.kept_beside,
            most_seconds=None if slower is None else slower * self.costs.step_seconds,
            most_error=tolerance.max_error**2,
            most_link=CARRIED * self.costs.forward_seconds,
        )


def _without_codes(
    offers: tuple[tuple[Offer, ...], ...], fusibles: tuple[Fusible, ...]
) -> tuple[tuple[Offer, ...], ...]:
    """A few bits of what a fused op may compute are that op's: it would be taken in any case, and is the faster way."""
    inside = {item for fusible in fusibles for item in fusible.items}
    return tuple(
        tuple(
            offer for offer in group if item not in inside or not any(isinstance(p.codec, FewBit) for p in offer.packs)
        )
        for item, group in enumerate(offers)
    )
