"""Rules: which codec goes where, in Python and as text; and the recipes' contract."""

from slimgrad.rules.recipe import Controller, Recipe, Shapes
from slimgrad.rules.rule import (
    AnyOf,
    At,
    ChannelsOf,
    InputOf,
    Operands,
    Rule,
    Rules,
    as_rules,
    check_against_model,
    path_matches,
)

__all__ = [
    "AnyOf",
    "At",
    "ChannelsOf",
    "Controller",
    "InputOf",
    "Operands",
    "Recipe",
    "Rule",
    "Rules",
    "Shapes",
    "as_rules",
    "check_against_model",
    "path_matches",
]
