"""Making: what it takes to make a tensor again in backward, in time and in memory, by where its source is then."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from slimgrad.codecs import Quant
from slimgrad.planner.costs import Costs
from slimgrad.planner.offers import (
    DERIVED,
    FUSED,
    GROUPS,
    KEPT,
    MULTIPLIED,
    Offer,
    is_product,
    main_source,
    multiplies,
)
from slimgrad.planner.problem import Span
from slimgrad.runtime.ways import MOST_RERUNS
from slimgrad.spec import NO_SITE, Profile, Site

UNPACKED = Quant(bits=4)
"""Whose speed is taken for that of unpacking a source; 8 bits take 3 % longer."""

IN_GROUPS = (GROUPS, FUSED)
"""Sources that are groups of a few bits, whoever packed them."""


@dataclass(frozen=True)
class Making:
    """Of one profile on one device."""

    costs: Costs
    lossy: bool
    """Whether sources may be in groups of a few bits."""

    @property
    def profile(self) -> Profile:
        return self.costs.profile

    def seconds(self, offer: Offer) -> float:
        """Copies of one tensor are made together."""
        sites = self.profile.sites
        return math.fsum({sites[n].content: self._seconds(n, way, offer.source) for n, way in offer.derived}.values())

    def _seconds(self, number: int, way: int, source: str) -> float:
        site = self.profile.sites[number]
        if source != KEPT and site.chained[way]:
            return self.costs.chain_seconds(site.bytes)
        ops = math.fsum(self._op_seconds(site, run) for run in site.runs[way])
        return ops + self._source_seconds(number, way, source)

    def _op_seconds(self, site: Site, run: int) -> float:
        """Of an op, and of the cast behind it."""
        if run == NO_SITE:
            return self.costs.pass_seconds(2 * site.bytes)
        reads = self.profile.sites[run]
        cast = self._uncast(site, reads) + site.bytes if reads.dtype != site.dtype else 0
        return self._run_seconds(site, run) + (self.costs.pass_seconds(cast) if cast else 0.0)

    def _run_seconds(self, site: Site, run: int) -> float:
        """As in forward; without a timeline, by what it reads and writes, and multiplies."""
        timeline, reads = self.profile.timeline, self.profile.sites[run]
        if timeline is not None:
            return self.costs.events[timeline.saved[run]]
        flops = 2 * math.prod(site.shape) * self._summands(run) if is_product(self.profile, run) else 0
        return self.costs.product_seconds(flops, reads.bytes + 2 * site.bytes)

    def _summands(self, run: int) -> int:
        """Of each element that a product makes."""
        reads = self.profile.sites[run]
        beside = [site for site in self.profile.sites if (site.path, site.call, site.node) == _call(reads)]
        weight = next((site for site in beside if site.slot == "weight"), None)
        return reads.shape[-1] if weight is None else math.prod(weight.shape[1:])

    def _uncast(self, site: Site, reads: Site) -> int:
        """Bytes of what is made, before it is cast."""
        return site.bytes * _itemsize(reads) // _itemsize(site)

    def _source_seconds(self, number: int, way: int, source: str) -> float:
        """To have what it is made of, which is nobody's share where it is made for this alone."""
        main = main_source(self.profile, number, way)
        if source == KEPT or main is None:
            return 0.0
        reads = self.profile.sites[main]
        if source in IN_GROUPS:
            return self.costs.unpack_seconds(UNPACKED, reads.need, reads.bytes)
        return 0.0 if self._is_held(main, number, way) else self._seconds(main, 0, GROUPS)

    # --- memory ---

    def spans(self, offer: Offer) -> Iterator[Span]:
        """Beside the tensor itself: what it is made of and what lies between, for a moment; and what stays for those
        that read it soon.
        """
        timeline = self.profile.timeline
        for number, way in offer.derived:
            read = None if timeline is None else timeline.read[number]
            if timeline is None or read is None:
                continue
            moment = self._moment(number, way, offer.source) - self.costs.not_yet(read)
            if moment > 0:
                yield Span(read, read + 1, moment)
            yield from self._held(number, way, offer)

    def _moment(self, number: int, way: int, source: str) -> int:
        site, main = self.profile.sites[number], main_source(self.profile, number, way)
        if source in IN_GROUPS and site.chained[way]:
            return 0  # one kernel makes it; what is derived may be made of what is not in groups
        between = max(0, len(site.runs[way]) - 1) * site.bytes
        reads = [self.profile.sites[run] for run in site.runs[way] if run != NO_SITE]
        if reads and reads[0].dtype != site.dtype:
            between += self._uncast(site, reads[0])
        is_held = main is not None and self._stays(main, number, way, source)
        return between + (0 if source == KEPT or main is None or is_held else self.profile.sites[main].bytes)

    def _stays(self, main: int, number: int, way: int, source: str) -> bool:
        """Whether the main source is among what `_held` tells."""
        if multiplies(self.profile, number, way):
            return source == DERIVED
        return source == MULTIPLIED and (self._product(main) or (None,))[0] == main

    def _held(self, number: int, way: int, offer: Offer) -> Iterator[Span]:
        """Where a product runs again: what it makes, and what it reads if that is made too, are there until their own
        nodes have read them. What this is made of says so itself from the moment on at which its own node reads it. See
        reads_besides in runtime/deriving.py.
        """
        timeline, sites = self.profile.timeline, self.profile.sites
        read = None if timeline is None else timeline.read[number]
        if timeline is None or read is None or not offer.multiplies:
            return
        stops: dict[int, tuple[int, int]] = {}
        for source in self._own(number, way):
            stop = timeline.read[source]
            for held in self._kept_for(source, number, way, offer):
                content = sites[held].content
                stops[content] = max(stops.get(content, (0, 0)), (stop or 0, sites[held].bytes))
        yield from (Span(read, stop, size) for stop, size in stops.values() if read < stop)

    def _kept_for(self, source: int, number: int, way: int, offer: Offer) -> Iterator[int]:
        """What is held because this is made of a source."""
        if multiplies(self.profile, number, way):
            if offer.source == DERIVED and source == main_source(self.profile, number, way):
                yield source
            return
        product = self._product(source)
        if product is not None:
            yield product[0]
            yield from filter(None, [main_source(self.profile, *product)])

    def _own(self, number: int, way: int) -> list[int]:
        """The sources that are autograd's own."""
        sites, storages = self.profile.sites, self.profile.storages
        return [source for source in sites[number].sources[way] if storages[sites[source].storage].counted]

    def _product(self, number: int, most: int = MOST_RERUNS) -> tuple[int, int] | None:
        """The site that a product may make, and how: the one at the root of what this is made of, or this one, which
        is made so only if there is no other way.
        """
        ways = range(len(self.profile.sites[number].runs))
        if not ways or not most:
            return None
        main = None if multiplies(self.profile, number, 0) else main_source(self.profile, number, 0)
        behind = None if main is None else self._product(main, most - 1)
        own = next((way for way in ways if multiplies(self.profile, number, way)), None)
        return behind if behind is not None or own is None else (number, own)

    def _is_held(self, source: int, number: int, way: int) -> bool:
        """Whether what is made of a source for this is there still when its own node reads it."""
        ways = range(len(self.profile.sites[source].runs))
        return multiplies(self.profile, number, way) or any(multiplies(self.profile, source, other) for other in ways)

    # --- error ---

    def error(self, offer: Offer) -> float:
        """What is made of a source in few bits is off as that is."""
        if not self.lossy or offer.source in ("", KEPT):
            return 0.0
        sites = self.profile.sites
        found = {sites[n].content: self.costs.site_error(UNPACKED, n, sites[n].need) for n, _ in offer.derived}
        return math.fsum(found.values())


def _call(site: Site) -> tuple[str, int, str]:
    return site.path, site.call, site.node


def _itemsize(site: Site) -> int:
    return int(getattr(torch, site.dtype).itemsize)
