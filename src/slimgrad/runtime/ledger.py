"""The ledger: bytes before and after, per site and in total, from one watched forward.

Before: every storage that autograd would hold, once. After: what is really held when backward begins, that is storages
still kept, everything packed, and storages that were let go but are alive all the same because something outside
autograd holds them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from slimgrad.report.human import human_bytes
from slimgrad.runtime.lesson import Owners, is_parameter
from slimgrad.runtime.orders import Structure
from slimgrad.runtime.swaps import Stock, Swap, Swaps
from slimgrad.runtime.tickets import Kept, Order, Sealed
from slimgrad.runtime.watch import Record, WatchFrame
from slimgrad.spec import Report, Site, SiteReport

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


@dataclass(frozen=True)
class Fused:
    """One call of a module that an op of ours computed; what the module would have kept is known per element."""

    site: Site
    codec: str
    alone: int
    """Bytes that the module would have held alone."""
    promised: int

    @classmethod
    def of(cls, swap: Swap, elements: int, stock: Stock) -> Fused:
        alone, views = (round(part.get(swap.site.path, 0.0) * elements) for part in (stock.alone, stock.views))
        return cls(replace(swap.site, bytes=views), repr(swap.op.codec), alone, swap.op.kept(elements))


def fused_in(frame: WatchFrame, swaps: Swaps, stock: Stock | None) -> list[Fused]:
    """The account of the modules that an op of ours computed in this forward."""
    if stock is None:
        return []
    return [Fused.of(swaps[path], elements, stock) for path, elements in frame.fused or ()]


class Audit:
    """The account of one watched forward. It is settled when backward begins, or when a report is asked for."""

    def __init__(
        self,
        frame: WatchFrame,
        structure: Structure,
        owners: Owners,
        allocated: int | None,
        fused: Sequence[Fused] = (),
        again: Sequence[str] = (),
        before: int | None = None,
    ) -> None:
        self.structure = structure
        self.fused = tuple(fused)
        self.again = tuple(again)
        """The modules that run again."""
        self.before = before
        """What would have been held, where that is not seen."""
        self.not_counted = {*owners.storages, *(r.storage_id for r in frame.records if is_parameter(r))}
        self.allocated_before = allocated
        self.allocated: int | None = None
        self.held_elsewhere: set[int] = set()
        self.entries: list[Entry] = []
        self.codes = _codes(frame, fused)
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
        codes, alone = sum(self.codes.values()), sum(call.alone for call in self.fused)
        packed = {entry.packed: entry for entry in self.entries if entry.order is not None}
        stays = sum(entry.storage_bytes for key, entry in counted.items() if key in kept)
        elsewhere = sum(entry.storage_bytes for key, entry in counted.items() if key in self.held_elsewhere)
        seen = sum(entry.storage_bytes for entry in counted.values()) - codes + alone
        return Report(
            kept_before=seen if self.before is None else self.before,
            kept_after=stays + elsewhere + sum(entry.after for entry in packed.values()),
            promised=stays - codes + self._promised(packed.values()),
            sites=self._site_reports(),
            reasons=self._reasons(counted, kept),
            notes=(*self._notes(), *notes),
        )

    def _promised(self, packed: Iterable[Entry]) -> int:
        return sum(entry.promised for entry in packed) + sum(call.promised for call in self.fused)

    def _site_reports(self) -> tuple[SiteReport, ...]:
        reports, seen = self._fused_reports(), set()
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

    def _fused_reports(self) -> list[SiteReport]:
        held = [*self.codes.values(), *[0] * len(self.fused)]
        return [
            SiteReport(site=call.site, codec=call.codec, before=call.site.bytes, promised=call.promised, after=after)
            for call, after in zip(self.fused, held, strict=False)
        ]

    def _reasons(self, counted: Mapping[int, Entry], kept: set[int]) -> tuple[str, ...]:
        """Why the largest storages did not shrink, the largest first."""
        why = self._why_by_place()
        stay = (kept | self.held_elsewhere) - self.codes.keys()
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

    def _notes(self) -> Iterator[str]:
        if self.again:
            known = "" if self.before is not None else "; what they would have kept is not known, and not counted"
            paths = ", ".join(self.again[:3]) + (", …" if len(self.again) > 3 else "")
            runs = "1 module runs" if len(self.again) == 1 else f"{len(self.again)} modules run"
            yield f"{runs} again in backward ({paths}){known}"
        if self.structure.is_stock:
            yield (
                "modules still ran their own forward, to see what they keep; from the next forward on, fused ops that "
                "keep less compute some of them"
            )
        if self.allocated is not None:
            yield (
                f"the CUDA allocator held {human_bytes(max(0, self.allocated))} more when backward began than when the "
                "forward did (outputs and the loss included)"
            )


def _codes(frame: WatchFrame, fused: Sequence[Fused]) -> dict[int, int]:
    """Storage -> bytes of what the ops keep, in the order of their calls."""
    paths = {call.site.path for call in fused}
    return {
        record.storage_id: record.storage_bytes
        for record in frame.records
        if record.path in paths and record.dtype == torch.uint8 and record.held() is not None
    }


def _entry(record: Record, ticket: Kept | Sealed) -> Entry:
    what = (record.key, record.bytes, record.storage_id, record.storage_bytes)
    if isinstance(ticket, Kept):
        return Entry(*what)
    order, packed = ticket.order, ticket.packed
    packed.settle()
    promised = order.codec.promised(packed.layout.shape, record.dtype, packed.demand)
    return Entry(*what, order, id(packed), packed.nbytes, promised)
