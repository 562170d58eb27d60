"""From a watched forward to a lesson: the profile, and beside it what only the live objects can tell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node

from slimgrad.codecs import Demand
from slimgrad.runtime import needs
from slimgrad.runtime.chaining import may_chain
from slimgrad.runtime.derivations import Derivation
from slimgrad.runtime.fake import Faked
from slimgrad.runtime.frame import storage_of
from slimgrad.runtime.graph import reveal, tensors_in
from slimgrad.runtime.tickets import Held, sized
from slimgrad.runtime.watch import Chain, Record, WatchFrame
from slimgrad.runtime.ways import Known, Way, ways
from slimgrad.spec import NO_SITE, Need, Profile, Site, Storage

UNNAMED = "(unnamed)"
"""A parameter the model does not list, such as the gathered one of a sharded model: another object in each forward."""


@dataclass(frozen=True)
class Owners:
    """Storages that are not autograd's, and the parameters by identity."""

    storages: Mapping[int, str]
    """Storage identity -> 'parameter', 'buffer' or 'input'."""
    parameters: Mapping[int, str]
    """id(parameter), or of its fake -> name."""
    real: Mapping[str, torch.Tensor]
    """Name -> parameter."""
    on_fakes: bool = False


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
    return Owners(storages, names, real, on_fakes=fake is not None)


@dataclass(frozen=True, eq=False)
class Lesson:
    """What a watched forward taught: the profile, and beside each site what only the live objects can tell."""

    profile: Profile
    records: tuple[Record, ...]
    answers: tuple[needs.Answer, ...]
    parameters: tuple[torch.Tensor | None, ...]
    siblings: tuple[int | None, ...]
    """For a slot that is relative to the shape of another one of its node: the number of that one's site."""
    derivations: tuple[Derivation | None, ...]
    """How what is saved at each site can be made again."""
    trail: tuple[Chain, ...]
    """For each tensor saved in the forward, in order, the module calls that were under way."""
    on_fakes: bool = False
    """Whether this was before the first real forward, by which the model may be sharded."""

    def demand(self, number: int) -> Demand:
        """What backward demands at site `number`, complete."""
        site, sibling = self.profile.sites[number], self.siblings[number]
        demand = self.open_demand(number)
        if self.answers[number].sibling is None or sibling is None:
            return demand
        return sized(demand, site.node, self.records[sibling].shape)

    def open_demand(self, number: int) -> Demand:
        """The same without the sibling's shape, which may be another one in the next step."""
        site = self.profile.sites[number]
        return Demand(
            need=site.need,
            fn=site.fn,
            detail=self.answers[number].detail,
            parameter=self.parameters[number],
            derivation=self.derivations[number],
        )


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
    by_slot = {(r.sequence, labels[h].slot): n for n, (r, h) in enumerate(alive) if h in labels}
    savers: dict[int, list[int]] = {}
    for number, (record, _) in enumerate(alive):
        savers.setdefault(record.storage_id, []).append(number)
    places = {key: place for place, key in enumerate(savers)}
    sites, answers, parameters, siblings = [], [], [], []
    for record, held in alive:
        label = BOUNDARY if record.boundary else labels.get(held, Label())
        parameter = _parameter_behind(record, label, owners, modules.get(record.path))
        answer = _with_parameter(label.answer, parameter)
        siblings.append(by_slot.get((record.sequence, answer.sibling or "")))
        answers.append(answer)
        parameters.append(parameter)
        sites.append(_site(record, label, answer, parameter, owners, modules, places[record.storage_id]))
    storages = [_storage(key, alive, found, sites, owners) for key, found in savers.items()]
    records = tuple(record for record, _ in alive)
    derivations = tuple(_derivation(record, by_slot, sites, records, owners, modules) for record in records)
    contents = _numbered(record.content for record in records)
    sites = [
        replace(site, content=content, sources=_sources(found), runs=_runs(found), chained=_chained(found, record))
        for site, content, found, record in zip(sites, contents, derivations, records, strict=True)
    ]
    profile = Profile(sites=tuple(sites), storages=tuple(storages), meta=meta)
    return Lesson(
        profile,
        records,
        tuple(answers),
        tuple(parameters),
        tuple(siblings),
        derivations,
        tuple(frame.trail),
        owners.on_fakes,
    )


def _derivation(
    record: Record,
    by_slot: Mapping[tuple[int, str], int],
    sites: Sequence[Site],
    records: Sequence[Record],
    owners: Owners,
    modules: Mapping[str, nn.Module],
) -> Derivation | None:
    """How the record's tensor can be made again, from sites of this forward and parameters of the model. Not from the
    gathered ones of a sharded model, which are gone when another module's backward runs.
    """
    if record.passage is None:
        return None

    def site_at(sequence: int, slot: str) -> int | None:
        number = by_slot.get((sequence, slot))
        return None if number is None or sites[number].parameter == UNNAMED else number

    known = Known(site_at, lambda number: modules.get(records[number].path), owners.parameters.__contains__)
    found = ways(record.passage.term, known)
    return Derivation(record.passage.names, found) if found else None


def _numbered(things: Iterable[Any]) -> list[int]:
    """A small number for each, the same for equal ones."""
    numbers: dict[Any, int] = {}
    return [numbers.setdefault(thing, len(numbers)) for thing in things]


def _ways(derivation: Derivation | None) -> tuple[Way, ...]:
    return () if derivation is None else derivation.ways


def _sources(derivation: Derivation | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(sorted(way.sites)) for way in _ways(derivation))


def _runs(derivation: Derivation | None) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(NO_SITE if own is None else own for _, own in way.runs) for way in _ways(derivation))


def _chained(derivation: Derivation | None, record: Record) -> tuple[bool, ...]:
    if derivation is None:
        return ()
    return tuple(may_chain(derivation.names, way, record.dtype) for way in derivation.ways)


def _labels(
    frame: WatchFrame,
    roots: Iterable[Node | None],
    alive: Sequence[tuple[Record, Held]],
    modules: Mapping[str, nn.Module],
) -> dict[Held, Label]:
    places = {held: record for record, held in alive}
    labels: dict[Held, Label] = {}
    saving = {record.sequence for record, _ in alive if not record.boundary}  # no node of ours saves a boundary
    for held, node, slot in reveal(roots, frame.first, saving, frame.reader):
        record = places.get(held)
        if record is not None:
            module = modules.get(record.path)
            answer = needs.answer_in_module(node, slot, module, record.device.type)
            labels[held] = Label(node.name(), slot, answer)
    return labels


CASTING: dict[type, str] = {nn.Linear: "mat2", nn.Conv1d: "weight", nn.Conv2d: "weight", nn.Conv3d: "weight"}
"""Modules whose forward is one product with `self.weight`, and the slot that holds it or its autocast copy."""


def _parameter_behind(record: Record, label: Label, owners: Owners, module: nn.Module | None) -> torch.Tensor | None:
    """The parameter of which the saved tensor is a view or a cast."""
    if id(record.leaf) in owners.parameters:
        return owners.real[owners.parameters[id(record.leaf)]]
    if isinstance(record.leaf, nn.Parameter):  # such as the gathered parameter of a sharded one
        return record.leaf
    # The copy of a frozen weight has no graph behind it; the module's class says what it is.
    if record.producer is None and label.slot == CASTING.get(type(module)):
        weight = module._parameters.get("weight") if module is not None else None
        if type(weight) is nn.Parameter and weight.dtype != record.dtype and weight.numel() == record.shape.numel():
            return weight
    return None


def _with_parameter(answer: needs.Answer, parameter: torch.Tensor | None) -> needs.Answer:
    return needs.WEIGHT if parameter is not None and answer.need is not Need.NOTHING else answer


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
        bytes=record.bytes,
        storage=storage,
        parameter=owners.parameters.get(id(parameter), UNNAMED) if parameter is not None else None,
    )


def _storage(
    key: int,
    alive: Sequence[tuple[Record, Held]],
    savers: Sequence[int],
    sites: Sequence[Site],
    owners: Owners,
) -> Storage:
    kind = owners.storages.get(key)
    if kind is None and any(sites[number].parameter for number in savers):
        kind = "parameter" if any(is_parameter(alive[number][0]) for number in savers) else "weight copy"
    if kind is None:
        kind = "activation"
    return Storage(bytes=alive[savers[0]][0].storage_bytes, kind=kind, savers=tuple(savers))


def is_parameter(record: Record) -> bool:
    """Whether the saved tensor is the parameter behind it or a view of it, not a copy; even one the model hides."""
    storage = storage_of(record.leaf) if isinstance(record.leaf, nn.Parameter) else None
    return storage is not None and storage._cdata == record.storage_id
