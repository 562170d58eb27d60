"""Where hooks are switched on: the cheapest borders, and a count that frames can follow."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import slimgrad as sg
from slimgrad.codecs import Demand
from slimgrad.runtime import needs
from slimgrad.runtime.anchors import MAX_SAVED, lay_out
from slimgrad.runtime.tickets import Order
from slimgrad.runtime.watch import Chain
from slimgrad.spec import Site


def order(number: int, sibling: int | None = None) -> Order:
    what = {"path": "", "module": "", "call": 0, "node": "", "slot": "", "need": sg.Need.MASK, "dtype": ""}
    site = Site(**what, index=number, shape=(), bytes=0, storage=0)
    return Order(site, needs.EXACT, sg.Lossless(), Demand(), torch.float32, False, sibling)


def trail(*places: str) -> list[Chain]:
    """A trail from dotted paths: 'a.b' is saved by b inside a inside the model."""
    chains = []
    for place in places:
        parts = place.split(".") if place else []
        paths = ["", *(".".join(parts[: n + 1]) for n in range(len(parts)))]
        chains.append(tuple((path, 0) for path in paths))
    return chains


def test_nothing_ordered_means_no_borders() -> None:
    assert lay_out(trail("a", "b"), {}) == ({}, {})


def test_a_lone_module_gets_a_border_of_its_own() -> None:
    calls, borders = lay_out(trail(*["a"] * 20, "b", *["c"] * 20), {20: order(20)})
    assert borders == {"b": True}
    assert [entry is not None for entry in calls["b", 0]] == [True]


def test_a_block_in_which_most_is_packed_gets_one_border() -> None:
    places = [f"block.{name}" for name in "abcdef"]
    calls, borders = lay_out(trail(*["x"] * 90, *places), {90 + n: order(n) for n in range(6)})
    assert borders == {"block": True}
    assert [entry.site.index for entry in calls["block", 0]] == list(range(6))


def test_a_block_with_too_many_tensors_is_not_counted_as_one() -> None:
    places = [f"block.{n}" for n in range(MAX_SAVED + 1)]
    _, borders = lay_out(trail(*places), {n: order(n) for n in range(len(places))})
    assert set(borders) == set(places)


def test_quiet_children_of_a_module_with_orders_are_paused_or_counted() -> None:
    calls, borders = lay_out(trail("block", *["block.quiet"] * 30, "block"), {0: order(0), 31: order(31)})
    assert borders == {"block": True, "block.quiet": False}
    assert [entry.site.index for entry in calls["block", 0]] == [0, 31]


def test_a_module_called_from_two_places_is_never_merged_into_one_of_them() -> None:
    shared = [(("", 0), ("a", 0), ("s", 0)), (("", 0), ("b", 0), ("s", 1))]
    _, borders = lay_out(shared, {0: order(0), 1: order(1)})
    assert borders == {"": True} or borders == {"s": True}


def test_siblings_are_renumbered_with_their_anchor() -> None:
    calls, _ = lay_out(trail("x", "pool", "pool"), {2: order(2, sibling=1)})
    assert calls["pool", 0][1].sibling == 0


PATHS = st.sampled_from(["", "a", "a.b", "a.b.c", "a.d", "e", "e.f", "e.g.h"])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(PATHS, st.booleans()), max_size=80))
def test_a_frame_that_counts_by_the_borders_meets_every_order_at_its_tensor(places: list[tuple[str, bool]]) -> None:
    chains = trail(*(path for path, _ in places))
    orders = {number: order(number) for number, (_, ordered) in enumerate(places) if ordered}
    calls, borders = lay_out(chains, orders)
    saved: Counter[tuple[str, int]] = Counter()
    met = {}
    for number, chain in enumerate(chains):
        scope = None
        for call in chain:  # entering from the outside in, as modules are
            if call[0] in borders:
                scope = call if borders[call[0]] else None
        if scope is None:
            continue
        index = saved[scope]
        saved[scope] += 1
        found = calls.get(scope, ())
        if index < len(found) and found[index] is not None:
            met[number] = found[index].site.index
    assert met == {number: number for number in orders}
