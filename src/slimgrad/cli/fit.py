"""`slimgrad fit package.module:factory --budget 12GiB`: plan, and see with a real step that it is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from slimgrad.cli.files import check_targets, write
from slimgrad.cli.plan import (
    ALLOW,
    BUDGET,
    ERROR,
    RESERVE,
    SLOWDOWN,
    checked_budget,
    checked_bytes,
    checked_names,
    progress_bar,
)
from slimgrad.cli.profile import RETURNS, Autocast, checked_device, made_by, moved, precision


def fit(
    factory: str = typer.Argument(..., help=f"package.module:factory, a function that returns {RETURNS}."),
    budget: str = BUDGET,
    max_slowdown: float | None = SLOWDOWN,
    max_error: float | None = ERROR,
    allow: str | None = ALLOW,
    reserve: str = RESERVE,
    max_batch: bool = typer.Option(False, "--max-batch", help="Find the largest batch that fits, on fake tensors."),
    json: Path | None = typer.Option(None, "--json", help="Write the plan to this file, as JSON."),
    device: str | None = typer.Option(None, "--device", help="Device to run on, such as cpu or cuda:0."),
    autocast: Autocast | None = typer.Option(None, "--autocast", help="Run under autocast."),
) -> None:
    """Plan how a training step fits a budget, run one, and say what the allocator counted. No weight changes.

    slimgrad fit train:make --budget 12GiB --reserve 2GiB --json plan.json

    slimgrad fit train:make --budget 16GiB --max-batch
    """
    import slimgrad as sg

    asked: Any = checked_budget(budget)
    settings: dict[str, Any] = {"max_slowdown": max_slowdown, "max_error": max_error, "allow": checked_names(allow)}
    settings["reserve"] = checked_bytes(reserve)
    checked_device(device)
    check_targets(json=json)
    model, batch, loss_fn = made_by(factory)
    if device:
        model, batch = moved(model, device), moved(batch, device)
    with precision(autocast, device, model), progress_bar() as progress:
        search = sg.max_batch if max_batch else sg.fit
        found: Any = search(model, batch, asked, loss_fn, progress=progress, **settings)
    typer.echo(str(found))
    if json is not None:
        write(json, found.plan.to_json())
        typer.echo(f"wrote {json}")
