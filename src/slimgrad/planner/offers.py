"""Offers: what can be done to each storage of a profile, with the bytes that come of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from slimgrad.codecs import Blocks, Bounded, Codec, Demand, Derive, FewBit, Lossless, Offload, Quant, TopK
from slimgrad.errors import SpecError
from slimgrad.planner.problem import Span
from slimgrad.runtime.reruns import PRODUCTS
from slimgrad.spec import NO_SITE, OUTSIDE, Need, Profile, Site

DERIVE, FEWBIT, QUANT, RECOMPUTE = "derive", "fewbit", "quant", "recompute"

CHOICES: dict[str, tuple[tuple[Codec, ...], ...]] = {
    "lossless": ((Lossless(),),),
    DERIVE: ((Derive(), Lossless()), (Derive(products=True), Lossless())),
    FEWBIT: ((FewBit(bits=3), Lossless()),),
    QUANT: tuple((Quant(bits=bits), Lossless()) for bits in (8, 4)),
    "quant-low": tuple((Quant(bits=bits), Lossless()) for bits in (3, 2)),
    "topk": tuple((TopK(keep=keep), Lossless()) for keep in (0.3, 0.1)),
    "bounded": ((Bounded(bound=0.01, relative=True), Lossless()),),
    "blocks": tuple((Blocks(keep=k, means=m, unbiased=True), Lossless()) for k, m in ((0.7, 8), (0.5, 16))),
    "offload": ((Offload(), Lossless()),),
}
"""What a plan may do to a storage, by the names that `allow` takes; "recompute" is for modules, and "fewbit" for those
too that a fused op can compute. Each is a list of codecs, of which every saver takes the first that serves it."""

ALLOWED = ("lossless", DERIVE, RECOMPUTE, FEWBIT, QUANT)
"""By default: what trained to the untouched model's accuracy on six real trainings (docs/accuracy.md). Fewer than four
bits, and dropping elements, cost accuracy on some; what offloading costs was not measured on a GPU yet."""
EXACT = ("lossless", DERIVE, RECOMPUTE)

KEPT, GROUPS, FUSED, DERIVED, MULTIPLIED = "kept", "groups", "fused", "derived", "multiplied"
"""Where the main source of what is made again is, by which what it takes differs. FUSED: in the groups that a fused op
keeps. MULTIPLIED: derived, by a product; no other runs again upon that, or a whole network would."""

VALUES_NEEDED = (Need.DERIVATIVE, Need.OPERAND, Need.VALUES)

WHOLE = 0.9
"""As parts.COVERED: views with gaps that make up so much of a storage are packed as one."""


def allowed(allow: str | Collection[str] | None) -> tuple[str, ...]:
    """The names in `allow`; "exact" is all that changes no gradient."""
    if allow is None:
        return ALLOWED
    given = (allow,) if isinstance(allow, str) else allow
    if not isinstance(given, Iterable):
        raise SpecError(f"allow: expected 'exact' or a list of names such as ['derive', 'quant']; found {allow!r}")
    known = {name: (name,) for name in (*CHOICES, RECOMPUTE)} | {"exact": EXACT}
    names: list[str] = []
    for name in given:
        if not isinstance(name, str) or name not in known:
            raise SpecError(f"allow: expected 'exact' or some of {', '.join((*CHOICES, RECOMPUTE))}; found {name!r}")
        names += known[name]
    if not names:
        raise SpecError("allow: expected names, found none; leave it out for the default, or say allow='exact'")
    return tuple(dict.fromkeys(names))


def exact_of(names: Collection[str]) -> tuple[str, ...]:
    """Those of them that lose nothing."""
    lossy = {name for name, choices in CHOICES.items() if any(codec.lossy for codecs in choices for codec in codecs)}
    return tuple(name for name in names if name not in lossy)


@dataclass(frozen=True)
class Item:
    """Storages that are decided together: one, or copies of one tensor in several."""

    number: int
    storages: tuple[int, ...]
    sites: tuple[int, ...]


def items_of(profile: Profile, least: int, *, outside: bool = True) -> list[Item]:
    """What there is to decide: all storages that count and are worth it; those saved outside the model too, or not."""
    joined: dict[int, int] = {}
    by_content: dict[int, int] = {}
    for number, storage in enumerate(profile.storages):
        beyond = any(profile.sites[site].path == OUTSIDE for site in storage.savers)
        if not storage.counted or storage.bytes < least or (beyond and not outside):
            continue
        joined[number] = number
        for site in storage.savers:
            other = by_content.setdefault(profile.sites[site].content, number)
            if other != number:
                old, new = joined[number], joined[other]
                joined = {n: new if root == old else root for n, root in joined.items()}
    roots: dict[int, list[int]] = {}
    for number, root in joined.items():
        roots.setdefault(root, []).append(number)
    return [
        Item(place, tuple(group), tuple(site for n in group for site in profile.storages[n].savers))
        for place, group in enumerate(roots.values())
    ]


@dataclass(frozen=True)
class Pack:
    """One Packed that several savers share."""

    codec: Codec
    need: Need
    bytes: int
    dense: int
    """Bytes of what is packed."""
    savers: tuple[int, ...]


@dataclass(frozen=True)
class Offer:
    """One thing that can be done to an item."""

    codecs: tuple[Codec, ...]
    """As rules, the first first; none keeps it as it is."""
    packs: tuple[Pack, ...] = ()
    derived: tuple[tuple[int, int], ...] = ()
    """(site, which of its sources' ways) of each that is made again."""
    source: str = ""
    """Where that is made of what is KEPT, in GROUPS, FUSED, DERIVED itself, or MULTIPLIED."""
    multiplies: bool = False
    """Whether a product runs again for that, or for what it is made of."""
    entering: bool = False
    """Whether modules that save it may run again, where others save it too, or made it."""

    @property
    def held(self) -> int:
        return sum(pack.bytes for pack in self.packs)


class Desk:
    """Makes the offers for a profile."""

    def __init__(
        self,
        profile: Profile,
        allow: Collection[str],
        decided: Collection[int] | None = None,
        grouped: Collection[int] = (),
    ) -> None:
        self.profile = profile
        self._grouped = frozenset(grouped)
        """Sites of modules that a fused op may compute, whose groups tell what it made."""
        self._decided = range(len(profile.sites)) if decided is None else decided
        """Sites of storages that are decided about; all others are kept as they are."""
        device = torch.device(profile.device)
        choices = (codecs for name in allow for codecs in CHOICES.get(name, ()))
        self._choices = [codecs for codecs in choices if all(codec.works_on(device) for codec in codecs)]

    @cached_property
    def _inputs(self) -> Mapping[tuple[str, int, str], Site]:
        """(path, call, node) -> the site of the node's own input, whose shape an index is relative to."""
        return {(site.path, site.call, site.node): site for site in self.profile.sites if site.slot == "self"}

    def offers(self, item: Item) -> list[Offer]:
        """All that saves bytes, and doing nothing; each outcome once."""
        size = sum(self.profile.storages[number].bytes for number in item.storages)
        found = [Offer(())]
        for codecs in self._choices:
            for offer in self._made(item, codecs):
                outcome = offer.packs, offer.derived, offer.source
                if offer.held < size and outcome not in [(o.packs, o.derived, o.source) for o in found]:
                    found.append(offer)
        return found

    def _made(self, item: Item, codecs: Sequence[Codec]) -> Iterator[Offer]:
        """One offer, or one for each way to make again what is made again."""
        served = {site: self._first(site, codecs) for site in item.sites}
        if None in served.values():
            return
        derived = {site: self._ways(site, codec) for site, codec in served.items() if isinstance(codec, Derive)}
        packs = tuple(self._packs(item, {s: c for s, c in served.items() if c is not None and s not in derived}))
        for place in range(max(map(len, derived.values()), default=1)):
            ways = tuple((site, found[min(place, len(found) - 1)]) for site, found in derived.items())
            own = any(multiplies(self.profile, *each) for each in ways)
            for source in self._sources(ways, own):
                yield Offer(tuple(codecs), packs, ways, source, own or source == MULTIPLIED)

    def _sources(self, derived: Sequence[tuple[int, int]], multiplies: bool) -> list[str]:
        """Where the main source may be; the first site tells, because the others are copies of it."""
        if not derived:
            return [""]
        main = main_source(self.profile, *derived[0])
        if main is None or main not in self._decided:
            return [KEPT]
        found = [KEPT, *([GROUPS] if self.lossy and self.profile.sites[main].need in VALUES_NEEDED else [])]
        found += [FUSED] if self._is_first_fused(*derived[0]) else []
        found += [DERIVED] if ways_of(self.profile, main, products=False) else []
        return found + ([MULTIPLIED] if not multiplies and self.profile.sites[main].sources else [])

    def _is_first_fused(self, number: int, way: int) -> bool:
        """Whether this is the first way that begins with what such a module saves; with the op there is one alone."""
        sources = self.profile.sites[number].sources
        return next((w for w, s in enumerate(sources) if not self._grouped.isdisjoint(s)), None) == way

    @cached_property
    def lossy(self) -> bool:
        """Whether anything may be in groups of a few bits."""
        return any(isinstance(codec, Quant) for codecs in self._choices for codec in codecs)

    def _ways(self, number: int, codec: Derive) -> list[int]:
        """Those that the codec may take; every site that it serves has one."""
        return ways_of(self.profile, number, products=codec.products)

    def _first(self, number: int, codecs: Sequence[Codec]) -> Codec | None:
        site = self.profile.sites[number]
        return next((codec for codec in codecs if self._serves(codec, number, site)), None)

    def _serves(self, codec: Codec, number: int, site: Site) -> bool:
        if isinstance(codec, Derive):
            return bool(self._ways(number, codec)) and site.need in VALUES_NEEDED
        return codec.serves(self.demand(site), getattr(torch, site.dtype))

    def demand(self, site: Site) -> Demand:
        """What backward demands there, as far as a profile tells; a parameter's copy is told by its name."""
        detail = dict(site.detail)
        if site.need is Need.INDEX:
            of = self._inputs.get((site.path, site.call, site.node))
            rank = len(detail.get("kernel_size", ())) or (3 if "3D" in site.node else 2)
            detail["input_size"] = (of or site).shape[-rank:]
        stand_in = torch.empty(0) if site.parameter is not None else None
        return Demand(need=site.need, fn=site.fn, detail=detail, parameter=stand_in)

    def _packs(self, item: Item, served: Mapping[int, Codec]) -> Iterator[Pack]:
        """What is packed, each once: values of one content together, with the mask that can be read off them."""
        groups: dict[tuple[Any, ...], list[int]] = {}
        for number, codec in served.items():
            site = self.profile.sites[number]
            groups.setdefault(self._key(site, codec, served), []).append(number)
        for (codec, *_), savers in groups.items():
            yield self._pack(codec, savers)

    def _key(self, site: Site, codec: Codec, served: Mapping[int, Codec]) -> tuple[Any, ...]:
        if codec.elementwise:
            return codec, None if self._fills(site, served) else site.content
        if site.need is Need.MASK and site.fn == "relu":
            for other, its in served.items():
                if its.elementwise and its.holds_values and self.profile.sites[other].content == site.content:
                    return its, site.content  # its zeros are the mask
        return codec, site.need, site.fn, site.content, tuple(site.detail)

    def _fills(self, site: Site, served: Mapping[int, Codec]) -> bool:
        """Whether it is one of several views that make up its storage, which is packed whole."""
        storage = self.profile.storages[site.storage]
        views = {self.profile.sites[s].content: self.profile.sites[s].bytes for s in storage.savers if s in served}
        total = sum(views.values())
        return len(views) > 1 and site.bytes < WHOLE * storage.bytes and storage.bytes >= total >= WHOLE * storage.bytes

    def _pack(self, codec: Codec, savers: Sequence[int]) -> Pack:
        sites = [self.profile.sites[number] for number in savers]
        lead = max(sites, key=lambda site: site.need.rank)
        dtype = getattr(torch, lead.dtype)
        demand = self.demand(lead)
        shape, dense = lead.shape, lead.bytes
        if codec.elementwise and len({site.content for site in sites}) > 1:
            dense = self.profile.storages[lead.storage].bytes
            shape = (dense // dtype.itemsize,)
        if codec.elementwise:
            has_mask = any(site.need is Need.MASK for site in sites)
            demand = Demand(need=lead.need, fn=lead.fn, detail=lead.detail, zeros=has_mask)
        return Pack(codec, lead.need, codec.promised(shape, dtype, demand), dense, tuple(savers))


def main_source(profile: Profile, number: int, way: int) -> int | None:
    """The largest of what a site is made of, if that is autograd's own."""
    own = [n for n in profile.sites[number].sources[way] if profile.storages[profile.sites[n].storage].counted]
    return max(own, key=lambda n: profile.sites[n].bytes, default=None)


def ways_of(profile: Profile, number: int, *, products: bool) -> list[int]:
    """The ways to make a site again; those in which matrices are multiplied, too, or not."""
    ways = range(len(profile.sites[number].runs))
    return [way for way in ways if products or not multiplies(profile, number, way)]


def multiplies(profile: Profile, number: int, way: int) -> bool:
    """Whether a product is run again, to make a site in this way."""
    return any(is_product(profile, run) for run in profile.sites[number].runs[way])


def is_product(profile: Profile, run: int) -> bool:
    """Whether the op that saves this site, and runs again, multiplies matrices."""
    return run != NO_SITE and profile.sites[run].node in PRODUCTS


def dense_again(profile: Profile, item: Item, sites: Collection[int] | None = None) -> Iterator[Span]:
    """The dense copies that the timeline has while backward reads, where there is no need of them: of all savers, or of
    those of `sites`.
    """
    timeline = profile.timeline
    assert timeline is not None
    for number in item.storages:
        storage = profile.storages[number]
        for site in storage.savers:
            read = timeline.read[site]
            if read is not None and (sites is None or site in sites):
                yield Span(read, timeline.end(site), -min(profile.sites[site].bytes, storage.bytes))
