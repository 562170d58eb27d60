"""sensitivity: what four bits in each kind of storage do to the gradients of a real batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from slimgrad.codecs import Lossless, Quant
from slimgrad.planner.calibration import Progress
from slimgrad.planner.offers import Item, items_of
from slimgrad.profiler.grad_error import grad_error
from slimgrad.profiler.profile import profile
from slimgrad.rules import At, Rule
from slimgrad.spec import Profile, Site, Value
from slimgrad.spec.budgets import as_bytes

PROBE = Quant(bits=4)


@dataclass(frozen=True, kw_only=True, repr=False)
class Sensitivity(Value):
    """What a plan would otherwise take from what is known of codecs in general."""

    model: str
    errors: Mapping[str, float]
    """Kind of storage -> what `PROBE` in one storage of the kind adds to the squared relative error of the gradient."""

    def error(self, site: Site) -> float | None:
        """None if the kind was not measured."""
        return self.errors.get(kind_of(site))


def kind_of(site: Site) -> str:
    """Layers that repeat are of one kind."""
    return f"{site.module} {site.node}.{site.slot}"


def sensitivity(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    least: int = 4096,
    progress: Progress | None = None,
) -> Sensitivity:
    """Measure, kind by kind, what four bits do to the gradients of one batch: two steps for each kind.

    The model must fit on its device for that, with `batch` as small as one likes: it is a ratio that is measured.
    """
    least = as_bytes(least, "least")
    found = profile(model, batch, loss_fn, fake=True, timeline=False)
    kinds: dict[str, list[Item]] = {}
    for item in items_of(found, least):
        kinds.setdefault(kind_of(lead_of(found, item)), []).append(item)
    errors = {}
    for number, (kind, items) in enumerate(kinds.items()):
        if progress is not None:
            progress(number, len(kinds), kind)
        keys = At(frozenset(found.sites[site].key for item in items for site in item.sites))
        error = grad_error(model, batch, [Rule(keys, PROBE), Rule(keys, Lossless())], loss_fn, min_bytes=least)
        errors[kind] = error.relative**2 / len(items)
    return Sensitivity(model=type(model).__name__, errors=errors)


def lead_of(found: Profile, item: Item) -> Site:
    """The saver that asks for most."""
    return max((found.sites[site] for site in item.sites), key=lambda site: site.need.rank)
