"""frontier: the plans for a whole range of budgets, from the untouched step to the smallest that can be reached."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from slimgrad.errors import BudgetError, SpecError
from slimgrad.planner.bounds import Bound, Budget, Tolerance, bound_of
from slimgrad.planner.calibration import Calibration, Progress
from slimgrad.planner.choices import Choices
from slimgrad.planner.plan import Key, Plan
from slimgrad.planner.planning import Draft
from slimgrad.planner.sensitivity import Sensitivity
from slimgrad.planner.settings import Settings, check_kind
from slimgrad.planner.timing import calibrated_for
from slimgrad.report import frontiers
from slimgrad.report.frontier_page import frontier_page
from slimgrad.report.human import path_name, plural
from slimgrad.spec import Need, Profile, Site, Storage, Value
from slimgrad.spec.budgets import bytes_of

BUDGETS = 16
"""How many are swept if none are given."""

FAR = 64
"""Beyond so many times less, budgets are not swept, but for the smallest."""

TYPED = ("B", "KiB", "MiB", "GiB")
"""Units in which budgets are given."""

POINTS = 600
"""Of a timeline, at the most."""

CRUMBS = 1e-3
"""Storages that are left alone are not told of if they hold no more of what is kept."""

DIGITS = 3
"""Of a budget that was not given, rounded up."""

EVEN = 1e-9
"""Of a step: plans that differ by less take the same time."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Block(Value):
    """One storage, or several of one module that are left alone because they are small."""

    path: str
    """Of the saver that asks for most."""
    module: str
    need: str
    bytes: int
    savers: tuple[str, ...] = ()
    """Their names, the one that asks for most first."""
    key: Key | None = None
    """Site.key of that one; None for what no plan decides about."""
    count: int = 1
    """How many storages it is."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Frontier(Value):
    """Plans from the largest budget to the smallest, each slower than the one before or less faithful."""

    model: str
    device: str
    torch: str
    of: str
    """What the budgets bound: "peak", or "kept"."""
    kept_before: int
    """Bytes of the untouched step at the end of forward."""
    peak_before: int | None = None
    """The most bytes in the untouched step, with what is there before it; None without a timeline."""
    fixed_bytes: int = 0
    step_seconds: float = 0.0
    """What the untouched step takes, by calibration."""
    backward: float = 0.0
    """Where backward begins in a timeline, from 0 to 1."""
    timeline: tuple[int, ...] = ()
    """Bytes alive in the untouched step: of so many stretches of it, the most in each."""
    blocks: tuple[Block, ...] = ()
    """What is kept."""
    plans: tuple[Plan, ...]
    budgets: tuple[int, ...]
    """Of each plan, in bytes."""
    timelines: tuple[tuple[int, ...], ...] = ()
    """Of each plan."""
    unmet: tuple[str, ...] = ()
    """Budgets that no plan meets."""

    def __post_init__(self) -> None:
        if not self.plans:
            raise SpecError("Frontier: expected plans, found none")
        if not len(self.plans) == len(self.budgets) == len(self.timelines):
            found = f"{len(self.plans)} plans, {len(self.budgets)} budgets, {len(self.timelines)} timelines"
            raise SpecError(f"Frontier: expected a budget and a timeline for each plan, found {found}")

    def within(self, budget: Budget) -> int:
        """The number of the fastest plan that meets `budget`, which may lie between those that were swept."""
        limit = _limit(bound_of(budget, self.kept_before))
        found = next((number for number, size in enumerate(self.budgets) if size <= limit), None)
        if found is None:
            raise BudgetError(f"no plan of this frontier meets {budget}; the last is for {self.plans[-1].budget}")
        return found

    def save(self, path: str | Path, *, chosen: int | None = None) -> Path:
        """Write one HTML file that compares the plans and needs nothing else; it begins with plan number `chosen`."""
        page = frontier_page(frontiers.page_data(self, chosen))
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(page, encoding="utf-8")
        return Path(path)

    def plot(self, path: str | Path) -> Path:
        """Draw peak memory against the time of a step and write it to `path`."""
        return frontiers.frontier_plot(self, Path(path))

    def table(self) -> str:
        return frontiers.frontier_table(self)

    def __str__(self) -> str:
        return self.table()


def frontier(
    profile: Profile,
    budgets: Iterable[Budget] | None = None,
    *,
    also: Budget | None = None,
    max_error: float | None = None,
    allow: str | Collection[str] | None = None,
    reserve: str | int = 0,
    sensitivity: Sensitivity | None = None,
    calibration: Calibration | None = None,
    progress: Progress | None = None,
    min_bytes: int | None = None,
) -> Frontier:
    """Plans for many budgets, to see what memory costs in time before choosing one.

    `budgets` are as in `plan`, all in bytes or all ratios. By default they lead in even ratios from the untouched peak
    to the smallest that can be reached, or, where the profile has no timeline, from all that is kept to the least.
    `also` adds one to these, and if that is a ratio, so are they. A budget that gains nothing over a smaller one is
    left out, so that each plan is faster than the next. The rest is as in `plan`.
    """
    tell: Progress = progress or (lambda *_: None)
    check_kind("profile", profile, Profile)
    tolerance = Tolerance.of(None, max_error)
    given = Settings.of(allow, reserve, min_bytes, sensitivity, calibration, tolerance)
    more = [] if also is None else [bound_of(also, profile.kept_bytes)]
    asked = None if budgets is None else checked([*bounds_of(budgets, profile.kept_bytes), *more])
    speeds = calibration or calibrated_for(profile, tell)
    draft = Draft(Choices.of(profile, given.names, speeds, given.reserve, given.min_bytes, sensitivity))
    tell(0, BUDGETS, "the smallest budget")
    of_kept = profile.timeline is None or any(bound.kept is not None for bound in more)
    bounds = [*spread(draft, tolerance, of_kept), *more] if asked is None else asked
    points, unmet = sweep(draft, checked(bounds), tolerance, tell)
    return _told(draft, points, unmet, "peak" if bounds[0].kept is None else "kept")


def bounds_of(budgets: Iterable[Budget], kept_before: int) -> list[Bound]:
    if isinstance(budgets, str) or not isinstance(budgets, Iterable):
        raise SpecError(f"frontier: expected a list of budgets, such as ['12GiB', '8GiB'] or ['2x']; found {budgets!r}")
    return [bound_of(budget, kept_before) for budget in budgets]


def checked(bounds: Sequence[Bound]) -> Sequence[Bound]:
    if not bounds:
        raise SpecError("frontier: expected budgets, found none")
    if len({bound.peak is None for bound in bounds}) > 1:
        raise SpecError(
            "frontier: expected budgets that are all in bytes, such as '12GiB', or all ratios, such as '4x'"
        )
    return bounds


# --- budgets ---


def spread(draft: Draft, tolerance: Tolerance, of_kept: bool) -> list[Bound]:
    """From the largest sensible budget to the smallest; what is there before the step is in all of them."""
    least, fixed = draft.smallest("kept" if of_kept else "peak", tolerance), draft.fixed
    if of_kept or least.peak_bytes is None or least.peak_before is None:
        return [_kept(size, least.kept_before) for size in steps(least.kept_before, least.kept_bytes)]
    return [_peak(fixed + size) for size in steps(least.peak_before - fixed, least.peak_bytes - fixed)]


def _peak(size: int) -> Bound:
    """Rounded up to what one would type."""
    unit = next(number for number in range(len(TYPED)) if size < 1024 ** (number + 1) or number + 1 == len(TYPED))
    text = f"{_rounded(size / 1024**unit, math.ceil):g} {TYPED[unit]}"
    return Bound(text, peak=max(size, bytes_of(text)))


def _kept(size: int, whole: int) -> Bound:
    found = bound_of(f"{_rounded(whole / size, math.floor):g}x" if size else "1x", whole)
    return replace(found, kept=max(size, found.kept or 0))


def _rounded(value: float, to_whole: Callable[[float], int]) -> float:
    shift: int = 10 ** max(0, DIGITS - len(str(int(value))))
    return to_whole(value * shift) / shift


def steps(most: int, least: int) -> list[int]:
    """Sizes in even ratios, both ends among them."""
    if least >= most:
        return [most]
    end = max(least, most // FAR, 1)
    sizes = [round(most * (end / most) ** (place / (BUDGETS - 1))) for place in range(BUDGETS)]
    return list(dict.fromkeys((*sizes, max(least, 1))))


# --- plans ---


@dataclass(frozen=True)
class Point:
    """A plan, the bytes it was given, and its bytes at each event."""

    plan: Plan
    budget: int
    events: tuple[int, ...]


def sweep(
    draft: Draft, bounds: Sequence[Bound], tolerance: Tolerance, progress: Progress
) -> tuple[list[Point], tuple[str, ...]]:
    """The plans, by falling budget, and the budgets that none meets."""
    points: list[Point] = []
    unmet: list[BudgetError] = []
    missed: list[str] = []
    for number, bound in enumerate(sorted(bounds, key=_limit)):  # a plan for a small budget meets all larger ones
        progress(number, len(bounds), f"budget {bound.text}")
        try:
            plan, events = draft.traced(bound, tolerance, thorough=False)  # there are many
        except BudgetError as error:
            unmet.append(error)
            missed.append(bound.text)
            continue
        if not points or gains(plan, points[-1].plan):
            points.append(Point(plan, _limit(bound), events))
    progress(len(bounds), len(bounds), "done")
    if not points:
        raise unmet[-1]
    return points[::-1], tuple(missed)


def _limit(bound: Bound) -> int:
    limit = bound.kept if bound.peak is None else bound.peak
    assert limit is not None
    return limit


def gains(plan: Plan, other: Plan) -> bool:
    """Whether it is faster, or as fast and more faithful."""
    apart = plan.seconds - other.seconds
    even = EVEN * max(plan.step_seconds, plan.seconds)
    return apart < -even or (apart <= even and plan.error < other.error * (1 - EVEN))


# --- what is told ---


def _told(draft: Draft, points: Sequence[Point], unmet: tuple[str, ...], of: str) -> Frontier:
    profile, timeline, first = draft.profile, draft.profile.timeline, points[0].plan
    untouched = () if timeline is None else tuple(draft.fixed + size for size in draft.choices.untouched)
    return Frontier(
        model=first.model,
        device=first.device,
        torch=str(profile.meta.get("torch", "")),
        of=of,
        kept_before=first.kept_before,
        peak_before=first.peak_before,
        fixed_bytes=draft.fixed,
        step_seconds=first.step_seconds,
        backward=0.0 if timeline is None else timeline.backward / max(1, len(timeline.floor)),
        timeline=coarse(untouched),
        blocks=tuple(blocks_of(profile, {key for action in first.actions for key in action.keys})),
        plans=tuple(point.plan for point in points),
        budgets=tuple(point.budget for point in points),
        timelines=tuple(() if timeline is None else coarse(point.events) for point in points),
        unmet=unmet,
    )


def coarse(events: Sequence[int]) -> tuple[int, ...]:
    """No more than POINTS of them: the most in each of so many equal stretches."""
    count = min(POINTS, len(events))
    cuts = [place * len(events) // count for place in range(count + 1)] if count else []
    return tuple(max(events[start:stop]) for start, stop in pairwise(cuts))


def blocks_of(profile: Profile, decided: Collection[Key]) -> list[Block]:
    """Every storage that is decided about, and the others by module of the top level, if they hold enough to show."""
    counted = [storage for storage in profile.storages if storage.counted]
    blocks = [_block(profile, storage) for storage in counted if profile.lead(storage).key in decided]
    alone = [storage for storage in counted if profile.lead(storage).key not in decided]
    if sum(storage.bytes for storage in alone) > CRUMBS * profile.kept_bytes:
        blocks += _together(profile, alone)
    return blocks


def _block(profile: Profile, storage: Storage) -> Block:
    lead = profile.lead(storage)
    others = [profile.sites[number].name for number in storage.savers]
    return Block(
        path=lead.path,
        module=lead.module,
        need=str(lead.need),
        bytes=storage.bytes,
        savers=tuple(dict.fromkeys((lead.name, *others))),
        key=lead.key,
    )


def _together(profile: Profile, storages: Sequence[Storage]) -> list[Block]:
    groups: dict[tuple[str, Need], list[Storage]] = {}
    for storage in storages:
        lead = profile.lead(storage)
        groups.setdefault((_top(lead), lead.need), []).append(storage)
    return [
        Block(
            path=path,
            module="several",
            need=str(need),
            bytes=sum(storage.bytes for storage in group),
            savers=(f"{path_name(path)}:{plural(len(group), 'small storage')}",),
            count=len(group),
        )
        for (path, need), group in groups.items()
    ]


def _top(site: Site) -> str:
    return site.path.partition(".")[0]
