"""Telling: what sources must do for what is made again of them, which is to tell their values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from slimgrad.codecs import Derive, Keep, Lossless, Quant
from slimgrad.planner.offers import DERIVED, FUSED, GROUPS, KEPT, MULTIPLIED, Item, Offer, main_source
from slimgrad.planner.problem import Link
from slimgrad.runtime.ways import MOST_RERUNS
from slimgrad.spec import Need, Profile

SOURCES = {True: (KEPT, GROUPS, DERIVED, MULTIPLIED), False: (KEPT, GROUPS, DERIVED)}
"""Where the sources besides the main one may be: whether that is made by a product."""


@dataclass(frozen=True)
class Telling:
    """Among the items of one profile."""

    profile: Profile
    items: tuple[Item, ...]
    offers: tuple[tuple[Offer, ...], ...]
    """Of each item; its first options, in this order."""
    beyond: tuple[int, ...]
    """How many options each item has after these, which tell nothing."""
    grouped: frozenset[int]
    """Sites of modules that a fused op may compute, whose groups tell what it made."""

    def needs(self, offer: Offer) -> list[Link]:
        """What others must do for what is made again: tell the values it is made of, unless a fused op does."""
        found: dict[int, frozenset[int]] = {}
        for site, way in offer.derived:
            reruns = self.profile.sites[site].reruns[way]
            for source in self.profile.sites[site].sources[way]:
                item = self._item_of.get(source)
                if item is None or (offer.source == FUSED and source in self.grouped):
                    continue
                is_main = source == main_source(self.profile, site, way)
                states = (offer.source,) if is_main else SOURCES[offer.source == MULTIPLIED]
                telling = frozenset(
                    number
                    for number, other in enumerate(self.offers[item])
                    if self._tells(other, source, reruns) and _state(other, source) in states
                )
                found[item] = found.get(item, telling) & telling
            found = self._not_by_earlier_ways(found, site, way)
        return list(found.items())

    def _not_by_earlier_ways(self, found: dict[int, frozenset[int]], site: int, way: int) -> dict[int, frozenset[int]]:
        """Backward takes the first way that is open: of each one before, a source must not tell its values."""
        sources, reruns = self.profile.sites[site].sources, self.profile.sites[site].reruns
        for earlier in range(way):
            apart = next((s for s in sources[earlier] if s not in sources[way] and s in self._item_of), None)
            if apart is not None:
                item = self._item_of[apart]
                offers = self.offers[item]
                telling = {n for n, offer in enumerate(offers) if self._tells(offer, apart, reruns[earlier])}
                silent = frozenset(range(len(offers) + self.beyond[item])) - telling
                found[item] = found.get(item, silent) & silent
        return found

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

    @cached_property
    def _item_of(self) -> dict[int, int]:
        return {site: item.number for item in self.items for site in item.sites}


def _state(offer: Offer, site: int) -> str:
    """Where the values of a site are."""
    if site in dict(offer.derived):
        return MULTIPLIED if offer.multiplies else DERIVED
    packs = (pack for pack in offer.packs if site in pack.savers)
    return GROUPS if any(isinstance(pack.codec, Quant) for pack in packs) else KEPT
