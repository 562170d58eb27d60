"""`slimgrad plan package.module:factory --budget 12GiB`: what to do to each storage so that a step fits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slimgrad.cli.files import check_targets, write
from slimgrad.cli.profile import RETURNS, Autocast, checked_device, made_by, moved, precision

if TYPE_CHECKING:
    from slimgrad.planner.calibration import Progress

BUDGET = typer.Option(
    ...,
    "--budget",
    "-b",
    metavar="BYTES|RATIO",
    help="The most that a step may hold on the device, parameters and gradients included: 12GiB, 800MB. Or a ratio of "
    "what is kept for backward: 4x for four times less, which is 0.25.",
)
SLOWDOWN = typer.Option(
    None, "--max-slowdown", min=1.0, metavar="RATIO", help="The longest a step may take: 1.1 for 10 % more time."
)
ERROR = typer.Option(
    None,
    "--max-error",
    min=0.0,
    metavar="RATIO",
    help="The largest relative error of the gradient: 0.2; 0 for none. By default 0.35, that of four bits everywhere.",
)
ALLOW = typer.Option(
    None,
    "--allow",
    metavar="NAMES",
    help="What may be done, with commas: lossless, derive, recompute, fewbit, quant, quant-low, topk, bounded, "
    "blocks, offload. 'exact' is the first three, which change no gradient. By default the first five.",
)
RESERVE = typer.Option(
    "0B",
    "--reserve",
    metavar="BYTES",
    help="What else must fit, such as the optimizer's state: 2GiB. AdamW has 8 bytes for each float32 parameter.",
)
HTML = typer.Option(None, "--html", help="Plan for many budgets, and write a page that compares them to this file.")


def plan(
    factory: str = typer.Argument(..., help=f"package.module:factory, a function that returns {RETURNS}."),
    budget: str = BUDGET,
    max_slowdown: float | None = SLOWDOWN,
    max_error: float | None = ERROR,
    allow: str | None = ALLOW,
    reserve: str = RESERVE,
    json: Path | None = typer.Option(None, "--json", help="Write the plan to this file, as JSON."),
    html: Path | None = HTML,
    explain: bool = typer.Option(False, "--explain", help="Say in words why each storage gets its action."),
    limit: int = typer.Option(20, "--limit", min=1, help="Rows in the table, or sentences with --explain."),
    fake: bool = typer.Option(True, "--fake/--real", help="Profile on fake tensors, so that nothing need fit."),
    device: str | None = typer.Option(None, "--device", help="Device to plan for, such as cpu or cuda:0."),
    autocast: Autocast | None = typer.Option(None, "--autocast", help="Run under autocast."),
) -> None:
    """Plan how a training step fits a budget: what becomes of each storage, and what that costs in time and error.

    The first plan on a device measures its speed, which takes up to a minute and is remembered.

    slimgrad plan train:make --budget 12GiB --reserve 2GiB --json plan.json

    slimgrad plan train:make --budget 4x --allow exact --max-slowdown 1.2 --html frontier.html
    """
    import slimgrad as sg

    asked, names, reserved = checked_budget(budget), checked_names(allow), checked_bytes(reserve)
    checked_device(device)
    check_targets(json=json, html=html)
    model, batch, loss_fn = made_by(factory)
    if device and not fake:
        model, batch = moved(model, device), moved(batch, device)
    with precision(autocast, device, model):
        profile = sg.profile(model, batch, loss_fn, fake=fake, device=device if fake else None)
    with progress_bar() as progress:
        settings: Any = {"max_error": max_error, "allow": names, "reserve": reserved, "progress": progress}
        found = sg.plan(profile, asked, max_slowdown=max_slowdown, **settings)
        swept = sg.frontier(profile, also=asked, **settings) if html else None
    typer.echo(found.explain(limit=limit) if explain else found.table(limit=limit))
    if json is not None:
        write(json, found.to_json())
        typer.echo(f"wrote {json}")
    if html is not None and swept is not None:
        typer.echo(f"wrote {swept.save(html, chosen=swept.within(asked))}")


def checked_budget(text: str) -> str | float:
    """As `sg.plan` takes it; what is wrong with it is said before anything is measured."""
    from slimgrad.planner.bounds import bound_of

    try:
        budget: str | float = float(text)
    except ValueError:
        budget = text
    bound_of(budget, 1)
    return budget


def checked_names(text: str | None) -> tuple[str, ...] | None:
    from slimgrad.planner.offers import allowed

    return None if text is None else allowed([name.strip() for name in text.split(",") if name.strip()])


def checked_bytes(text: str) -> int:
    """With a unit, or plain digits as for a budget."""
    from slimgrad.spec.budgets import as_bytes

    return as_bytes(int(text) if text.strip().isdecimal() else text, "--reserve")


@contextmanager
def progress_bar() -> Iterator[Progress]:
    """A bar on the terminal, gone when all is done; nothing where nobody looks."""
    from rich import progress
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

    from slimgrad.report.human import shorten

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, steps, text: None
        return
    done, what = TextColumn("{task.completed:.0f}/{task.total:.0f}"), TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), done, what)
    with progress.Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=1)
        yield lambda done, steps, text: bar.update(task, completed=done, total=steps, description=shorten(text, 30))
