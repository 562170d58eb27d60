"""Solve the tables that ship with the package: `python -m slimgrad.tables`, run from the source tree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimgrad.errors import SpecError
from slimgrad.tables import store
from slimgrad.tables.functions import FAMILIES, SELU
from slimgrad.tables.question import Question, asked
from slimgrad.tables.table import Table, answered

BITS = (1, 2, 3, 4)
INTERVAL = (-10.0, 10.0)
VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "gelu": ({"approximate": "none"}, {"approximate": "tanh"}),
    "elu": ({}, SELU),  # torch.selu is an elu to autograd
}
"""Parameters other than the defaults that many models have."""


def questions() -> Iterator[Question]:
    """Each function with 1 to 4 bits, and once more with its jumps kept apart, where that is possible."""
    for name in FAMILIES:
        for parameters in VARIANTS.get(name, ({},)):
            for bits in BITS:
                for continuous in (False, True):
                    try:
                        yield asked(name, bits, INTERVAL, "uniform", None, continuous, parameters)
                    except SpecError:  # more jumps than borders
                        continue


def solved_tables() -> dict[str, Table]:
    return {question.key(): answered(question) for question in questions()}


def main() -> None:
    tables = {key: table.to_dict() for key, table in solved_tables().items()}
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(table)}" for key, table in tables.items())
    path = Path(__file__).with_name(store.SHIPPED)
    path.write_text(f'{{"tables": {{\n{lines}\n}}}}\n')
    print(f"{len(tables)} tables, {path.stat().st_size / 1024:.0f} KiB, in {path.name}")


if __name__ == "__main__":
    main()
