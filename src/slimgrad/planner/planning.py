"""plan: the fastest way to keep a step within a budget, and among the fastest the most faithful."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from slimgrad.codecs import Derive, Keep, Lossless
from slimgrad.errors import BudgetError, SpecError
from slimgrad.planner.calibration import Calibration, Progress, calibrate
from slimgrad.planner.costs import Costs
from slimgrad.planner.offers import RECOMPUTE, Desk, Item, Offer, allowed, items_of, spans_of
from slimgrad.planner.plan import AGAIN, Action, Plan, wording
from slimgrad.planner.problem import Option, Problem, Solution, Span
from slimgrad.planner.regions import is_in, regions_of
from slimgrad.planner.sensitivity import Sensitivity
from slimgrad.planner.solve import smallest, solve, usage
from slimgrad.report.human import human_bytes
from slimgrad.runtime.derivations import MOST_RERUNS
from slimgrad.runtime.orders import MIN_BYTES
from slimgrad.spec import Need, Profile
from slimgrad.spec.budgets import as_bytes, bytes_of
from slimgrad.spec.timeline import Region

Budget = str | int | float
Link = tuple[int, frozenset[int]]
"""(group, options of it), as Option.needs."""

DEFAULT_ERROR = 0.35
"""What `max_error` is where it is not given: that of four bits everywhere, which trained to the untouched accuracy on
six real trainings (docs/accuracy.md)."""


@dataclass(frozen=True)
class Bound:
    """A budget, understood: of the peak in bytes, or of what is kept."""

    text: str
    peak: int | None = None
    kept: int | None = None


def bound_of(budget: Budget, kept_before: int) -> Bound:
    """Bytes as a number or as text bound the peak; a ratio such as 0.25, or "4x" less, bounds what is kept."""
    if isinstance(budget, str) and budget.strip().lower().endswith("x"):
        try:
            return bound_of(1 / float(budget.strip()[:-1]), kept_before)
        except (ValueError, ZeroDivisionError) as error:
            raise SpecError(f"budget: expected bytes such as '12GiB', or '4x'; found {budget!r}") from error
    if isinstance(budget, str):
        return Bound(budget, peak=bytes_of(budget))
    if isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0:
        raise SpecError(f"budget: expected bytes such as '12GiB', or a ratio such as 0.25 or '4x'; found {budget!r}")
    if budget <= 1:
        return Bound(f"{1 / budget:g}x less kept", kept=math.floor(budget * kept_before))
    return Bound(human_bytes(budget), peak=int(budget))


def plan(
    profile: Profile,
    budget: Budget,
    *,
    max_slowdown: float | None = None,
    max_error: float | None = None,
    allow: str | Collection[str] | None = None,
    reserve: str | int = 0,
    sensitivity: Sensitivity | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    min_bytes: int | None = None,
) -> Plan:
    """What becomes of each storage so that a step stays within `budget`, at the least cost in time.

    `budget` is the most that the device may hold in a step, parameters, gradients and batch included: bytes, or text
    such as "12GiB". A ratio such as 0.25, or "4x", is of what is kept at the end of forward. `reserve` is what else
    must fit, such as the optimizer's state. `max_slowdown=1.1` bounds the time of a step, `max_error` the relative error
    of its gradient (by default that of four bits everywhere), and `allow` what may be done: "exact", or names such as
    "derive" and "quant". What codecs do to gradients is taken from `sensitivity`, if that was measured. Without a
    `calibration`, this device is measured once; it takes seconds and is remembered.
    """
    speeds = calibration or calibrate(device_of(profile), progress=progress)
    draft = Draft.of(profile, allow, speeds, reserve, min_bytes, sensitivity)
    bound = bound_of(budget, profile.kept_bytes)
    return draft.plan(bound, max_slowdown, DEFAULT_ERROR if max_error is None else max_error)


def device_of(profile: Profile) -> torch.device:
    device = torch.device(str(profile.meta.get("device", "cpu")).partition(",")[0] or "cpu")
    return device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")


@dataclass(frozen=True)
class Draft:
    """All that does not depend on the budget."""

    profile: Profile
    costs: Costs
    items: tuple[Item, ...]
    offers: tuple[tuple[Offer, ...], ...]
    regions: tuple[Region, ...]
    reserved: int
    least: int

    @classmethod
    def of(
        cls,
        profile: Profile,
        allow: str | Collection[str] | None,
        calibration: Calibration,
        reserve: str | int,
        min_bytes: int | None = None,
        sensitivity: Sensitivity | None = None,
    ) -> Draft:
        names = allowed(allow)
        device = str(profile.meta.get("device", "cpu")).partition(":")[0]
        least = MIN_BYTES.get(device, MIN_BYTES["cuda"]) if min_bytes is None else min_bytes
        desk = Desk(profile, names)
        items = tuple(items_of(profile, least))
        regions = regions_of(profile) if RECOMPUTE in names else ()
        reserved = as_bytes(reserve)
        offers = tuple(tuple(desk.offers(item)) for item in items)
        return cls(profile, Costs(profile, calibration, sensitivity), items, offers, regions, reserved, least)

    @property
    def fixed(self) -> int:
        """Bytes that are there before the step."""
        meta = self.profile.meta
        return int(meta.get("model_bytes", 0)) + int(meta.get("batch_bytes", 0)) + self.reserved

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
    def _kept_beside(self) -> int:
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
        timeline = self.profile.timeline
        return [
            place
            for place, region in enumerate(self.regions)
            if timeline is not None
            and all(is_in(self.profile.sites[site].path, region.path) for site in item.sites)
            and all(timeline.born[number] >= region.start for number in item.storages)
        ]

    @cached_property
    def groups(self) -> tuple[tuple[Option, ...], ...]:
        items = [self._options(item) for item in self.items]
        return (*items, *(self._region_options(place) for place in range(len(self.regions))))

    def _options(self, item: Item) -> tuple[Option, ...]:
        region = self._inside.get(item.number)
        needs = () if region is None else (self._runs(region, again=False),)
        options = [self._option(item, offer, needs) for offer in self.offers[item.number]]
        return (*options, self._again(item, region)) if region is not None else tuple(options)

    def _runs(self, region: int, *, again: bool) -> Link:
        return len(self.items) + region, frozenset([int(again)])

    def _option(self, item: Item, offer: Offer, needs: tuple[Link, ...]) -> Option:
        if offer.derived:  # of a region's input its own node knows no maker where it is saved for another run
            needs = (*needs, *(self._runs(region, again=False) for region in self._given_to(item)))
        kept = offer.held if offer.codecs else self._bytes(item)
        spans = [] if self.profile.timeline is None else [*spans_of(self.profile, item, offer), *self._scratch(offer)]
        return Option(
            seconds=self.costs.seconds(offer),
            error=self.costs.error(item, offer),
            kept=kept,
            spans=tuple(spans),
            needs=(*needs, *self._sources(offer)),
        )

    def _bytes(self, item: Item) -> int:
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

    # --- regions ---

    def _again(self, item: Item, region: int) -> Option:
        """Nothing is kept, and all is there again from where backward enters the region."""
        timeline = self.profile.timeline
        assert timeline is not None
        start = self._entered(region)
        spans = [
            Span(start, max(timeline.end(s) for s in self.profile.storages[n].savers), self.profile.storages[n].bytes)
            for n in item.storages
        ]
        for site in item.sites:
            read = timeline.read[site]
            if read is not None:
                spans.append(Span(read, timeline.end(site), -self.profile.sites[site].bytes))
        needs = (self._runs(region, again=True),)
        return Option(0.0, 0.0, 0, tuple(span for span in spans if span.start < span.stop), needs)

    def _given_to(self, item: Item) -> list[int]:
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
        run = Option(self.costs.region_seconds(region), 0.0, 0, (moment,) if moment.bytes else ())
        return Option(0.0, 0.0, 0), run

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

    # --- the answer ---

    def problem(self, bound: Bound, max_slowdown: float | None, max_error: float) -> Problem:
        step = self.costs.step_seconds
        return Problem(
            floor=self.floor,
            groups=self.groups,
            most_peak=None if bound.peak is None else bound.peak - self.fixed,
            most_kept=None if bound.kept is None else bound.kept - self._kept_beside,
            most_seconds=None if max_slowdown is None else max(0.0, max_slowdown - 1) * step,
            most_error=max_error**2,
        )

    def plan(self, bound: Bound, max_slowdown: float | None, max_error: float) -> Plan:
        return self.traced(bound, max_slowdown, max_error)[0]

    def traced(self, bound: Bound, max_slowdown: float | None, max_error: float) -> tuple[Plan, tuple[int, ...]]:
        """The plan, and its bytes at each event, with what is there before the step."""
        if bound.peak is not None and self.profile.timeline is None:
            raise BudgetError(
                "a budget in bytes needs the profile's timeline, and there is none: "
                f"{self.profile.meta.get('no_timeline', 'it was made with timeline=False')}. A ratio, such as '4x', "
                "works all the same"
            )
        problem = self.problem(bound, max_slowdown, max_error)
        solution = self._without_a_higher_peak(problem) or solve(problem)
        if solution is None:
            raise self._infeasible(problem, bound)
        events = usage(problem, solution.choice)
        return self._told(solution, bound), tuple(self.fixed + int(size) for size in events)

    def _without_a_higher_peak(self, problem: Problem) -> Solution | None:
        """Where only what is kept is bounded: packing takes room for a moment, which no plan should have above what a
        step takes untouched, if there is one.
        """
        timeline = self.profile.timeline
        if problem.most_peak is not None or timeline is None:
            return None
        return solve(replace(problem, most_peak=max(timeline.untouched(self.profile))))

    def smallest(self, of: str, max_slowdown: float | None = None, max_error: float = DEFAULT_ERROR) -> Plan:
        """The plan that reaches least, of "peak" or of "kept"."""
        problem = self.problem(Bound("the least"), max_slowdown, max_error)
        return self._told(smallest(problem, "peak" if of == "peak" else "kept"), Bound(f"the least {of}"))

    def _infeasible(self, problem: Problem, bound: Bound) -> BudgetError:
        of = "peak" if bound.peak is not None else "kept"
        least = smallest(problem, "peak" if of == "peak" else "kept")
        told = self._told(least, bound)
        reached = told.peak_bytes if of == "peak" else told.kept_bytes
        assert reached is not None
        return BudgetError(
            f"no plan meets {bound.text}: the smallest reachable {of} is {human_bytes(reached)}. "
            f"{self._obstacles(problem, least, of)} More would fit with a larger max_error or max_slowdown, with "
            "allow= more, or with a smaller batch (sg.max_batch finds the largest)",
            smallest=reached,
        )

    def _obstacles(self, problem: Problem, solution: Solution, of: str) -> str:
        """The three that weigh most where it is tightest."""
        weights = [
            (self._weight(number, option, problem, solution, of), number) for number, option in self._taken(solution)
        ]
        heavy = [(size, number) for size, number in sorted(weights, reverse=True)[:3] if size > 0]
        if of == "peak":
            heavy.append((self.fixed, -1))
            heavy = sorted(heavy, reverse=True)[:3]
        names = ", ".join(f"{self._obstacle(number)} with {human_bytes(size)}" for size, number in heavy)
        return f"What weighs most there: {names}." if names else ""

    def _obstacle(self, number: int) -> str:
        return "parameters, buffers and batch" if number < 0 else self._action(self.items[number], None).site

    def _taken(self, solution: Solution) -> list[tuple[int, Option]]:
        return [(item.number, self.groups[item.number][solution.choice[item.number]]) for item in self.items]

    def _weight(self, number: int, option: Option, problem: Problem, solution: Solution, of: str) -> int:
        if of == "kept":
            return option.kept
        event = int(usage(problem, solution.choice).argmax())
        return sum(span.bytes for span in option.spans if span.start <= event < span.stop)

    def _told(self, solution: Solution, bound: Bound) -> Plan:
        profile, timeline = self.profile, self.profile.timeline
        again = [p for p in range(len(self.regions)) if solution.choice[len(self.items) + p] == 1]
        actions = tuple(self._action(item, solution.choice[item.number]) for item in self.items)
        return Plan(
            model=str(profile.meta.get("model", "")),
            device=str(profile.meta.get("device", "")),
            budget=bound.text,
            actions=tuple(sorted(actions, key=lambda action: -action.before)),
            recompute=tuple(self.regions[place].path for place in again),
            boundaries=tuple(found for place in again for found in self._boundary(place, solution)),
            kept_before=profile.kept_bytes,
            kept_bytes=self._kept_beside + solution.kept,
            peak_before=None if timeline is None else self.fixed + max(timeline.untouched(profile)),
            peak_bytes=None if timeline is None else self.fixed + solution.peak,
            fixed_bytes=self.fixed,
            seconds=solution.seconds,
            step_seconds=self.costs.step_seconds,
            error=math.sqrt(max(0.0, solution.error)),
            least=self.least,
        )

    def _boundary(self, place: int, solution: Solution) -> list[tuple[str, str]]:
        """What becomes of the largest tensor that a module which runs again is given."""
        given = [item for item in self.items if place in self._given_to(item)]
        if not given:
            return []
        lead = max(given, key=self._bytes)
        return [(self.regions[place].path, self._action(lead, solution.choice[lead.number]).what)]

    def _action(self, item: Item, choice: int | None) -> Action:
        sites = [self.profile.sites[number] for number in item.sites]
        lead = max(sites, key=lambda site: site.need.rank)
        options, offers = self.groups[item.number], self.offers[item.number]
        option = options[choice or 0]
        is_again = choice is not None and choice >= len(offers)
        return Action(
            site=lead.name,
            path=lead.path,
            module=lead.module,
            need=str(lead.need),
            keys=tuple(site.key for site in sites),
            what=AGAIN if is_again else wording(offers[choice or 0].codecs),
            before=self._bytes(item),
            after=option.kept,
            seconds=option.seconds,
            error=option.error,
        )
