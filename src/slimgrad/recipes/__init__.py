"""Recipes: published methods as rules, ready for `apply`."""

from slimgrad.recipes.fewbit import fewbit

__all__ = ["fewbit"]
