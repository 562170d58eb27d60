"""Profiles and reports as plain text of a fixed width."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from slimgrad.report.explain import explanation
from slimgrad.report.groups import Group, grouped
from slimgrad.report.human import (
    ELLIPSIS,
    WIDTH,
    bar,
    human_bytes,
    human_ratio,
    need_name,
    path_name,
    percent,
    plural,
    short_node,
    short_slot,
    shorten,
    tensor_name,
    wrapped,
)

if TYPE_CHECKING:
    from slimgrad.spec import Profile, Report, SiteReport

__all__ = ["explanation", "human_bytes", "human_ratio", "profile_table", "report_table"]

GAP = 2
"""Columns between two cells."""
TOP_TYPES = 8
TOP_SITES = 20


def profile_table(profile: Profile, limit: int | None = 20) -> str:
    """A headline, the largest storages (each counted once), and totals by need and by module type.

    With more than `limit` storages, those of repeated layers share a line; `limit=None` lists every one.
    """
    parts = ["\n".join(profile_headline(profile))]
    groups = grouped(profile, limit)
    if groups:
        parts += [storages_table(profile, groups, limit), totals_table(profile)]
    return "\n\n".join(part.rstrip("\n") for part in parts)


def profile_headline(profile: Profile) -> list[str]:
    meta, count = profile.meta, sum(s.counted for s in profile.storages)
    model = meta.get("model", "the model")
    device = f" on {meta['device']}" if meta.get("device") else ""
    kept = f"{human_bytes(profile.kept_bytes)} in {plural(count, 'storage')}"
    lines = [f"{model}{device}: autograd keeps {kept} between forward and backward"]
    if meta.get("fake"):
        lines.append("  fake tensors: shapes are exact, nothing was computed or allocated")
    if meta.get("unknown"):
        lines.append(f"  not counted, as only a real step tells its size: {meta['unknown']}")
    if meta.get("allocated_bytes") is not None:
        lines.append(f"  the allocator's own figure: {human_bytes(meta['allocated_bytes'])}")
    if idle := not_counted(profile):
        lines.append(f"  not counted, as they live on anyway: {idle}")
    return lines


def not_counted(profile: Profile) -> str:
    """What autograd refers to but does not hold by itself: parameters, buffers and inputs."""
    totals: dict[str, int] = {}
    for storage in profile.storages:
        if not storage.counted:
            totals[storage.kind] = totals.get(storage.kind, 0) + storage.bytes
    return ", ".join(f"{kind}s {human_bytes(size)}" for kind, size in sorted(totals.items()))


def storages_table(profile: Profile, groups: list[Group], limit: int | None) -> str:
    shown, repeated = groups[:limit], any(group.count > 1 for group in groups[:limit])
    headers = ["bytes", "count", "share", "need", "kept by", "tensor", "made by"]
    rows = [group_cells(group, profile.kept_bytes) for group in shown]
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    room = WIDTH - sum(widths) + widths[KEEPER] - (len(headers) - 1) * GAP
    table = plain_table(*headers[: 1 + repeated], *headers[2:], right=("bytes", "count", "share"))
    for group, row in zip(shown, rows, strict=True):
        row[KEEPER] = group.place(room, times=False)
        table.add_row(*row[: 1 + repeated], *row[2:])
    rest = groups[len(shown) :]
    more = rest_line(sum(group.count for group in rest), sum(group.bytes for group in rest), "storage", "with")
    return rendered(table, more)


KEEPER = 4
"""The column that takes what room the others leave."""


def group_cells(group: Group, whole: int) -> list[str]:
    lead = group.lead
    return [
        human_bytes(group.bytes),
        str(group.count),
        percent(group.bytes, whole),
        need_name(lead.need),
        "",
        shorten(tensor_name(lead.shape, lead.dtype), 28),
        shorten(short_node(lead.producer), 14),
    ]


def totals_table(profile: Profile) -> str:
    grid = Table.grid(padding=(0, 6))
    needs = [(need_name(need), size) for need, size in profile.by_need().items()]
    grid.add_row(shares("by need", needs), shares("by module type", merged_tail(profile.by_module())))
    return rendered(grid)


def merged_tail(totals: Mapping[str, int]) -> list[tuple[str, int]]:
    items = sorted(totals.items(), key=lambda item: -item[1])
    tail = items[TOP_TYPES:]
    return items[:TOP_TYPES] + ([(f"{len(tail)} others", sum(size for _, size in tail))] if tail else [])


def shares(title: str, items: list[tuple[str, int]]) -> Table:
    whole = sum(size for _, size in items)
    table = plain_table(title, "bytes", "share", "", right=("bytes", "share"))
    for name, size in items:
        table.add_row(shorten(name, 22), human_bytes(size), percent(size, whole), bar(size, whole, 14))
    return table


@dataclass
class SiteRow:
    """The treated sites of one path and slot, added up over calls."""

    path: str
    slot: str
    codec: str
    calls: int = 0
    before: int = 0
    promised: int = 0
    after: int = 0

    def add(self, site: SiteReport) -> None:
        self.calls += 1
        self.before += site.before
        self.promised += site.promised
        self.after += site.after


def report_table(report: Report) -> str:
    """A headline, the treated sites that saved most, and the reasons and notes in words."""
    parts = [report_headline(report), sites_table(report)]
    parts += bullets("What did not shrink, and why:", report.reasons)
    parts += bullets("Notes:", report.notes)
    return "\n\n".join(part.rstrip("\n") for part in parts)


def report_headline(report: Report) -> str:
    before, after = report.kept_before, report.kept_after
    change = human_ratio(before, after)
    return f"kept {human_bytes(before)} -> {human_bytes(after)} ({change}), promised {human_bytes(report.promised)}"


def sites_table(report: Report) -> str:
    if not report.sites:
        return "No site was packed."
    rows = site_rows(report.sites)
    shown = rows[:TOP_SITES]
    table = plain_table("saved", "was", "now", "promised", "site", "codec", right=("saved", "was", "now", "promised"))
    for row in shown:
        sizes = (row.before - row.after, row.before, row.after, row.promised)
        table.add_row(*map(human_bytes, sizes), shorten(site_name(row), 50), opening(row.codec, 26))
    saved = sum(row.before - row.after for row in rows[TOP_SITES:])
    rest = rest_line(len(rows) - len(shown), saved, "site", "saving")
    return rendered(table, rest, shared_line(report.sites))


def site_rows(sites: Iterable[SiteReport]) -> list[SiteRow]:
    """Treated sites by path, slot and codec, those that save most first."""
    rows: dict[tuple[str, str, str], SiteRow] = {}
    for treated in sites:
        key = (path_name(treated.site.path), short_slot(treated.site), treated.codec)
        rows.setdefault(key, SiteRow(*key)).add(treated)
    return sorted(rows.values(), key=lambda row: row.after - row.before)


def site_name(row: SiteRow) -> str:
    times = f" (x{row.calls})" if row.calls > 1 else ""
    return f"{shorten(row.path, 49 - len(row.slot) - len(times))} {row.slot}{times}"


def opening(text: str, width: int) -> str:
    """At most `width` characters, cut at the end: what tells codecs apart comes first."""
    return text if len(text) <= width else text[: width - 1] + ELLIPSIS


def shared_line(sites: Iterable[SiteReport]) -> str:
    storages = [treated.site.storage for treated in sites]
    if len(set(storages)) == len(storages):
        return ""
    return "Some of these sites share a storage: the headline counts each storage once."


def rest_line(count: int, size: int, noun: str, verb: str) -> str:
    """What a table left out, or nothing if it left nothing out."""
    return f"{ELLIPSIS} and {plural(count, f'more {noun}')}, {verb} {human_bytes(size)}" if count else ""


def bullets(title: str, sentences: Iterable[str]) -> list[str]:
    lines = [wrapped(sentence, "  - ", "    ") for sentence in sentences]
    return ["\n".join([title, *lines])] if lines else []


def plain_table(*headers: str, right: tuple[str, ...] = ()) -> Table:
    """A table without frame or colour; cells are cut rather than wrapped."""
    table = Table(
        box=box.SIMPLE_HEAD, show_edge=False, padding=(0, GAP - 1, 0, 0), pad_edge=False, collapse_padding=True
    )
    for header in headers:
        table.add_column(header, justify="right" if header in right else "left", no_wrap=True, overflow="ellipsis")
    return table


def rendered(*parts: RenderableType) -> str:
    """Plain text, the same in a terminal, a file and a notebook. No name is taken for markup: a module may have any."""
    out = io.StringIO()
    plain: dict[str, Any] = {"color_system": None, "force_terminal": False, "force_jupyter": False}
    console = Console(file=out, width=WIDTH, markup=False, emoji=False, **plain)
    for part in parts:
        if part != "":
            console.print(Text(part) if isinstance(part, str) else part, highlight=False)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())
