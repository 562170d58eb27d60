"""From a watched forward to a profile, and from a profile and rules to orders."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from slimgrad.codecs import CODECS, Codec, Demand, Keep
from slimgrad.errors import RuleError
from slimgrad.runtime import needs
from slimgrad.runtime.fake import Faked
from slimgrad.runtime.frame import Calls, Record, WatchFrame, storage_of
from slimgrad.runtime.graph import reveal, tensors_in
from slimgrad.runtime.rules import Rule
from slimgrad.runtime.tickets import Held, Order, sized
from slimgrad.spec import Need, Profile, Site, Storage

MIN_BYTES = {"cpu": 4 * 1024, "cuda": 1024 * 1024}
"""Storages below this are left alone, by device. On a GPU packing and unpacking one site takes 50-100 us of host time,
in which an H200 moves 200-400 MB: less than a mebibyte is not worth it, and in small models those are most sites."""


@dataclass(frozen=True)
class Owners:
    """Storages that are not autograd's, and the parameters by identity."""

    storages: Mapping[int, str]
    """Storage identity -> 'parameter', 'buffer' or 'input'."""
    parameters: Mapping[int, str]
    """id(parameter), or of its fake -> name."""
    real: Mapping[str, torch.Tensor]
    """Name -> parameter."""


def owners_of(model: nn.Module, inputs: Any, fake: Faked | None = None) -> Owners:
    """The storages of parameters, buffers and inputs: they live on whatever autograd does."""
    real = dict(model.named_parameters())
    parameters = real if fake is None else fake.parameters
    buffers = dict(model.named_buffers()) if fake is None else fake.buffers
    storages: dict[int, str] = {}
    groups = (("input", tensors_in(inputs)), ("buffer", buffers.values()), ("parameter", parameters.values()))
    for kind, tensors in groups:
        for tensor in tensors:
            storage = storage_of(tensor)
            if storage is not None:
                storages[storage._cdata] = kind
    names = {id(parameter): name for name, parameter in (*real.items(), *parameters.items())}
    return Owners(storages, names, real)


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a watched forward taught: the profile, and beside each site what only the live objects can tell."""

    profile: Profile
    records: tuple[Record, ...]
    answers: tuple[needs.Answer, ...]
    parameters: tuple[torch.Tensor | None, ...]
    siblings: tuple[int | None, ...]


@dataclass(frozen=True)
class Label:
    """The node and slot a ticket serves, and what they need."""

    node: str = "(not found)"
    slot: str = "?"
    answer: needs.Answer = needs.EXACT


BOUNDARY = Label(needs.CHECKPOINT, "input", needs.VALUES)


def lesson(
    frame: WatchFrame,
    roots: Iterable[Node | None],
    owners: Owners,
    modules: Mapping[str, nn.Module],
    meta: dict[str, Any],
) -> Lesson:
    """Find the role of every tensor still held after the forward."""
    alive = [(record, held) for record in frame.records if (held := record.held()) is not None]
    labels = _labels(frame, roots, alive, modules)
    order = list(dict.fromkeys(record.storage_id for record, _ in alive))
    sites, answers, parameters, siblings = [], [], [], []
    for record, held in alive:
        label = labels.get(held, BOUNDARY if record.boundary else Label())
        parameter = _parameter_behind(record, label, owners, modules.get(record.path))
        answer = _with_parameter(label.answer, parameter)
        siblings.append(_sibling(record, held, label, alive, labels))
        answers.append(answer)
        parameters.append(parameter)
        sites.append(_site(record, label, answer, parameter, owners, modules, order.index(record.storage_id)))
    storages = [_storage(key, alive, sites, owners) for key in order]
    profile = Profile(sites=tuple(sites), storages=tuple(storages), meta=meta)
    return Lesson(profile, tuple(record for record, _ in alive), tuple(answers), tuple(parameters), tuple(siblings))


def _labels(
    frame: WatchFrame,
    roots: Iterable[Node | None],
    alive: Sequence[tuple[Record, Held]],
    modules: Mapping[str, nn.Module],
) -> dict[Held, Label]:
    places = {held: record for record, held in alive}
    labels: dict[Held, Label] = {}
    for held, node, slot in reveal(roots, frame.first, {record.sequence for record, _ in alive}, frame.reader):
        record = places.get(held)
        if record is not None:
            module = modules.get(record.path)
            answer = needs.answer_in_module(node, slot, module, record.device.type)
            labels[held] = Label(node.name(), slot, answer)
    return labels


CASTING = {nn.Linear: "mat2", nn.Conv1d: "weight", nn.Conv2d: "weight", nn.Conv3d: "weight"}
"""Modules whose forward is one product with `self.weight`, and the slot that holds it or its autocast copy."""


def _parameter_behind(record: Record, label: Label, owners: Owners, module: nn.Module | None) -> torch.Tensor | None:
    """The parameter of which the saved tensor is a view or a cast."""
    if id(record.leaf) in owners.parameters:
        return owners.real[owners.parameters[id(record.leaf)]]
    # The copy of a frozen weight has no graph behind it; the module's class says what it is.
    if record.producer is None and label.slot == CASTING.get(type(module)):  # type: ignore[arg-type]
        weight = module._parameters.get("weight") if module is not None else None
        if weight is not None and weight.dtype != record.dtype and weight.numel() == record.shape.numel():
            return weight
    return None


def _with_parameter(answer: needs.Answer, parameter: torch.Tensor | None) -> needs.Answer:
    return needs.WEIGHT if parameter is not None and answer.need is not Need.NOTHING else answer


def _sibling(
    record: Record, held: Held, label: Label, alive: Sequence[tuple[Record, Held]], labels: Mapping[Held, Label]
) -> int | None:
    """The index, within the same call, of the slot whose shape this one is relative to."""
    if label.answer.sibling is None:
        return None
    for other, other_held in alive:
        same_node = (other.path, other.call, other.sequence) == (record.path, record.call, record.sequence)
        if same_node and labels.get(other_held, Label()).slot == label.answer.sibling:
            return other.index
    return None


def _site(
    record: Record,
    label: Label,
    answer: needs.Answer,
    parameter: torch.Tensor | None,
    owners: Owners,
    modules: Mapping[str, nn.Module],
    storage: int,
) -> Site:
    module = modules.get(record.path)
    return Site(
        path=record.path,
        module=type(module).__name__ if module is not None else record.path,
        call=record.call,
        index=record.index,
        node=label.node,
        slot=label.slot,
        need=answer.need,
        fn=answer.fn,
        detail=dict(answer.detail),
        producer=record.producer,
        shape=tuple(int(size) for size in record.shape),
        dtype=str(record.dtype).removeprefix("torch."),
        bytes=int(record.shape.numel()) * record.dtype.itemsize,
        storage=storage,
        parameter=owners.parameters.get(id(parameter)) if parameter is not None else None,
    )


def _storage(key: int, alive: Sequence[tuple[Record, Held]], sites: Sequence[Site], owners: Owners) -> Storage:
    savers = tuple(number for number, (record, _) in enumerate(alive) if record.storage_id == key)
    kind = owners.storages.get(key)
    if kind is None:
        kind = "weight copy" if any(sites[number].parameter for number in savers) else "activation"
    return Storage(bytes=alive[savers[0]][0].storage_bytes, kind=kind, savers=savers)


# --- orders ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Structure:
    """All that a WorkFrame needs: the orders of each call, and at which modules to switch hooks on or off."""

    calls: Calls
    borders: Mapping[str, bool]
    profile: Profile
    reasons: Mapping[int, str] = field(default_factory=dict)
    """Storage number -> why it is left as it is."""
    weights: tuple[tuple[Mapping[str, Any], str, torch.Tensor], ...] = ()
    """Where each parameter that is cast again hangs: a module's parameters, the name there, and the parameter."""

    def still_holds(self) -> bool:
        """Whether no such parameter was replaced since by another one."""
        return all(parameters.get(name) is parameter for parameters, name, parameter in self.weights)


def demand_of(lesson: Lesson, number: int) -> Demand:
    site, answer = lesson.profile.sites[number], lesson.answers[number]
    demand = Demand(need=site.need, fn=site.fn, detail=answer.detail, parameter=lesson.parameters[number])
    sibling = lesson.siblings[number]
    if answer.sibling is None or sibling is None:
        return demand
    return sized(demand, site.node, lesson.records[number].shapes[sibling])


def chosen(
    lesson: Lesson, rules: Sequence[Rule], modules: Mapping[str, nn.Module], *, all_here: bool
) -> dict[int, Codec]:
    """Site number -> codec, by the first rule that selects the site with a codec that can serve it.

    Where not all sites are here (some are outside the model, under `with run:`), an unused rule is no mistake.
    """
    choice: dict[int, Codec] = {}
    selected: set[Rule] = set()
    served: set[Rule] = set()
    for number, site in enumerate(lesson.profile.sites):
        if not lesson.profile.storages[site.storage].counted:
            continue
        demand, dtype = demand_of(lesson, number), lesson.records[number].dtype
        for rule in rules:
            if not rule.selects(site, modules.get(site.path)):
                continue
            selected.add(rule)
            if rule.codec.serves(demand, dtype):
                served.add(rule)
                choice.setdefault(number, rule.codec)
    for rule in rules:
        if rule.where == "*" or isinstance(rule.codec, Keep):
            continue
        if rule not in selected:
            if all_here:
                _refuse_unused(rule, lesson)
        elif rule not in served:
            _refuse_unserved(rule, lesson, modules)
    return choice


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
    callers: Mapping[str, set[str | None]],
    *,
    all_here: bool = True,
) -> Structure:
    """Decide per storage: it is packed only if every saver lets go and bytes are saved; otherwise it is left alone."""
    choice = chosen(lesson, rules, modules, all_here=all_here)
    orders: dict[tuple[str, int], dict[int, Order]] = {}
    reasons: dict[int, str] = {}
    for number, storage in enumerate(lesson.profile.storages):
        why = _why_kept(storage, choice, lesson)
        if why is not None:
            reasons[number] = why
            continue
        for saver in storage.savers:
            site = lesson.profile.sites[saver]
            orders.setdefault((site.path, site.call), {})[site.index] = _order(lesson, saver, choice[saver])
    calls = {call: tuple(found.get(i) for i in range(max(found) + 1)) for call, found in orders.items()}
    borders = _borders({path for path, _ in calls}, callers)
    return Structure(calls, borders, lesson.profile, reasons, _weights(calls, modules))


def _weights(
    calls: Calls, modules: Mapping[str, nn.Module]
) -> tuple[tuple[Mapping[str, Any], str, torch.Tensor], ...]:
    ordered = {id(o.demand.parameter) for found in calls.values() for o in found if o is not None}
    return tuple(
        (module._parameters, name, parameter)
        for module in modules.values()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in ordered
    )


def _order(lesson: Lesson, number: int, codec: Codec) -> Order:
    site, answer = lesson.profile.sites[number], lesson.answers[number]
    demand = Demand(need=site.need, fn=site.fn, detail=answer.detail, parameter=lesson.parameters[number])
    record = lesson.records[number]
    return Order(site, answer, codec, demand, record.dtype, record.is_output, lesson.siblings[number])


def _why_kept(storage: Storage, choice: Mapping[int, Codec], lesson: Lesson) -> str | None:
    """Why the storage is left as it is; None if it can go."""
    sites = lesson.profile.sites
    if not storage.counted:
        return f"it is a {storage.kind}"
    least = MIN_BYTES.get(lesson.records[storage.savers[0]].device.type, MIN_BYTES["cuda"])
    if storage.bytes < least:
        return f"it is smaller than {least} bytes, not worth the time"
    keepers = [sites[s] for s in storage.savers if s not in choice or isinstance(choice[s], Keep)]
    if keepers:
        who = ", ".join(f"{site.name} ({site.need})" for site in keepers[:3])
        more = f" and {len(keepers) - 3} more" if len(keepers) > 3 else ""
        return f"{who}{more} keeps it, and no rule offers less"
    packs = {(choice[s], sites[s].need, sites[s].fn, lesson.records[s].view): s for s in storage.savers}
    promised = sum(
        choice[s].promised(sites[s].shape, lesson.records[s].dtype, demand_of(lesson, s)) for s in packs.values()
    )
    if promised >= storage.bytes:
        return f"packing would hold {promised} bytes, no less than it has"
    return None


def _borders(active: set[str], callers: Mapping[str, set[str | None]]) -> dict[str, bool]:
    """Modules at whose border hooks go on or off: those with orders, and quiet ones called from those."""
    borders = dict.fromkeys(active, True)
    for path, above in callers.items():
        if path not in active and above & active:
            borders[path] = False
    return borders


def seal_held(frame: WatchFrame, found: Structure) -> None:
    """Pack, by the orders just made, the tensors a watched forward holds; those changed in place since stay."""
    for record in frame.records:
        held = record.held()
        orders = found.calls.get((record.path, record.call), ())
        order = orders[record.index] if record.index < len(orders) else None
        if held is None or order is None:
            continue
        kept = held.ticket
        if kept.tensor._version == kept.version:  # type: ignore[union-attr]
            held.ticket = frame.seal(kept.tensor, order, record.shapes)  # type: ignore[union-attr]
