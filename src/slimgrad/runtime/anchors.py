"""Where to switch hooks on: the cheapest set of modules whose calls cover every tensor that has an order.

Two prices decide (measured on the host of an H200): a border, that is module hooks and our hooks switched on and off
around one call, takes about 16 us; a tensor that passes through active hooks only to be kept takes about 6 us. Where
most tensors of a block are packed, one border around the block is therefore cheaper than one around each module in it;
where few are, each such module has its own. Such a module is an anchor: tensors are counted from its call. An anchor
stays small, so that a forward that skips a block cannot shift the count of the next one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from slimgrad.runtime.tickets import Order
from slimgrad.runtime.watch import Chain

BORDER_US = 16.0
PASSING_US = 6.0
MAX_SAVED = 64
"""Tensors that one call of an anchor may save, unless it saves them all itself."""

Borders = dict[str, bool]


@dataclass
class Census:
    """How often each module is called, and how many tensors are saved and ordered in it and below."""

    calls: dict[str, set[int]] = field(default_factory=dict)
    own: Counter[str] = field(default_factory=Counter)
    below: Counter[str] = field(default_factory=Counter)
    own_ordered: Counter[str] = field(default_factory=Counter)
    below_ordered: Counter[str] = field(default_factory=Counter)
    children: dict[str, dict[str, None]] = field(default_factory=dict)
    parents: dict[str, set[str]] = field(default_factory=dict)

    def count(self, chain: Chain, ordered: bool) -> None:
        for path, call in chain:
            self.calls.setdefault(path, set()).add(call)
        for path in {path for path, _ in chain}:
            self.below[path] += 1
            self.below_ordered[path] += ordered
        self.own[chain[-1][0]] += 1
        self.own_ordered[chain[-1][0]] += ordered
        for (parent, _), (child, _) in pairwise(chain):
            self.children.setdefault(parent, {})[child] = None
            self.parents.setdefault(child, set()).add(parent)

    def may_merge(self, path: str) -> bool:
        """Whether counting may start at `path` for all below it: few tensors, and no module that others call too."""
        if self.below[path] > MAX_SAVED * len(self.calls[path]):
            return False
        pending, seen = [path], set()
        while pending:
            for child in self.children.get(pending.pop(), ()):
                if child in seen or len(self.parents[child]) > 1 or child == path:
                    return False
                seen.add(child)
                pending.append(child)
        return True


def lay_out(
    trail: Sequence[Chain], orders: Mapping[int, Order]
) -> tuple[dict[tuple[str, int], tuple[Order | None, ...]], Borders]:
    """The orders of each anchor's call, and the borders: True where an anchor is entered, False where one is paused."""
    census = Census()
    for number, chain in enumerate(trail):
        census.count(chain, number in orders)
    borders: Borders = {}
    for top in dict.fromkeys(chain[0][0] for chain in trail):
        borders |= _cheapest(top, census, frozenset())[1]
    return _counted(trail, orders, borders), borders


def _cheapest(path: str, census: Census, above: frozenset[str]) -> tuple[float, Borders]:
    """Price and borders for everything ordered in `path` and below."""
    if not census.below_ordered[path] or path in above:
        return 0.0, {}
    calls = len(census.calls[path])
    price, borders = 0.0, {}
    own = census.own_ordered[path] > 0
    if own:
        price, borders = BORDER_US * calls + PASSING_US * census.own[path], {path: True}
    for child in census.children.get(path, ()):
        if census.below_ordered[child]:
            child_price, child_borders = _cheapest(child, census, above | {path})
            price, borders = price + child_price, borders | child_borders
        if own and not census.own_ordered[child] and child not in borders:
            price, borders = price + BORDER_US * len(census.calls[child]), borders | {child: False}
    merged = BORDER_US * calls + PASSING_US * census.below[path]
    if census.children.get(path) and merged <= price and census.may_merge(path):
        return merged, {path: True}
    return price, borders


def _counted(
    trail: Sequence[Chain], orders: Mapping[int, Order], borders: Mapping[str, bool]
) -> dict[tuple[str, int], tuple[Order | None, ...]]:
    """Number each tensor within the call of its anchor, as a frame will count it."""
    saved: Counter[tuple[str, int]] = Counter()
    placed: dict[int, int] = {}
    found: dict[tuple[str, int], dict[int, Order]] = {}
    for number, chain in enumerate(trail):
        anchor = next((call for call in reversed(chain) if call[0] in borders), None)
        if anchor is None or not borders[anchor[0]]:
            continue
        placed[number] = saved[anchor]
        saved[anchor] += 1
        if number in orders:
            order = orders[number]
            sibling = None if order.sibling is None else placed[order.sibling]
            found.setdefault(anchor, {})[placed[number]] = replace(order, sibling=sibling)
    return {call: tuple(part.get(i) for i in range(max(part) + 1)) for call, part in found.items()}
