"""From trainings to the rows of a table, and what counts as harm.

A configuration is compared with the untouched model seed by seed: both saw the same weights, batches and dropout, so
the difference says more than the two means. It is WITHIN SEED NOISE if the mean difference is no larger than

- two standard errors of that difference, or
- the standard deviation of the untouched model over the seeds, which is what a user risks by choosing a seed,

whichever is larger. With one seed there is no noise to compare with, and no verdict. A configuration that scatters
widely has a large standard error and passes easily: its own ± stands beside it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tasks import TASKS
from tasks.training import UNTOUCHED, Entry

WITHIN, BETTER, WORSE, ONE_SEED = "yes", "no, better", "no, worse", "one seed"
NONE = "–"
MIB = 2**20


@dataclass(frozen=True)
class Comparison:
    """A configuration minus untouched, paired by seed."""

    mean: float
    error: float | None
    """Standard error of the mean; None with one seed."""
    verdict: str


@dataclass(frozen=True)
class Row:
    """One configuration of one task over its seeds."""

    task: str
    source: str
    config: str
    seeds: tuple[int, ...]
    diverged: int
    """How many of them."""
    mean: float | None
    """None if any diverged: the mean of the rest would flatter."""
    std: float | None
    comparison: Comparison | None
    kept_before: int | None
    kept_after: int | None
    packed_sites: int
    """As in the seed with the worst ratio."""


def compared(values: Sequence[float], untouched: Sequence[float], *, higher_is_better: bool) -> Comparison:
    """Both in the same order of seeds."""
    differences = [value - base for value, base in zip(values, untouched, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Comparison(mean, None, ONE_SEED)
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    if abs(mean) <= max(2 * error, statistics.stdev(untouched)):
        return Comparison(mean, error, WITHIN)
    return Comparison(mean, error, BETTER if (mean > 0) == higher_is_better else WORSE)


Trainings = Sequence[Entry]


def rows_of(entries: Trainings) -> list[Row]:
    """One row per configuration; those of one task follow each other, in the order in which they first appear."""
    groups: dict[tuple[str, ...], dict[str, list[Entry]]] = {}
    for entry in entries:
        configs = groups.setdefault(comparable(entry), {})
        configs.setdefault(entry.identity["config"], []).append(entry)
    return [row_of(group, configs.get(UNTOUCHED, [])) for configs in groups.values() for group in configs.values()]


def in_order(entries: Trainings) -> list[Entry]:
    """Whatever was finished when: by task, untouched first."""
    tasks = list(TASKS)

    def place(entry: Entry) -> tuple[int, bool, str]:
        config = entry.identity["config"]
        return tasks.index(entry.identity["task"]), config != UNTOUCHED, config

    return sorted(entries, key=place)


def comparable(entry: Entry) -> tuple[str, ...]:
    """The same for all trainings that may be compared: only configuration and seed are left out."""
    return tuple(json.dumps(value) for name, value in entry.identity.items() if name not in ("config", "seed"))


def row_of(group: Trainings, untouched: Trainings) -> Row:
    """The row of one configuration, from its trainings and those of the untouched model."""
    identity = group[0].identity
    values, base = by_seed(group), by_seed(untouched)
    diverged = len(group) - len(values)
    common = sorted(values.keys() & base.keys())
    comparison = None
    if identity["config"] != UNTOUCHED and common and not diverged:
        better = TASKS[identity["task"]].metric.higher_is_better
        comparison = compared([values[s] for s in common], [base[s] for s in common], higher_is_better=better)
    worst = min(group, key=ratio)
    return Row(
        task=identity["task"],
        source=identity["source"],
        config=identity["config"],
        seeds=tuple(sorted(entry.identity["seed"] for entry in group)),
        diverged=diverged,
        mean=None if diverged else statistics.fmean(values.values()),
        std=None if diverged or len(values) < 2 else statistics.stdev(values.values()),
        comparison=comparison,
        kept_before=worst.kept_before,
        kept_after=worst.kept_after,
        packed_sites=worst.packed_sites,
    )


def by_seed(entries: Trainings) -> dict[int, float]:
    """Seed -> the task's metric, of the trainings that did not diverge."""
    return {
        entry.identity["seed"]: getattr(entry, TASKS[entry.identity["task"]].metric.field)
        for entry in entries
        if entry.diverged_by is None
    }


def ratio(entry: Entry | Row) -> float:
    """How many times less is kept."""
    if entry.kept_before is None or entry.kept_after is None:
        return 1.0
    return entry.kept_before / max(1, entry.kept_after)


# --- markdown ---------------------------------------------------------------------------------------------------------

HEADINGS = (
    "task",
    "configuration",
    "kept for backward",
    "metric",
    "mean ± std (seeds)",
    "minus untouched ± s.e.",
    "within seed noise",
)


SEED_NOISE = (
    "within seed noise: |mean difference to untouched, paired by seed| <= the larger of 2 standard errors of it and "
    "the standard deviation of untouched over the seeds"
)


def markdown(entries: Trainings, remarks: Sequence[str] = ()) -> str:
    """The table, and what one must know to read it."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *map(cells, rows_of(entries))]
    notes = dict.fromkeys([*settings(entries), SEED_NOISE, *about_data(entries), *warnings(entries), *remarks])
    return "\n".join([*(f"| {' | '.join(line)} |" for line in lines), "", *(f"- {note}" for note in notes)])


def settings(entries: Trainings) -> list[str]:
    seen: dict[str, set[str]] = {}
    for entry in entries:
        recipe, limit = entry.identity["recipe"], entry.identity["min_bytes"]
        machine = f"{entry.identity['machine']}, storages from {limit // 1024} KiB on are packed; steps x batch"
        seen.setdefault(machine, set()).add(f"{entry.identity['task']} {recipe['steps']} x {recipe['batch']}")
    return [f"{machine}: {', '.join(sorted(sizes))}" for machine, sizes in seen.items()]


def about_data(entries: Trainings) -> list[str]:
    known = {source.name: source.remark for task in TASKS.values() for source in task.sources}
    return [known[entry.identity["source"]] for entry in entries if known[entry.identity["source"]]]


def warnings(entries: Trainings) -> list[str]:
    return [f"{entry.identity['task']} {entry.identity['config']}: {note}" for entry in entries for note in entry.notes]


def cells(row: Row) -> tuple[str, ...]:
    task = TASKS[row.task]
    return (f"{task.model} on {row.source}", f"`{row.config}`", kept(row), task.metric.name, *figures(row))


def kept(row: Row) -> str:
    if row.kept_before is None or row.kept_after is None:
        return NONE
    sizes = f"{row.kept_before / MIB:.1f} to {row.kept_after / MIB:.1f} MiB"
    return f"{ratio(row):.2f}x less ({sizes}, {row.packed_sites} sites)"


def figures(row: Row) -> tuple[str, str, str]:
    if row.mean is None:
        return f"diverged in {row.diverged} of {len(row.seeds)}", NONE, "no, diverged"
    metric = TASKS[row.task].metric
    own = f"{metric.shown(row.mean)}{spread(row.std, row)} ({len(row.seeds)})"
    if row.comparison is None:
        return own, NONE, NONE
    return own, metric.shown(row.comparison.mean, "+") + spread(row.comparison.error, row), row.comparison.verdict


def spread(value: float | None, row: Row) -> str:
    return "" if value is None else f" ± {TASKS[row.task].metric.shown(value)}"
