"""Spans: what an offer adds to each event of a step. See NOTE [What a storage adds] in spec/timeline.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from slimgrad.codecs import Offload
from slimgrad.kernels.transfer import AHEAD
from slimgrad.planner.costs import Costs
from slimgrad.planner.making import Making
from slimgrad.planner.offers import Item, Offer, dense_again
from slimgrad.planner.problem import Span
from slimgrad.planner.running import Running
from slimgrad.spec import Profile


@dataclass(frozen=True)
class Spans:
    """Of one profile on one device."""

    profile: Profile
    costs: Costs
    running: Running
    making: Making

    def of(self, item: Item, offer: Offer) -> tuple[Span, ...]:
        """Nothing where the profile has no timeline."""
        if self.profile.timeline is None:
            return ()
        found = [*self._held(item, offer), *self._scratch(offer), *self._travelling(item, offer)]
        found += self._beside_regions(item) if offer.entering else []
        return (*found, *self.making.spans(offer))

    def _held(self, item: Item, offer: Offer) -> list[Span]:
        """What is packed, or the storage as it is."""
        timeline = self.profile.timeline
        assert timeline is not None
        if offer.codecs:
            return [
                Span(min(timeline.saved[s] for s in pack.savers), max(map(timeline.end, pack.savers)), pack.bytes)
                for pack in offer.packs
            ]
        found = []
        for number in item.storages:
            storage = self.profile.storages[number]
            found.append(Span(timeline.freed[number], max(map(timeline.end, storage.savers)), storage.bytes))
        return [span for span in (*found, *dense_again(self.profile, item)) if span.start < span.stop]

    def _beside_regions(self, item: Item) -> Iterator[Span]:
        """Regions that run again need no copies of it for their readers: they make it, or unpack what they get."""
        timeline = self.profile.timeline
        assert timeline is not None
        for place in self.running.shared_with(item):
            yield from dense_again(self.profile, item, self.running.sites_in[place])
            for number in item.storages:
                if timeline.born[number] < self.running.regions[place].start:
                    yield self.running.span_in(place, number)

    def _travelling(self, item: Item, offer: Offer) -> list[Span]:
        """What goes to the host is on the device until it has arrived there, and comes back before it is read."""
        timeline, costs = self.profile.timeline, self.costs
        assert timeline is not None
        found = []
        for pack in offer.packs:
            if isinstance(pack.codec, Offload):
                rate = costs.calibration.rate(pack.codec, pack.need)
                freed = max(timeline.freed[number] for number in item.storages)
                saved = min(timeline.saved[saver] for saver in pack.savers)
                found.append(Span(freed, costs.later(saved, pack.dense * rate.pack), pack.dense))
                reads = {timeline.read[saver] for saver in pack.savers} - {None}
                early = -AHEAD * pack.dense * rate.unpack
                found += [Span(costs.later(read, early), read, pack.dense) for read in reads if read is not None]
        return [span for span in found if span.start < span.stop]

    def _scratch(self, offer: Offer) -> list[Span]:
        """Temporaries of packing and unpacking, which are gone before the op begins that the tensor is saved or read
        for; but what an op returns is packed when it has run.
        """
        timeline, costs = self.profile.timeline, self.costs
        assert timeline is not None
        found = []
        for pack in offer.packs:
            packing, unpacking = costs.scratch(pack)
            first = pack.savers[0]
            saved = timeline.saved[first]
            if self.profile.sites[first].is_result:
                found.append(Span(saved - 1, saved, pack.bytes + packing - costs.workspaces[saved - 1]))
            else:
                found.append(Span(saved, saved + 1, packing - costs.not_yet(saved)))
            reads = {timeline.read[site] for site in pack.savers} - {None}
            found += [Span(read, read + 1, unpacking - costs.not_yet(read)) for read in reads if read is not None]
        return [span for span in found if span.bytes > 0]
