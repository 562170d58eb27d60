"""The rows of frontier.py: kept as JSON, merged, compared with the untouched model, shown as markdown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from workloads import WORKLOADS

UNTOUCHED = "untouched"

PEERS = {
    UNTOUCHED: "untouched",
    "checkpoint": "checkpoint each block",
    "save_on_cpu": "save_on_cpu (pinned)",
    "naive_int8": "int8 by torch ops in saved-tensor hooks",
    "compile": "torch.compile",
    "compile(budget=0.5)": "torch.compile, activation_memory_budget=0.5",
}
"""What users can pick without slimgrad: name on the command line -> name in the table. Any other text is slimgrad's."""

MIB = 2.0**20
NONE = "–"

NOTICEABLE = 0.01
"""Where less of the kept bytes than this share is saved, how much of it reaches the peak is noise."""

NOTHING = 1e-3
"""Below this share of the untouched model's kept bytes, as after offloading, a ratio says nothing any more."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One system on one workload, as its worker measured it."""

    workload: str
    system: str
    status: Literal["measured", "skipped", "failed"] = "measured"
    note: str = ""
    """Why it was skipped, or how it failed."""
    kept: int | None = None
    """Bytes held at the end of forward."""
    peak: int | None = None
    """Highest bytes in a step, above those before it; None where there is no allocator to ask."""
    ms: float | None = None
    """Median step; p10 and p90 say how far steps spread."""
    p10: float | None = None
    p90: float | None = None
    untouched_ms: tuple[float, ...] = ()
    """Median steps of the untouched model in the same process, before and after."""
    time_ratio: float | None = None
    """ms over the mean of `untouched_ms`."""
    rounds: int | None = None
    machine: str = ""
    torch: str = ""
    seconds: float | None = None
    """What the worker took from start to end."""


@dataclass(frozen=True)
class Compared:
    """A row beside the untouched row of its workload; None where one of the two lacks the figure."""

    kept_ratio: float | None = None
    peak_ratio: float | None = None
    kept_share: float | None = None
    """Kept bytes as a share of the untouched model's."""
    reaching_peak: float | None = None
    """Bytes saved at the peak as a share of those saved at the end of forward."""


def loaded(path: Path) -> list[Row]:
    rows = json.loads(path.read_text())["rows"]
    return [Row(**{**row, "untouched_ms": tuple(row["untouched_ms"])}) for row in rows]


def saved(rows: Sequence[Row], path: Path) -> None:
    """In one move, so that an interrupt leaves the rows of before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.new")
    draft.write_text(json.dumps({"rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    draft.replace(path)


def merged(rows: Sequence[Row], new: Row) -> list[Row]:
    """The new row in the place of an older one of the same workload and system, or at the end."""
    key = (new.workload, new.system)
    if any((row.workload, row.system) == key for row in rows):
        return [new if (row.workload, row.system) == key else row for row in rows]
    return [*rows, new]


def missing(
    rows: Iterable[Row], workloads: Sequence[str], systems: Sequence[str], fresh: bool
) -> list[tuple[str, str]]:
    """(workload, system) pairs still to be measured, the untouched one of each workload first.

    A measured row stays unless `fresh` asks for its system by name; a skipped or failed one is tried again.
    """
    done = {(row.workload, row.system) for row in rows if row.status == "measured"}
    again = set(systems) if fresh else set()
    ordered = dict.fromkeys((UNTOUCHED, *systems))
    return [(w, s) for w in workloads for s in ordered if (w, s) not in done or s in again]


def by_workload(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each workload, the untouched one first, then slimgrad's peers, then slimgrad."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.workload, []).append(row)
    place = {system: number for number, system in enumerate(PEERS)}
    return {name: sorted(group, key=lambda row: place.get(row.system, len(PEERS))) for name, group in groups.items()}


def compared(row: Row, group: Iterable[Row]) -> Compared:
    base = next((other for other in group if other.system == UNTOUCHED), None)
    if base is None or not base.kept or row.kept is None:
        return Compared()
    kept_share = row.kept / base.kept
    kept_ratio = 1 / kept_share if kept_share > NOTHING else None
    if base.peak is None or not row.peak:
        return Compared(kept_ratio, None, kept_share)
    less = base.kept - row.kept
    reaching = (base.peak - row.peak) / less if less > NOTICEABLE * base.kept else None
    return Compared(kept_ratio, base.peak / row.peak, kept_share, None if row.system in PEERS else reaching)


def command(rows: Sequence[Row]) -> str:
    """What measures these rows again."""
    names = {row.workload for row in rows}
    small = any(workload.title(True) in names for workload in WORKLOADS.values())
    chosen = [name for name, workload in WORKLOADS.items() if workload.title(small) in names]
    words = ["python", "benchmarks/frontier.py", *(["--small"] if small else [])]
    words += [] if len(chosen) == len(WORKLOADS) else ["--workloads", *chosen]
    words += ["--systems", *dict.fromkeys(row.system for row in rows)]
    rounds = {row.rounds for row in rows if row.rounds is not None}
    return shlex.join([*words, *(["--rounds", str(max(rounds))] if rounds else [])])


def markdown(rows: Sequence[Row], picture: str | None = None) -> str:
    """The whole page: where and how it was measured, the table, and what has no figures."""
    machines = dict.fromkeys(f"{row.machine}, torch {row.torch}" for row in rows if row.machine)
    asked = "the allocator's" if any(row.peak is not None for row in rows) else "slimgrad's own count (no allocator)"
    lines = [
        "# The frontier, measured",
        "",
        f"On {'; '.join(machines) or 'no machine'}. Bytes are {asked}; ms is the median step; ÷ and × compare with",
        "the untouched model. What each figure means: [How memory is measured](measuring.md). Regenerate with",
        "",
        f"    {command(rows)}",
        "",
        *([f"![Kept bytes against step time]({picture})", ""] if picture else []),
        "| workload | system | kept MiB | peak MiB | ms | kept ÷ | peak ÷ | time × | of it in peak |",
        "|---|---|---|---|---|---|---|---|---|",
        *(line for name, group in by_workload(rows).items() for line in table_lines(name, group)),
        *notes(rows),
    ]
    return "\n".join([*lines, ""])


def notes(rows: Sequence[Row]) -> list[str]:
    """Why rows have no figures, each reason once."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.status != "measured":
            reasons.setdefault(row.note, []).append(f"{row.system} on {row.workload}")
    listed = [f"- {'; '.join(names)}: {note}" for note, names in reasons.items()]
    listed += [f"- Not measured: {system} on {', '.join(names)}." for system, names in unmeasured(rows).items()]
    return ["", "Without figures:", "", *listed] if listed else []


def unmeasured(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Systems that some workloads have rows of, and the workloads that have none."""
    groups = by_workload(rows)
    systems = dict.fromkeys(row.system for row in rows)
    found = {s: [name for name, group in groups.items() if all(row.system != s for row in group)] for s in systems}
    return {system: names for system, names in found.items() if names}


def table_lines(name: str, group: Sequence[Row]) -> list[str]:
    firsts = [name, *[""] * (len(group) - 1)]
    return [f"| {' | '.join([first, *cells(row, group)])} |" for first, row in zip(firsts, group, strict=True)]


def cells(row: Row, group: Sequence[Row]) -> list[str]:
    label = PEERS.get(row.system, f"slimgrad `{row.system}`")
    if row.status != "measured":
        return [f"{label}: {row.status}", *[NONE] * 7]
    beside = compared(row, group)
    return [
        label,
        mib(row.kept),
        mib(row.peak),
        figure(row.ms, "{:.1f}"),
        figure(beside.kept_ratio, "{:.2f}"),
        figure(beside.peak_ratio, "{:.2f}"),
        figure(row.time_ratio, "{:.2f}"),
        figure(beside.reaching_peak, "{:.0%}"),
    ]


def mib(count: int | None) -> str:
    return NONE if count is None else f"{count / MIB:.{0 if count >= 100 * MIB else 1}f}"


def figure(value: float | None, form: str) -> str:
    return NONE if value is None else form.format(value)
