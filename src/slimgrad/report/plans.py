"""Plans as text: what becomes of each kind of storage, why, and what another plan does differently."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from slimgrad.report.human import (
    ELLIPSIS,
    WIDTH,
    human_bytes,
    human_ratio,
    human_seconds,
    path_name,
    plural,
    shorten,
    wrapped,
)
from slimgrad.report.text import GAP, plain_table, rendered

if TYPE_CHECKING:
    from slimgrad.planner.plan import Action, Plan

WHY = {
    "keep": "kept as it is, because the budget asks for no more, or nothing that is allowed makes it smaller",
    "recompute": "it is not kept: the module around it runs again in backward",
    "derive": "it is not kept: the op that made it runs again in backward, from what its own node keeps",
    "lossless": "backward reads less of it than it holds, so that is what is kept, exactly",
    "fewbit": "backward reads a derivative alone, which a few bits name",
    "quant": "its values are kept in {bits} bits",
    "topk": "its largest elements are kept",
    "bounded": "its values are kept within a bound",
    "blocks": "some of its blocks are kept, and the product behind it skips the others",
    "fused": "it is not kept: a fused op computes the module, and keeps a few bits instead",
    "offload": "its values are kept in the host's memory, and copied there and back while the device computes",
}
"""By the first word of what is done."""


@dataclass(frozen=True)
class Row:
    """Actions of repeated layers, told together."""

    where: str
    module: str
    need: str
    what: str
    count: int
    before: int
    after: int
    seconds: float


def plan_table(plan: Plan, limit: int | None = 20) -> str:
    """A headline with what is promised, then the actions, repeated layers together, the largest first."""
    rows = grouped(plan)
    shown = rows if limit is None else rows[:limit]
    parts = ["\n".join(headline(plan)), actions_table(shown), left_out(rows[len(shown) :])]
    return "\n\n".join(part.rstrip("\n") for part in parts if part)


def actions_table(rows: Sequence[Row]) -> str:
    """Nothing where there is nothing to decide about."""
    cells = [(human_bytes(row.before), human_bytes(row.after), str(row.count), row.what) for row in rows]
    widths = (max(map(len, column)) for column in zip(("was", "now", "times", "what"), *cells, strict=True))
    room = WIDTH - sum(widths) - 4 * GAP
    table = plain_table("was", "now", "times", "where", "what", right=("was", "now", "times"))
    for row, (was, now, times, what) in zip(rows, cells, strict=True):
        table.add_row(was, now, times, shorten(row.where, room), what)
    return rendered(table) if rows else ""


def left_out(rows: Sequence[Row]) -> str:
    """What is not told, or nothing."""
    if not rows:
        return ""
    was, now = (human_bytes(sum(sizes)) for sizes in zip(*((row.before, row.after) for row in rows), strict=True))
    return f"{ELLIPSIS} and {plural(len(rows), 'more kind')} of storage, {was} -> {now}"


def headline(plan: Plan) -> list[str]:
    lines = [
        f"plan for {plan.model or 'the model'} on {plan.device or 'this device'}, budget {plan.budget}",
        f"kept {human_bytes(plan.kept_before)} -> {human_bytes(plan.kept_bytes)} "
        f"({human_ratio(plan.kept_before, plan.kept_bytes)})",
    ]
    if plan.peak_bytes is not None and plan.peak_before is not None:
        lines.append(
            f"peak {human_bytes(plan.peak_before)} -> {human_bytes(plan.peak_bytes)}, of which "
            f"{human_bytes(plan.fixed_bytes)} are there before the step"
        )
    lines.append(f"step {step_time(plan)}, gradient error {gradient_error(plan.error)}")
    for op in dict.fromkeys(op for _, op in plan.fused):
        paths = tuple(path for path, its in plan.fused if its == op)
        lines.append(f"{plural(len(paths), 'module')} computed by fused ops, {_keeping(op)}: {_few(paths)}")
    if plan.recompute:
        run = "1 module runs" if len(plan.recompute) == 1 else f"{len(plan.recompute)} modules run"
        lines.append(f"{run} again in backward: {_few(plan.recompute)}")
    return lines


def step_time(plan: Plan) -> str:
    """Beside the untouched step's, or, where that is unknown, what is added to it."""
    if not plan.step_seconds:
        return f"{human_seconds(plan.seconds)} longer than the untouched one"
    return f"{plan.slowdown:.2f}x of the untouched time"


def gradient_error(error: float) -> str:
    return "none: all of it is exact" if error == 0 else f"{100 * error:.2g} %"


def _keeping(op: str) -> str:
    """What an op keeps, by the codec that says how."""
    bits = re.search(r"bits=(\d)", op)
    what = "what they are given" if op.startswith("quant(") else "a derivative"
    return f"which keep {what} in {bits[1] if bits else 'a few'} bits"


def _few(paths: tuple[str, ...]) -> str:
    return ", ".join(paths) if len(paths) <= 3 else f"{paths[0]}, {paths[1]}, … {paths[-1]}"


def grouped(plan: Plan) -> list[Row]:
    """Actions that differ in nothing but the numbers in their paths, the largest first."""
    groups: dict[tuple[str, str, str, str], list[Action]] = {}
    for action in plan.actions:
        groups.setdefault((_numberless(action.site), action.module, action.need, action.what), []).append(action)
    rows = [
        Row(
            where=_where(action.site for action in actions),
            module=module,
            need=need,
            what=what,
            count=len(actions),
            before=sum(action.before for action in actions),
            after=sum(action.after for action in actions),
            seconds=sum(action.seconds for action in actions),
        )
        for (_, module, need, what), actions in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.before)


def _numberless(site: str) -> str:
    return re.sub(r"(?<![^.])\d+(?=[.:#])", "*", site)


def _where(sites: Iterable[str]) -> str:
    """The site, or several of repeated layers with the numbers left open."""
    first, *others = dict.fromkeys(site.rstrip("#") for site in sites)
    return _short(_numberless(first) if others else first)


def _short(site: str) -> str:
    path, _, slot = site.rpartition(":")
    return f"{path} {re.sub(r'Backward[0-9]+', '', slot)}"


def explanation(plan: Plan, limit: int) -> str:
    """Sentences, the biggest first."""
    rows = grouped(plan)
    lines = [wrapped(_sentence(row, plan), "- ", "  ") for row in rows[:limit]]
    parts = ["\n".join(headline(plan)), "\n".join(lines), left_out(rows[limit:])]
    return "\n\n".join(part for part in parts if part)


def _sentence(row: Row, plan: Plan) -> str:
    many = f"{row.count} storages of " if row.count > 1 else ""
    words = [word.strip() for word in row.what.split(";")]
    name, bits = words[0].partition("(")[0], re.search(r"bits=(\d)", words[0])
    if row.before == row.after:
        return f"{many}{row.where} ({row.module}, {row.need}), {human_bytes(row.before)}: {WHY['keep']}."
    why = WHY.get(name, f"{words[0]} is applied").format(bits=bits[1] if bits else "4")
    cost = f", for {100 * row.seconds / plan.step_seconds:.1f} % of a step" if _tells_cost(row, plan) else ""
    return (
        f"{many}{row.where} ({row.module}, {row.need}): {why}; {human_bytes(row.before)} become "
        f"{human_bytes(row.after)}{cost}."
    )


def _tells_cost(row: Row, plan: Plan) -> bool:
    return plan.step_seconds > 0 and row.seconds > 0


def difference(plan: Plan, other: Plan) -> str:
    """What is promised, then what differs, kind by kind."""
    changes = [*_changed_actions(plan, other), *_changed_modules(plan, other)]
    return "\n".join([*_promises(plan, other), *(changes or ["all actions are the same"])])


def _promises(plan: Plan, other: Plan) -> Iterator[str]:
    yield f"budget {plan.budget} -> {other.budget}"
    yield f"kept {human_bytes(plan.kept_bytes)} -> {human_bytes(other.kept_bytes)}"
    if plan.peak_bytes is not None and other.peak_bytes is not None:
        yield f"peak {human_bytes(plan.peak_bytes)} -> {human_bytes(other.peak_bytes)}"
    yield f"step {step_time(plan)} -> {step_time(other)}"
    yield f"gradient error {gradient_error(plan.error)} -> {gradient_error(other.error)}"


def _changed_actions(plan: Plan, other: Plan) -> Iterator[str]:
    old, new = (dict(_by_site(p)) for p in (plan, other))
    changes: dict[tuple[str, str, str], list[str]] = {}
    for site in dict.fromkeys((*old, *new)):
        before, after = old.get(site, "nothing said"), new.get(site, "nothing said")
        if before != after:
            changes.setdefault((_numberless(site), before, after), []).append(site)
    for (_, before, after), sites in changes.items():
        yield f"{_where(sites)}: {before} -> {after}{_times(len(sites))}"


def _changed_modules(plan: Plan, other: Plan) -> Iterator[str]:
    for path in sorted(set(plan.recompute) ^ set(other.recompute)):
        yield f"{path_name(path)}: {'runs' if path in other.recompute else 'no longer runs'} again in backward"
    was, now = (dict(p.fused) for p in (plan, other))
    for path in sorted(was.keys() ^ now.keys()):
        yield f"{path_name(path)}: {'now' if path in now else 'no longer'} computed by a fused op"
    for path in sorted(path for path in was.keys() & now.keys() if was[path] != now[path]):
        yield f"{path_name(path)} computed by a fused op: {was[path]} -> {now[path]}"
    was, now = (dict(p.boundaries) for p in (plan, other))
    for path in sorted(path for path in was.keys() & now.keys() if was[path] != now[path]):
        yield f"inputs of {path_name(path)}: {was[path]} -> {now[path]}"


def _by_site(plan: Plan) -> Iterator[tuple[str, str]]:
    seen: Counter[str] = Counter()
    for action in plan.actions:
        seen[action.site] += 1
        yield f"{action.site}{'#' * (seen[action.site] - 1)}", action.what


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""
