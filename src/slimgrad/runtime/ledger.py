"""The ledger: bytes before and after, per site and in total, from one watched forward.

Before: every storage that autograd would hold, once. After: what is really held when backward begins, that is storages
still kept, everything packed, and storages that were let go but are alive all the same because something outside
autograd holds them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from slimgrad.report.human import human_bytes
from slimgrad.runtime.lesson import Owners, is_parameter
from slimgrad.runtime.orders import Structure
from slimgrad.runtime.tickets import Kept, Order, Sealed
from slimgrad.runtime.watch import Record, WatchFrame
from slimgrad.spec import Report, SiteReport

REASONS_SHOWN = 8


@dataclass(frozen=True)
class Entry:
    """One saved tensor still held at the end of forward: plain numbers, so that the ledger keeps nothing alive."""

    place: tuple[str, int, int]
    bytes: int
    storage: int
    storage_bytes: int
    order: Order | None = None
    packed: int = 0
    """Identity of the Packed, which several entries may share."""
    after: int = 0
    promised: int = 0


class Audit:
    """The account of one watched forward. It is settled when backward begins, or when a report is asked for."""

    def __init__(self, frame: WatchFrame, structure: Structure, owners: Owners, allocated: int | None) -> None:
        self.structure = structure
        self.not_counted = {*owners.storages, *(r.storage_id for r in frame.records if is_parameter(r))}
        self.allocated_before = allocated
        self.allocated: int | None = None
        self.held_elsewhere: set[int] = set()
        self.entries: list[Entry] = []
        self._let_go: dict[int, StorageWeakRef] = {}
        for record in frame.records:
            held = record.held()
            if held is not None:
                held.audit = self
                self._enter(record, held.ticket)

    def _enter(self, record: Record, ticket: Kept | Sealed) -> None:
        entry = _entry(record, ticket)
        self.entries.append(entry)
        if entry.order is not None:
            self._let_go[entry.storage] = record.storage

    def settle(self) -> None:
        """Look which of the storages let go are alive all the same, and ask the allocator. Once."""
        kept = self._kept()
        self.held_elsewhere |= {key for key, ref in self._let_go.items() if key not in kept and not ref.expired()}
        self._let_go = {}
        if self.allocated_before is not None and self.allocated is None:
            self.allocated = torch.cuda.memory_allocated() - self.allocated_before

    def _kept(self) -> set[int]:
        return {entry.storage for entry in self.entries if entry.order is None}

    def _counted(self) -> dict[int, Entry]:
        """Storage -> one of its entries, without parameters, buffers and inputs."""
        return {entry.storage: entry for entry in self.entries if entry.storage not in self.not_counted}

    def report(self, notes: Sequence[str]) -> Report:
        self.settle()
        counted, kept = self._counted(), self._kept()
        packed = {entry.packed: entry for entry in self.entries if entry.order is not None}
        stays = sum(entry.storage_bytes for key, entry in counted.items() if key in kept)
        elsewhere = sum(entry.storage_bytes for key, entry in counted.items() if key in self.held_elsewhere)
        return Report(
            kept_before=sum(entry.storage_bytes for entry in counted.values()),
            kept_after=stays + elsewhere + sum(entry.after for entry in packed.values()),
            promised=stays + sum(entry.promised for entry in packed.values()),
            sites=self._site_reports(),
            reasons=self._reasons(counted, kept),
            notes=(*self._notes(), *notes),
        )

    def _site_reports(self) -> tuple[SiteReport, ...]:
        reports, seen = [], set()
        for entry in self.entries:
            if entry.order is None:
                continue
            first = entry.packed not in seen
            seen.add(entry.packed)
            reports.append(
                SiteReport(
                    site=entry.order.site,
                    codec=repr(entry.order.codec),
                    before=entry.bytes,
                    promised=entry.promised if first else 0,
                    after=entry.after if first else 0,
                )
            )
        return tuple(reports)

    def _reasons(self, counted: Mapping[int, Entry], kept: set[int]) -> tuple[str, ...]:
        """Why the largest storages did not shrink, the largest first."""
        why = self._why_by_place()
        stay = kept | self.held_elsewhere
        large = sorted((e for key, e in counted.items() if key in stay), key=lambda e: -e.storage_bytes)
        lines = []
        for entry in large[:REASONS_SHOWN]:
            if entry.storage in kept:
                reason = why.get(entry.place, "its role is not known, so it is kept as it is")
            else:
                reason = "autograd let it go, but something outside autograd holds it (an output, or a variable)"
            where = entry.place[0] or "the model"
            lines.append(f"{human_bytes(entry.storage_bytes)} saved in {where} stays: {reason}")
        return tuple(lines)

    def _why_by_place(self) -> dict[tuple[str, int, int], str]:
        profile = self.structure.profile
        return {
            profile.sites[saver].key: reason
            for number, reason in self.structure.reasons.items()
            for saver in profile.storages[number].savers
        }

    def _notes(self) -> tuple[str, ...]:
        if self.allocated is None:
            return ()
        return (
            f"the CUDA allocator held {human_bytes(max(0, self.allocated))} more when backward began than when the "
            "forward did (outputs and the loss included)",
        )


def _entry(record: Record, ticket: Kept | Sealed) -> Entry:
    what = (record.key, record.bytes, record.storage_id, record.storage_bytes)
    if isinstance(ticket, Kept):
        return Entry(*what)
    order, packed = ticket.order, ticket.packed
    promised = order.codec.promised(packed.layout.shape, record.dtype, packed.demand)
    return Entry(*what, order, id(packed), packed.nbytes, promised)
