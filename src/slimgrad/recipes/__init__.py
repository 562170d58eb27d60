"""Recipes: published methods as rules, ready for `apply`."""

from slimgrad.recipes.dropit import DropIT, dropit
from slimgrad.recipes.fewbit import fewbit

__all__ = ["DropIT", "dropit", "fewbit"]
