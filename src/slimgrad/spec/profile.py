"""Profile: what autograd keeps for backward, by whom, each storage counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimgrad.report import plots, text
from slimgrad.spec.sites import Need, Site, Storage
from slimgrad.spec.timeline import Timeline
from slimgrad.spec.values import Value

INSTEAD = {
    Need.NOTHING: "its shape alone (0 bytes, exact)",
    Need.MASK: "one bit per element (exact)",
    Need.INDEX: "positions inside the window, one byte each (exact)",
    Need.DERIVATIVE: "a few bits per element that name the derivative's level",
    Need.OPERAND: "its largest elements, blocks or channels, or a code with a bounded error",
    Need.VALUES: "a quantized copy, or it can be recomputed or offloaded",
    Need.WEIGHT: "a reference to the parameter, cast again in backward (0 bytes, exact)",
    Need.EXACT: "nothing less: it must not change",
}
"""What could be kept instead, per need, as `explain` says it."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Profile(Value):
    """Every saved slot of one step, grouped by storage."""

    sites: tuple[Site, ...]
    storages: tuple[Storage, ...]
    timeline: Timeline | None = None
    """The step event by event, for plans; None if it could not be run on fake tensors, and meta says why."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Model class, device, torch version, whether tensors were fake, and the allocator's own figure if it was asked."""

    @property
    def kept_bytes(self) -> int:
        """Bytes autograd holds at the end of forward; parameters, buffers and inputs are not autograd's."""
        return sum(storage.bytes for storage in self.storages if storage.counted)

    @property
    def device(self) -> str:
        """Where the step ran; if in several places, not the host."""
        return str(self.meta.get("device", "")).rpartition(", ")[2] or "cpu"

    def lead(self, storage: Storage) -> Site:
        """The saver that asks for most: it decides what the storage may shrink to."""
        return max((self.sites[i] for i in storage.savers), key=lambda site: site.need.rank)

    def by_need(self) -> dict[str, int]:
        """Kept bytes by the strongest need of each storage."""
        totals: Counter[str] = Counter()
        for storage in self.storages:
            if storage.counted:
                totals[str(self.lead(storage).need)] += storage.bytes
        return dict(totals.most_common())

    def by_module(self) -> dict[str, int]:
        """Kept bytes by class of the module whose need is strongest."""
        totals: Counter[str] = Counter()
        for storage in self.storages:
            if storage.counted:
                totals[self.lead(storage).module] += storage.bytes
        return dict(totals.most_common())

    def table(self, *, limit: int | None = 20) -> str:
        """The storages sorted by bytes, then totals by need and by module type."""
        return text.profile_table(self, limit=limit)

    def explain(self, path: str) -> str:
        """Plain sentences on what the module at `path` keeps, who else keeps it, and what could be kept instead."""
        return text.explanation(self, path, INSTEAD)

    def plot(self, path: str | Path) -> Path:
        """Draw what keeps memory and write it to `path`."""
        return plots.profile_plot(self, Path(path))

    def __str__(self) -> str:
        return self.table()
