"""Report: what a run keeps, promised and measured side by side."""

from __future__ import annotations

from dataclasses import dataclass

from slimgrad.report import text
from slimgrad.spec.sites import Site
from slimgrad.spec.values import Value


@dataclass(frozen=True, kw_only=True, repr=False)
class SiteReport(Value):
    """What happened to one site in the last audited step."""

    site: Site
    codec: str
    """The codec as one would type it."""
    before: int
    """Bytes of the saved view."""
    promised: int
    """Bytes that arithmetic says are kept instead."""
    after: int
    """Bytes really held instead; a Packed shared by several sites is counted at the first."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Report(Value):
    """Bytes of the last step, before and after, per treated site and in total."""

    kept_before: int
    """Bytes of the storages autograd would have held at the end of forward."""
    kept_after: int
    """Bytes really held: storages still alive plus everything packed."""
    promised: int
    """Bytes that arithmetic over shapes says should be held."""
    sites: tuple[SiteReport, ...]
    """The treated sites."""
    reasons: tuple[str, ...]
    """In words, why the largest storages did not shrink."""
    notes: tuple[str, ...] = ()
    """What else there is to know: where the gate stood aside, which shapes were audited."""

    @property
    def ratio(self) -> float:
        return self.kept_before / self.kept_after if self.kept_after else float("inf")

    def __str__(self) -> str:
        return text.report_table(self)
