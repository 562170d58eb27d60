"""Choices: a profile as a knapsack, with all that does not depend on the budget."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import add

import torch

from slimgrad.codecs import Codec, FewBit
from slimgrad.planner.bounds import Bound, Tolerance
from slimgrad.planner.calibration import Calibration
from slimgrad.planner.costs import Costs
from slimgrad.planner.fusing import GROUPED_OP, Fusible, fusibles_of, moments
from slimgrad.planner.making import Making
from slimgrad.planner.offers import FUSED, RECOMPUTE, Desk, Item, Offer, dense_again, items_of
from slimgrad.planner.plan import AGAIN, FUSING
from slimgrad.planner.problem import Link, Option, Problem, Span
from slimgrad.planner.regions import regions_of
from slimgrad.planner.running import Running
from slimgrad.planner.sensitivity import Sensitivity
from slimgrad.planner.spans import Spans
from slimgrad.planner.telling import Telling
from slimgrad.runtime.orders import least_bytes
from slimgrad.spec import OUTSIDE, Profile
from slimgrad.spec.budgets import as_bytes

WAITS = 16
"""Shares of what could be offloaded for which the device may be made to wait, instead of the link for the device."""

CARRIED = 0.8
"""Of the time that forward takes, how much the link to the host is counted on."""


OWN = frozenset([0])
"""How a module is computed: by its own forward."""


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
    running: Running
    fusibles: tuple[Fusible, ...]
    reserved: int
    least: int
    making: Making

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
        items = tuple(items_of(profile, least, outside=outside))
        fusibles = fusibles_of(profile, items, least, names)
        desk = Desk(profile, names, {site for item in items for site in item.sites}, _grouped(fusibles))
        running = Running(profile, items, regions_of(profile) if RECOMPUTE in names else ())
        offers = tuple(_with_entering(desk.offers(item), running, item) for item in items)
        costs, reserved = Costs(profile, calibration, sensitivity), as_bytes(reserve)
        making = Making(costs, desk.lossy)
        return cls(profile, costs, items, _without_codes(offers, fusibles), running, fusibles, reserved, least, making)

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
        alone = timeline.untouched(replace(self.profile, storages=tuple(others)))
        return tuple(map(add, alone, self.costs.workspaces))

    @cached_property
    def untouched(self) -> tuple[int, ...]:
        """Bytes of each event of the step as stock autograd runs it, without what is there before."""
        timeline = self.profile.timeline
        return () if timeline is None else tuple(map(add, timeline.untouched(self.profile), self.costs.workspaces))

    @cached_property
    def kept_beside(self) -> int:
        """What is kept and not decided about."""
        decided = sum(self.profile.storages[number].bytes for item in self.items for number in item.storages)
        return self.profile.kept_bytes - decided

    @cached_property
    def _telling(self) -> Telling:
        beyond = tuple(len(self.beyond(item)) for item in self.items)
        return Telling(self.profile, self.items, self.offers, beyond, _grouped(self.fusibles))

    @cached_property
    def _spans(self) -> Spans:
        return Spans(self.profile, self.costs, self.running, self.making)

    @cached_property
    def groups(self) -> tuple[tuple[Option, ...], ...]:
        items = [self._options(item) for item in self.items]
        regions = [self._region_options(place) for place in range(len(self.running.regions))]
        fused = [self._fusible_options(fusible) for fusible in self.fusibles]
        given = [self._given_options(number) for number in self.running.unsaved]
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
        region, fusible = self.running.inside.get(item.number), self._fusing.get(item.number)
        needs = [] if region is None else [self._runs(region, again=False)]
        needs += [] if fusible is None else [self._computed(fusible, OWN)]
        options = [self._option(item, offer, tuple(needs)) for offer in self.offers[item.number]]
        again = () if region is None else (self._again(item, region),)
        return (*options, *again, *(() if fusible is None else (self._fused(item, fusible),)))

    def beyond(self, item: Item) -> list[str]:
        """What becomes of an item by what is done to the module around it: the options after its offers."""
        words = ((AGAIN, self.running.inside), (FUSING, self._fusing))
        return [word for word, around in words if item.number in around]

    def _runs(self, region: int, *, again: bool) -> Link:
        return len(self.items) + region, frozenset([int(again)])

    def _computed(self, fusible: int, ways: Collection[int]) -> Link:
        """In one of these ways: OWN, and then the ops of which it has the choice."""
        return self._group_of_fusible(fusible), frozenset(ways)

    def _group_of_fusible(self, place: int) -> int:
        return len(self.items) + len(self.running.regions) + place

    def _option(self, item: Item, offer: Offer, needs: tuple[Link, ...]) -> Option:
        if offer.codecs and not offer.entering:
            needs = (*needs, *(self._runs(region, again=False) for region in self.running.shared_with(item)))
        if offer.derived:
            needs = (*needs, *self._makers(offer))
        kept = offer.held if offer.codecs else self.bytes_of(item)
        return Option(
            seconds=self.costs.seconds(offer) + self.making.seconds(offer),
            error=self.costs.error(item, offer) + self.making.error(offer),
            kept=kept,
            spans=self._spans.of(item, offer),
            link=self.costs.link_seconds(offer),
            needs=(*needs, *self._telling.needs(offer)),
        )

    def bytes_of(self, item: Item) -> int:
        return sum(self.profile.storages[number].bytes for number in item.storages)

    # --- fused ops ---

    @cached_property
    def _fusing(self) -> dict[int, int]:
        """Item -> the module for which alone it is kept, of those that an op may compute."""
        return {item: place for place, fusible in enumerate(self.fusibles) for item in fusible.items}

    def _makers(self, offer: Offer) -> Iterator[Link]:
        """How modules must be computed for what is derived to be made of what is saved there."""
        sources = {source for site, way in offer.derived for source in self.profile.sites[site].sources[way]}
        for place, fusible in enumerate(self.fusibles):
            if not sources.isdisjoint(fusible.sites):
                is_fused = offer.source == FUSED and GROUPED_OP in fusible.ops
                yield self._computed(place, OWN if not is_fused else [1 + fusible.ops.index(GROUPED_OP)])

    def held_in(self, item: Item, choice: Sequence[int]) -> int:
        """What is kept of it where a fused op computes the module: of several items, the first has it all."""
        place = self._fusing[item.number]
        fusible, way = self.fusibles[place], choice[self._group_of_fusible(place)]
        return fusible.held[way - 1] if way and fusible.items[0] == item.number else 0

    def _fused(self, item: Item, fusible: int) -> Option:
        """It is not there at all."""
        timeline = self.profile.timeline
        assert timeline is not None
        by_an_op = self._computed(fusible, range(1, 1 + len(self.fusibles[fusible].ops)))
        return Option(0.0, 0.0, 0, tuple(dense_again(self.profile, item)), (by_an_op,))

    def _fusible_options(self, fusible: Fusible) -> tuple[Option, ...]:
        """In the order of OWN and its ops."""
        by_ops = (self._op_option(fusible, op, held) for op, held in zip(fusible.ops, fusible.held, strict=True))
        return Option(0.0, 0.0, 0), *by_ops

    def _op_option(self, fusible: Fusible, op: Codec, held: int) -> Option:
        timeline, costs = self.profile.timeline, self.costs
        assert timeline is not None
        start, stop = min(call.start for call in fusible.calls), max(map(timeline.end, fusible.sites))
        while_it_runs = moments(self.profile, self.items, fusible, costs.calibration.op_rate(op))
        around = {self.running.inside[item] for item in fusible.items if item in self.running.inside}
        return Option(
            seconds=costs.fused_seconds(fusible, op) - costs.unfused_seconds(fusible),
            error=costs.fused_error(fusible, op),
            kept=held,
            spans=(Span(start, stop, held), *while_it_runs),
            needs=tuple(self._runs(region, again=False) for region in sorted(around)),
        )

    # --- regions ---

    def _again(self, item: Item, region: int) -> Option:
        """Nothing is kept, and all is there again from where backward enters the region."""
        timeline = self.profile.timeline
        assert timeline is not None
        start = self.running.entered(region)
        storages = [self.profile.storages[number] for number in item.storages]
        spans = [Span(start, max(map(timeline.end, storage.savers)), storage.bytes) for storage in storages]
        spans += dense_again(self.profile, item)
        needs = (self._runs(region, again=True),)
        return Option(0.0, 0.0, 0, tuple(span for span in spans if span.start < span.stop), needs)

    def _region_options(self, place: int) -> tuple[Option, ...]:
        region, timeline = self.running.regions[place], self.profile.timeline
        assert timeline is not None
        start = self.running.entered(place)
        above = self.running.above_saved(place, self.costs.workspaces)
        moment = Span(start, start + 1, max(0, above - self.costs.not_yet(start)))
        needs = tuple((self._group_of_given(number), frozenset([1])) for number in self.running.unsaved_in[place])
        small = self.running.small_in(place)
        gone = [Span(timeline.freed[number], start, -self.profile.storages[number].bytes) for number in small]
        twice = [self.running.span_in(place, number) for number in self.running.left_by(place)]
        spans = [span for span in (moment, *gone, *twice) if span.bytes and span.start < span.stop]
        kept = -sum(self.profile.storages[number].bytes for number in small)
        return Option(0.0, 0.0, 0), Option(self.costs.region_seconds(region), 0.0, kept, tuple(spans), needs)

    def _given_options(self, number: int) -> tuple[Option, ...]:
        timeline = self.profile.timeline
        assert timeline is not None
        given = timeline.given[number]
        stop = max(self.running.left(place) for place, held in enumerate(self.running.unsaved_in) if number in held)
        span = Span(given.freed, stop, given.bytes)
        return Option(0.0, 0.0, 0), Option(0.0, 0.0, given.bytes, (span,) if span.start < span.stop else ())

    def _group_of_given(self, number: int) -> int:
        modules = len(self.running.regions) + len(self.fusibles)
        return len(self.items) + modules + self.running.unsaved.index(number)

    def again(self, choice: Sequence[int]) -> list[int]:
        """The regions that run again."""
        return [place for place in range(len(self.running.regions)) if choice[len(self.items) + place]]

    def fused(self, choice: Sequence[int]) -> list[tuple[str, Codec]]:
        """The modules that a fused op computes, and how."""
        ways = choice[self._group_of_fusible(0) :]
        return [(one.path, one.ops[way - 1]) for one, way in zip(self.fusibles, ways, strict=False) if way]

    def needed(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The same, but nothing is held for regions that do not run again; which costs no time, so that it may be."""
        given = {number for place in self.again(choice) for number in self.running.unsaved_in[place]}
        held = {self._group_of_given(number): int(number in given) for number in self.running.unsaved}
        return tuple(held.get(group, number) for group, number in enumerate(choice))

    def held(self, choice: Sequence[int]) -> list[tuple[str, int]]:
        """(the first region that is given it, bytes) of what is held for regions alone."""
        timeline, found = self.profile.timeline, dict[int, tuple[str, int]]()
        for place in self.again(choice):
            for number in self.running.unsaved_in[place]:
                assert timeline is not None
                found.setdefault(number, (self.running.regions[place].path, timeline.given[number].bytes))
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


def _with_entering(offers: Sequence[Offer], running: Running, item: Item) -> tuple[Offer, ...]:
    """And those for regions around some of its savers that run again: what they are given must tell its values, and
    knows no maker where it is saved for another run.
    """
    shared, given = running.shared_with(item), running.given_to(item)
    serving = (o for o in offers if not given or (not o.derived and any(p.codec.holds_values for p in o.packs)))
    return (*offers, *(replace(offer, entering=True) for offer in serving if shared and offer.codecs))


def _grouped(fusibles: Sequence[Fusible]) -> frozenset[int]:
    """Sites of those whose groups tell what they made."""
    return frozenset(site for fusible in fusibles if GROUPED_OP in fusible.ops for site in fusible.sites)


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
