"""Which channels are trained in an epoch: drawn in an order, until the next one would not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slimgrad.recipes.trady.costs import Chosen

Pool = Mapping[str, int]
"""Path of a layer -> how many channels it has."""


EPOCH_BITS, WORD = 24, 32
"""Torch's generator on a CPU looks at a seed's last word alone."""
MULTIPLIER = 0x9E3779B1


def generator(seed: int, epoch: int) -> torch.Generator:
    """Draws of one epoch follow from the two alone, so that a training can go on where it stopped."""
    rest = seed >> (WORD - EPOCH_BITS)
    mixed = (rest ^ rest >> WORD) * MULTIPLIER
    return torch.Generator().manual_seed(((seed << EPOCH_BITS) + epoch ^ mixed) % (1 << WORD))


def uniform(pool: Pool, random: torch.Generator) -> Tensor:
    """All channels of the pool, counted through its layers, in a random order."""
    return torch.randperm(sum(pool.values()), generator=random)


def weighted(pool: Pool, norms: Mapping[str, Tensor], random: torch.Generator) -> Tensor:
    """The same, where a channel comes next with a chance proportional to the norm of its gradient as it was seen last;
    those that were never seen (NaN) have the largest. Exponential clocks: each rings after a time with that rate.
    """
    known = torch.cat([norms.get(path, torch.full((n,), torch.nan)).double() for path, n in pool.items()])
    largest = known[~known.isnan()].amax() if not known.isnan().all() else torch.ones((), dtype=torch.float64)
    rates = torch.where(known.isnan(), largest, known)
    clocks = torch.empty_like(rates).exponential_(generator=random) / rates  # a rate of 0 never rings
    return clocks.argsort(stable=True)


def largest_first(pool: Pool, scores: Mapping[str, Sequence[float]]) -> Tensor:
    return torch.tensor([score for path in pool for score in scores[path]]).argsort(descending=True, stable=True)


def taken(pool: Pool, price: Mapping[str, int], budget: int, order: Tensor) -> Chosen:
    """The first channels in this order that fit in the budget together.

    To stop at the first that does not fit, instead of filling up with cheap ones, is what makes every channel as likely
    as every other. Those that would not fit alone are left out beforehand.
    """
    layers = list(pool)
    counts = torch.tensor([pool[path] for path in layers])
    prices = torch.tensor([price[path] for path in layers]).repeat_interleave(counts)[order]
    order = order[prices <= budget]
    spent = prices[prices <= budget].cumsum(0)
    mine = order[: int((spent <= budget).sum())].sort().values
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    found: dict[str, tuple[int, ...]] = {}
    for number, path in enumerate(layers):
        inside = mine[(mine >= starts[number]) & (mine < starts[number + 1])] - starts[number]
        if len(inside):
            found[path] = tuple(inside.tolist())
    return found
