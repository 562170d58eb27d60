"""A memory planner's plans as one interactive page: a single HTML file that asks the network for nothing."""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib.resources import files
from string import Template
from typing import Any, TypedDict

from slimgrad.errors import SpecError

SCRIPTS = (
    "elements",
    "numbers",
    "tones",
    "tree",
    "areas",
    "axes",
    "figures",
    "frontier",
    "timeline",
    "treemap",
    "table",
    "page",
)
"""The page's scripts in the order in which they are read; together they are one function, so no name leaks."""


class Untouched(TypedDict):
    """One training step with nothing done to it."""

    kept: int
    """Bytes held at the end of forward."""
    peak: int | None
    """None where there is no timeline; then no plan has one either."""
    seconds: float | None
    """Seconds of the step; None if nobody measured."""


class StorageRow(TypedDict):
    """One storage that autograd keeps, or several that are too small to be told apart."""

    path: str
    """Module path of its lead saver; the model itself has the empty path."""
    module: str
    need: str
    """Name of its strongest need."""
    bytes: int
    count: int
    """How many storages it is."""
    savers: list[str]
    """Who keeps it, the lead first, as 'path:node.slot': 'transformer.h.0.mlp.act:GeluBackward0.self'."""


class PlanRow(TypedDict):
    """What the planner would do under one budget."""

    budget: int | str
    """Bytes, drawn as a line over the timeline; or a text, which is not."""
    label: str
    """The budget as people read it."""
    kept: int
    peak: int | None
    seconds: float | None
    slowdown: float | None
    """Step time in step times of the untouched step; None where nobody knows what that takes."""
    added: float
    """Seconds that it adds to the step."""
    error: float
    """Relative error of the gradient; 0 says that it is exact."""
    timeline: list[int]
    """Live bytes at each event, as many as those of the untouched step."""
    actions: list[str]
    """Of each storage, what is done to it: 'keep', 'quant(bits=4)', 'recompute'."""
    held: list[int]
    """Of each storage, the bytes still held at the end of forward."""


class _Optional(TypedDict, total=False):
    chosen: int
    """Which of the plans is shown first; the middle one if nobody says."""
    unmet: list[str]
    """Budgets that no plan meets."""


class FrontierData(_Optional):
    """What `frontier_page` shows, all of it plain JSON."""

    title: str
    of: str
    """What the budgets bound: "peak", or "kept"."""
    device: str
    torch: str
    untouched: Untouched
    storages: list[StorageRow]
    backward: float
    """Where backward begins, as a fraction of the events."""
    timeline: list[int]
    """Live bytes of the untouched step at each event, downsampled to a few hundred."""
    plans: list[PlanRow]
    """By falling budget."""


def frontier_page(data: Mapping[str, Any]) -> str:
    """The HTML page on which the plans of `data`, a `FrontierData`, are compared.

    Style, scripts and data are all inside it. Its content security policy forbids every request, and lets no style and
    no script act but the page's own, which it knows by their hashes.
    """
    check(data)
    style, script = resource("page.css"), joined_scripts()
    return Template(resource("page.html")).substitute(
        policy=policy(style, script),
        title=html.escape(str(data["title"])),
        style=style,
        script=script,
        data=embedded(data),
    )


def check(data: Mapping[str, Any]) -> None:
    """Refuse data whose lists do not go together: the page would show one storage's figures for another's."""
    if missing := [name for name in FrontierData.__required_keys__ if name not in data]:
        raise SpecError(f"frontier_page misses {', '.join(map(repr, sorted(missing)))} in its data")
    plans, storages, events = data["plans"], len(data["storages"]), len(data["timeline"])
    if not plans:
        raise SpecError("frontier_page needs at least one plan")
    if any((row["peak"] is None) != (events == 0) for row in (data["untouched"], *plans)):
        raise SpecError("frontier_page needs peaks and at least one event in its timeline, or neither")
    if data["of"] not in ("peak", "kept") or (data["of"] == "peak" and not events):
        raise SpecError(
            f"frontier_page cannot draw plans by {data['of']!r}: expected 'peak', with a timeline, or 'kept'"
        )
    if not 0 <= data.get("chosen", 0) < len(plans):
        raise SpecError(f"frontier_page cannot begin with plan {data['chosen']}: there are {len(plans)}, from 0")
    for plan in plans:
        for name, expected in (("actions", storages), ("held", storages), ("timeline", events)):
            if len(plan[name]) != expected:
                raise SpecError(f"plan {plan['label']!r} has {len(plan[name])} {name}, expected {expected}")


def embedded(data: Mapping[str, Any]) -> str:
    """JSON that can stand inside a script element: no text in it can end the element or begin a comment."""
    try:
        text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise SpecError(f"frontier_page needs plain JSON data with finite numbers: {error}") from error
    return text.replace("&", r"\u0026").replace("<", r"\u003c").replace(">", r"\u003e")


def joined_scripts() -> str:
    parts = "\n".join(resource(f"{name}.js") for name in SCRIPTS)
    return f'(() => {{\n"use strict";\n\n{parts}}})();\n'


def policy(style: str, script: str) -> str:
    rules = ("default-src 'none'", "base-uri 'none'", "form-action 'none'")
    return "; ".join((*rules, f"style-src {hashed(style)}", f"script-src {hashed(script)}"))


def hashed(text: str) -> str:
    """The text's hash as a content security policy writes it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def resource(name: str) -> str:
    return (files("slimgrad.report") / "frontier" / name).read_text(encoding="utf-8")
