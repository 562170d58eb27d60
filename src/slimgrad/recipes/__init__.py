"""Recipes: published methods, ready for `apply`. Adding one = one file here and one line below."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from slimgrad.errors import RuleError
from slimgrad.recipes.block_pruning import BlockPruning, block_pruning
from slimgrad.recipes.comet import Comet, comet
from slimgrad.recipes.dropit import DropIT, dropit
from slimgrad.recipes.fewbit import fewbit
from slimgrad.recipes.trady import ChannelChoice, LayerRank, Ranking, Trady, trady
from slimgrad.rules import Recipe
from slimgrad.rules.wording import called

RECIPES: dict[str, Callable[..., Recipe]] = {
    "dropit": dropit,
    "block_pruning": block_pruning,
    "comet": comet,
    "trady": trady,
}
"""Those that a text may name. `fewbit` needs no model: its rules are made at once, and a text names its codec."""


def recipe_from(text: Any) -> Recipe | None:
    """The recipe that a text calls for, as in "dropit(keep=0.1, rest=quant(bits=4))"; None if it does not."""
    if not isinstance(text, str) or text.partition("(")[0].strip() not in RECIPES:
        return None
    name, settings = called(text)
    try:
        return RECIPES[name](**settings)
    except TypeError as error:
        raise RuleError(f"cannot read {text!r}: {error}") from error


__all__ = [
    "RECIPES",
    "BlockPruning",
    "ChannelChoice",
    "Comet",
    "DropIT",
    "LayerRank",
    "Ranking",
    "Trady",
    "block_pruning",
    "comet",
    "dropit",
    "fewbit",
    "recipe_from",
    "trady",
]
