"""What a choice comes to: exactly, in integers; and a problem as arrays, cut where its bytes change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slimgrad.planner.problem import Option, Problem, Solution

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def usage(problem: Problem, choice: Sequence[int]) -> Ints:
    """The bytes of each event under a choice."""
    events = len(problem.floor)
    changes = np.zeros(events + 1, dtype=np.int64)
    for option in _chosen(problem, choice):
        for span in option.spans:
            start, stop = max(span.start, 0), min(span.stop, events)
            if start < stop:
                changes[start] += span.bytes
                changes[stop] -= span.bytes
    return np.array(problem.floor, dtype=np.int64) + np.cumsum(changes[:-1])


def evaluate(problem: Problem, choice: Sequence[int]) -> Solution:
    """What a choice comes to, whether or not it is within the bounds; the order of the groups makes no difference."""
    options = _chosen(problem, choice)
    return Solution(
        choice=tuple(int(number) for number in choice),
        seconds=math.fsum(option.seconds for option in options),
        error=math.fsum(option.error for option in options),
        kept=sum(option.kept for option in options),
        peak=int(usage(problem, choice).max(initial=0)),
        link=math.fsum(option.link for option in options),
    )


def _chosen(problem: Problem, choice: Sequence[int]) -> list[Option]:
    return [group[number] for group, number in zip(problem.groups, choice, strict=True)]


@dataclass(frozen=True)
class Sheet:
    """A problem as arrays: of options, group after group, and of their spans, in the same order.

    The step is cut into segments where a span begins or ends. Within a segment every choice holds the same bytes, so
    only its highest floor counts: 9000 events make some 1000 segments.
    """

    firsts: Ints
    """The first option of each group."""
    owners: Ints
    """The group of each option."""
    seconds: Floats
    error: Floats
    link: Floats
    kept: Ints
    floor: Ints
    """The highest of each segment."""
    options: Ints
    """Whose each span is."""
    starts: Ints
    """The first segment of each span."""
    stops: Ints
    bytes: Ints

    @classmethod
    def of(cls, problem: Problem) -> Sheet:
        sizes = np.array([len(group) for group in problem.groups], dtype=np.int64)
        options = [option for group in problem.groups for option in group]
        spans = np.array(
            [(n, s.start, s.stop, s.bytes) for n, option in enumerate(options) for s in option.spans], dtype=np.int64
        ).reshape(-1, 4)
        starts, stops = spans[:, 1:3].clip(0, len(problem.floor)).T
        spans, starts, stops = (column[starts < stops] for column in (spans, starts, stops))
        cuts = np.unique(np.concatenate([starts, stops, [0]]))
        cuts = cuts[cuts < len(problem.floor)]
        return cls(
            firsts=np.cumsum(sizes) - sizes,
            owners=np.repeat(np.arange(len(sizes)), sizes),
            seconds=np.array([option.seconds for option in options], dtype=np.float64),
            error=np.array([option.error for option in options], dtype=np.float64),
            link=np.array([option.link for option in options], dtype=np.float64),
            kept=np.array([option.kept for option in options], dtype=np.int64),
            floor=np.maximum.reduceat(np.array(problem.floor, dtype=np.int64), cuts) if len(cuts) else np.zeros(0, int),
            options=spans[:, 0],
            starts=np.searchsorted(cuts, starts),
            stops=np.searchsorted(cuts, stops),
            bytes=spans[:, 3],
        )

    def totals(self, weights: Floats) -> Floats:
        """The bytes of each segment where each option is taken with a weight from 0 to 1."""
        changes = np.zeros(len(self.floor) + 1)
        held = weights[self.options] * self.bytes
        np.add.at(changes, self.starts, held)
        np.add.at(changes, self.stops, -held)
        return self.floor.astype(np.float64) + np.cumsum(changes[:-1])

    def excess(self, values: Floats) -> Floats:
        """By how much each option is above the least of its group."""
        return values - np.minimum.reduceat(values, self.firsts)[self.owners]

    def least(self, values: Floats) -> float:
        """What every choice comes to at the least."""
        return math.fsum(np.minimum.reduceat(values, self.firsts))

    def fits(self, most_peak: int) -> Bools:
        """Which options leave room for the least of every other group, at all events."""
        room = most_peak - self.floor
        for _, window, held in self._windows():
            room[window] -= held.min(axis=0)
        found = np.full(len(self.owners), bool((room >= 0).all()))
        for options, window, held in self._windows():
            found[options] &= (held - held.min(axis=0) <= room[window]).all(axis=1)
        return found

    def _windows(self) -> Iterator[tuple[slice, slice, Ints]]:
        """Of each group: its options, the segments its spans reach, and the bytes of each option in each of them."""
        ends = np.append(self.firsts[1:], len(self.owners))
        marks = np.searchsorted(self.options, np.append(self.firsts, len(self.owners)))
        for first, end, low, high in zip(self.firsts, ends, marks[:-1], marks[1:], strict=True):
            if low == high:
                continue
            starts, stops = self.starts[low:high], self.stops[low:high]
            origin, whose = starts.min(), self.options[low:high] - first
            changes = np.zeros((end - first, stops.max() - origin + 1), dtype=np.int64)
            np.add.at(changes, (whose, starts - origin), self.bytes[low:high])
            np.add.at(changes, (whose, stops - origin), -self.bytes[low:high])
            yield slice(first, end), slice(origin, stops.max()), changes.cumsum(axis=1)[:, :-1]
