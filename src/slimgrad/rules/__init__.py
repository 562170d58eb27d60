"""Rules: which codec goes where, in Python and as text; and the recipes' contract."""

from slimgrad.rules.rule import (
    AnyOf,
    Controller,
    InputOf,
    Operands,
    Recipe,
    Rule,
    Rules,
    as_rules,
    check_against_model,
    path_matches,
)

__all__ = [
    "AnyOf",
    "Controller",
    "InputOf",
    "Operands",
    "Recipe",
    "Rule",
    "Rules",
    "as_rules",
    "check_against_model",
    "path_matches",
]
