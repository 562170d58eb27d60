"""Which of the tensors that rules would derive can be: those whose sources tell their values all the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn
from torch.autograd.graph import Node

from slimgrad.codecs import Demand, Derive, Keep, Lossless
from slimgrad.runtime.derivations import Derivation
from slimgrad.runtime.lesson import Lesson
from slimgrad.runtime.parts import Part
from slimgrad.runtime.reruns import OPS, PRODUCTS
from slimgrad.runtime.ways import MOST_RERUNS, MOST_WITH_PRODUCTS, Way, modules_in
from slimgrad.spec import Need

Parts = Mapping[int, Part]

EXACT_BITS = ("bool", "dropout")
"""Masks that are the tensor: one bit per element says all of it."""


def derived(parts: Parts, packed: Parts, lesson: Lesson) -> dict[int, Part] | None:
    """The parts of one storage with a way for each that is derived; None if one has no way that is open.

    `packed` is what was decided for storages that were saved before, which all sources were.
    """
    found = dict(parts)
    for saver, part in parts.items():
        if not isinstance(part.codec, Derive):
            continue
        derivation = lesson.derivations[saver]
        way = None if derivation is None else _open_way(derivation, packed, products=part.codec.products)
        if derivation is None or way is None:
            return None
        demand = Demand(need=Need.VALUES, derivation=derivation.by(way, exact=_is_exact(way, packed)))
        found[saver] = replace(part, demand=demand)
    return found


def _open_way(derivation: Derivation, packed: Parts, *, products: bool) -> Way | None:
    """The first of which every source tells its values, and that does not run too much again."""
    for way in derivation.open_ways(products=products):
        if all(_tells(packed.get(site)) for site in way.sites) and _is_short(way, packed):
            return way
    return None


def _is_short(way: Way, packed: Parts) -> bool:
    """Whether no product runs again upon what another one made, or a whole network would; and few ops in all."""
    behind = [_all_runs(source, packed) for source in _ways_behind(way, packed)]
    products = sum(OPS[name].is_product for runs in behind for name in runs)
    runs = way.reruns + sum(map(len, behind))
    if way.products or products:
        return not (way.products and products) and runs <= MOST_WITH_PRODUCTS
    return runs <= MOST_RERUNS


def _all_runs(way: Way, packed: Parts) -> list[str]:
    """The ops that run again, those for sources that are derived themselves included."""
    behind = (name for source in _ways_behind(way, packed) for name in _all_runs(source, packed))
    return [*(name for name, _ in way.runs), *behind]


def _ways_behind(way: Way, packed: Parts) -> Iterator[Way]:
    for site in way.sites:
        derivation = packed[site].demand.derivation if site in packed else None
        if isinstance(derivation, Derivation) and derivation.way is not None:
            yield derivation.way


def _tells(part: Part | None) -> bool:
    """Whether what is kept of a source stands for its values."""
    if part is None or isinstance(part.codec, Keep) or part.codec.holds_values:
        return True
    demand = part.demand
    exactly = demand.need in (Need.WEIGHT, Need.INDEX) or (demand.need is Need.MASK and demand.fn in EXACT_BITS)
    return isinstance(part.codec, Lossless) and exactly


def _is_exact(way: Way, packed: Parts) -> bool:
    """Whether all its sources are kept exactly, and its ops lose nothing."""
    sources = [packed[site] for site in way.sites if site in packed]
    derived = (part.demand.derivation for part in sources)
    is_lossy = way.is_lossy or any(part.codec.lossy for part in sources)
    return not is_lossy and all(d.exact for d in derived if isinstance(d, Derivation))


def readers_of(packed: Parts, lesson: Lesson) -> dict[int, tuple[str, ...]]:
    """Source -> the nodes that read it to make what they need."""
    found: dict[int, dict[str, None]] = {}
    ways = dict(_ways_in(packed))
    for saver, way in ways.items():
        pending = list(way.sites)
        while pending:
            site = pending.pop()
            found.setdefault(site, {})[lesson.profile.sites[saver].node] = None
            pending.extend(ways[site].sites if site in ways else ())
    return {site: tuple(names) for site, names in found.items()}


def reads_besides(packed: Parts, lesson: Lesson) -> dict[int, int]:
    """Of what is made again and read, besides by its own node, to make something else: how often that is. Only where
    making it is dear, or reading it is what a product does that runs again: that is held until then.
    """
    sites, ways = lesson.profile.sites, dict(_ways_in(packed))
    dear = {site for site, way in ways.items() if way.products or sites[site].node in PRODUCTS}
    readers: dict[int, dict[int, int]] = {}
    for saver, way in ways.items():
        for source in way.sites & ways.keys():
            readers.setdefault(source, {})[sites[saver].content] = saver  # copies are made together

    def reads(source: int) -> int:
        return sum(1 if site in dear else 1 + reads(site) for site in readers.get(source, {}).values())

    return {source: reads(source) for source in readers if source in dear}


def _ways_in(packed: Parts) -> Iterator[tuple[int, Way]]:
    for saver, part in packed.items():
        derivation = part.demand.derivation
        if isinstance(derivation, Derivation) and derivation.way is not None:
            yield saver, derivation.way


def asked_in(demand: Demand) -> Iterator[nn.Module]:
    """The modules that know an epsilon or a bias."""
    derivation = demand.derivation
    if isinstance(derivation, Derivation) and derivation.way is not None:
        yield from modules_in(derivation.way.what)


def of_node(demand: Demand, node: Node | None) -> Demand:
    """The demand for a tensor that lost its node."""
    derivation = demand.derivation
    assert isinstance(derivation, Derivation)
    assert node is not None
    return replace(demand, derivation=derivation.of(node))
