"""From a lesson and rules to orders: what to do at each site, and at which modules to switch hooks on or off."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slimgrad.codecs import CODECS, Codec, Derive, Keep
from slimgrad.errors import RuleError
from slimgrad.rules import Rule
from slimgrad.runtime.anchors import lay_out
from slimgrad.runtime.deriving import asked_in, derived, of_node, readers_of, reads_besides
from slimgrad.runtime.frame import Calls
from slimgrad.runtime.lesson import UNNAMED, Lesson
from slimgrad.runtime.parts import Part, families, keepers, parts_of, promised_bytes, sharing
from slimgrad.runtime.tickets import Held, Kept, Order, Sharing
from slimgrad.runtime.watch import Record, WatchFrame
from slimgrad.spec import Profile, Storage

MIN_BYTES = {"cpu": 4 * 1024, "cuda": 2 * 1024 * 1024}
"""Storages below this are left alone unless `apply` is told otherwise, by device. On a GPU packing and unpacking one
site takes 40-80 us of host time, in which an H200 moves 150-300 MB: less than two mebibytes are not worth it. In
BERT-base the weights of attention are below, 48 sites with less than 1 % of the bytes."""


def least_bytes(device: torch.device, min_bytes: int | None) -> int:
    """What a storage on that device must have at least to be packed."""
    return MIN_BYTES.get(device.type, MIN_BYTES["cuda"]) if min_bytes is None else min_bytes


Fixture = tuple[Mapping[str, Any], str, Any]
"""A dictionary of a module, a name in it, and what hangs there."""


@dataclass(frozen=True, eq=False)
class Structure:
    """All that a WorkFrame needs: the orders of each call, and at which modules to switch hooks on or off."""

    calls: Calls
    borders: Mapping[str, bool]
    profile: Profile
    orders: Mapping[tuple[str, int, int], Order] = field(default_factory=dict)
    """Site key -> its order."""
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Storage number -> why it is left as it is."""
    is_stock: bool = False
    """Whether modules ran their own forward where ops of ours will; see NOTE in swaps.py."""
    fixtures: tuple[Fixture, ...] = ()
    """What the orders take for granted: the parameters that are cast again, the modules at the borders, those that an
    op computes, those that know what running an op again needs, and the modules around all these. What was learnt on
    fakes takes parameters of the latter for granted too, for which sharding puts others."""

    def still_holds(self) -> bool:
        """Whether no such parameter or module was replaced by another one since."""
        return all(shelf.get(name) is thing for shelf, name, thing in self.fixtures)

    @property
    def codecs(self) -> dict[tuple[str, int, int], Codec]:
        """What packs each site."""
        return {key: order.codec for key, order in self.orders.items()}

    @property
    def derived_paths(self) -> set[str]:
        """Modules that keep nothing, because all that they save is made again."""
        orders = self.orders.values()
        return {order.site.path for order in orders} - {order.site.path for order in orders if not order.derives}


def chosen(
    lesson: Lesson,
    rules: Sequence[Rule],
    modules: Mapping[str, nn.Module],
    *,
    all_here: bool,
    followed: Collection[Rule] = (),
) -> dict[int, Codec]:
    """Site number -> codec, by the first rule that selects the site with a codec that can serve it.

    Where not all sites are here (some are outside the model, under `with run:`), an unused rule is no mistake; nor is
    one that is `followed` in another way.
    """
    return {number: codecs[0] for number, codecs in _offers(lesson, rules, modules, all_here, followed).items()}


def _offers(
    lesson: Lesson,
    rules: Sequence[Rule],
    modules: Mapping[str, nn.Module],
    all_here: bool,
    followed: Collection[Rule],
) -> dict[int, list[Codec]]:
    """Site number -> the codecs that rules offer it, the first first."""
    choice: dict[int, list[Codec]] = {}
    selected: set[Rule] = set()
    served: set[Rule] = set()
    idle: dict[Rule, torch.device] = {}
    for number, site in enumerate(lesson.profile.sites):
        if not lesson.profile.storages[site.storage].counted:
            continue
        demand, dtype, device = lesson.demand(number), lesson.records[number].dtype, lesson.records[number].device
        for rule in rules:
            if not rule.selects(site, modules.get(site.path)):
                continue
            selected.add(rule)
            if not rule.codec.serves(demand, dtype):
                continue
            if not rule.codec.works_on(device):
                idle[rule] = device
            else:
                served.add(rule)
                choice.setdefault(number, []).append(rule.codec)
    for rule in rules:
        if rule.where == "*" or rule.is_optional or isinstance(rule.codec, Keep) or rule in followed:
            continue
        if rule not in selected:
            if all_here:
                _refuse_unused(rule, lesson)
        elif rule not in served and rule in idle:
            raise RuleError(f"{rule!r}: {_idle(rule.codec, idle[rule])}. Leave the rule out there")
        elif rule not in served:
            _refuse_unserved(rule, lesson, modules)
    return choice


def _idle(codec: Codec, device: torch.device) -> str:
    return f"{codec!r} frees nothing on {device}: expected {codec.device_wanted}"


def _refuse_unused(rule: Rule, lesson: Lesson) -> None:
    needs_there = ", ".join(sorted({str(site.need) for site in lesson.profile.sites})) or "nothing at all"
    raise RuleError(f"{rule!r} matches nothing that is kept for backward; the model keeps tensors for {needs_there}")


def _refuse_unserved(rule: Rule, lesson: Lesson, modules: Mapping[str, nn.Module]) -> None:
    profile = lesson.profile
    counted = [site for site in profile.sites if profile.storages[site.storage].counted]
    sites = [site for site in counted if rule.selects(site, modules.get(site.path))]
    found = ", ".join(sorted({str(site.need) for site in sites}))
    can = ", ".join(str(need) for need in rule.codec.needs_served())
    wanted = {site.need for site in sites}
    fitting = ", ".join(name for name, kind in CODECS.items() if wanted & set(kind().needs_served()))
    raise RuleError(
        f"{rule!r} cannot serve what it matches: {sites[0].name} and {len(sites) - 1} more need {found}, the codec "
        f"serves {can}. What would fit: {fitting}."
    )


def structure(
    lesson: Lesson,
    rules: Sequence[Rule],
    modules: Mapping[str, nn.Module],
    *,
    min_bytes: int | None = None,
    all_here: bool = True,
    followed: Collection[Rule] = (),
    swapped: Collection[str] = (),
    is_stock: bool = False,
) -> Structure:
    """Decide per storage: it is packed only if every saver lets go and bytes are saved; otherwise it is left alone."""
    offers = _offers(lesson, rules, modules, all_here, followed)
    packed: dict[int, Part] = {}
    orders: dict[int, Order] = {}
    reasons: dict[int, str] = {}
    for number, storage in enumerate(lesson.profile.storages):  # in the order of their first savers: sources first
        choice = {saver: offers[saver][0] for saver in storage.savers if saver in offers}
        parts = parts_of(storage, choice, lesson)
        if any(isinstance(codec, Derive) for codec in choice.values()):
            parts = derived(parts, packed, lesson) or parts_of(storage, _without_derive(storage, offers), lesson)
        why = _why_kept(storage, parts, lesson, min_bytes, rules)
        if why is not None:
            reasons[number] = why
        else:
            packed |= parts
    numbers, readers, besides = families(packed.values()), readers_of(packed, lesson), reads_besides(packed, lesson)
    shares = sharing(packed, lesson, besides)
    for saver, part in packed.items():
        family = numbers[part.codec, part.demand.key]
        orders[lesson.records[saver].number] = _order(
            lesson, saver, part, family, shares[saver], readers.get(saver, ()), besides.get(saver, 0)
        )
    calls, borders = lay_out(lesson.trail, orders)
    fixtures = tuple(_fixtures(orders.values(), {*borders, *swapped}, modules, on_fakes=lesson.on_fakes))
    by_site = {order.site.key: order for order in orders.values()}
    return Structure(calls, borders, lesson.profile, by_site, reasons, is_stock, fixtures)


def _without_derive(storage: Storage, offers: Mapping[int, Sequence[Codec]]) -> dict[int, Codec]:
    """What else the rules offer its savers."""
    others = {s: [codec for codec in offers.get(s, ()) if not isinstance(codec, Derive)] for s in storage.savers}
    return {saver: codecs[0] for saver, codecs in others.items() if codecs}


def _order(
    lesson: Lesson,
    number: int,
    part: Part,
    family: int,
    shared: Sharing,
    readers: tuple[str, ...],
    besides: int,
) -> Order:
    record, sibling = lesson.records[number], lesson.siblings[number]
    return Order(
        site=lesson.profile.sites[number],
        answer=lesson.answers[number],
        codec=part.codec,
        demand=part.demand,
        dtype=record.dtype,
        is_output=record.is_output,
        sibling=None if sibling is None else lesson.records[sibling].number,
        family=family,
        sharing=shared,
        readers=readers,
        reads_besides=besides,
    )


def seal_held(frame: WatchFrame, lesson: Lesson, found: Structure) -> None:
    """Pack, by the orders just made, the tensors a watched forward holds; those changed in place since stay."""
    for number, record, held, order, tensor in _unchanged(lesson, found):
        demand = order.demand if order.sibling is None else lesson.demand(number)
        if order.derives:
            demand = of_node(demand, held.maker)
        held.ticket, held.maker = frame.seal(tensor, order, demand, record.origin), None


def refuted(frame: WatchFrame, lesson: Lesson, found: Structure) -> list[str]:
    """Make again what the orders say can be made again, while all tensors are there still, and compare: the names of
    the sites where the bits differ. Such ways are not open any more.
    """
    names = []
    for _, _, held, order, tensor in _unchanged(lesson, found):
        if order.derives:
            derivation = of_node(order.demand, held.maker).derivation
            if derivation is not None and not derivation.comes_out(tensor):
                names.append(order.site.name)
    frame.reader.opened = False  # it was this that read the graph, not backward
    return names


def _unchanged(lesson: Lesson, found: Structure) -> Iterator[tuple[int, Record, Held, Order, Tensor]]:
    """The tensors held as they were saved, for which there are orders."""
    for number, record in enumerate(lesson.records):
        held, order = record.held(), found.orders.get(record.key)
        if held is None or order is None or not isinstance(held.ticket, Kept):
            continue
        if held.ticket.tensor._version == held.ticket.version:
            yield number, record, held, order, held.ticket.tensor


def _fixtures(
    orders: Collection[Order], borders: Collection[str], modules: Mapping[str, nn.Module], *, on_fakes: bool
) -> Iterator[Fixture]:
    ordered = {id(order.demand.parameter) for order in orders if order.site.parameter not in (None, UNNAMED)}
    asked = {id(module) for order in orders for module in asked_in(order.demand)}
    for module in modules.values():
        for name, parameter in module._parameters.items():
            if id(parameter) in ordered or (on_fakes and id(module) in asked):
                yield module._parameters, name, parameter
    relied_on = [path for path, module in modules.items() if path in borders or id(module) in asked]
    for path in {around for inner in relied_on for around in _and_around(inner)}:
        parent, _, name = path.rpartition(".")
        yield modules[parent]._modules, name, modules[path]


def _and_around(path: str) -> Iterator[str]:
    """The path and those of the modules around it, but for the model's own."""
    while path:
        yield path
        path = path.rpartition(".")[0]


def _why_kept(
    storage: Storage, parts: Mapping[int, Part], lesson: Lesson, min_bytes: int | None, rules: Sequence[Rule]
) -> str | None:
    """Why the storage is left as it is; None if it can go."""
    sites = lesson.profile.sites
    if not storage.counted:
        return f"it is a {storage.kind}"
    device = lesson.records[storage.savers[0]].device
    least = least_bytes(device, min_bytes)
    if storage.bytes < least:
        return f"it is smaller than {least} bytes, not worth the time"
    holding = [sites[saver] for saver in keepers(storage, parts)]
    if holding:
        who = ", ".join(f"{site.name} ({site.need})" for site in holding[:3])
        more = f" and {len(holding) - 3} more" if len(holding) > 3 else ""
        idle = "".join(
            f" ({_idle(codec, device)})" for codec in {r.codec: None for r in rules if not r.codec.works_on(device)}
        )
        return f"{who}{more} keeps it, and no rule offers less{idle}"
    promised = promised_bytes(storage, parts, lesson)
    if promised >= storage.bytes:
        return f"packing would hold {promised} bytes, no less than it has"
    return None
