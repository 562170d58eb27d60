"""`slimgrad demo`: the same training with and without slimgrad, side by side."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from slimgrad.cli.files import check_folder
from slimgrad.errors import SlimgradError
from slimgrad.report.plots import demo_plot
from slimgrad.report.text import human_bytes, human_ratio

if TYPE_CHECKING:
    from slimgrad.cli.digits import Outcome

SCRATCH = "training from scratch"
ADAPT = "adapting to negatives: first convolution and head train, the rest is frozen"
BUDGET = "adapting to negatives under a budget: other channels train in each epoch"


@dataclass(frozen=True)
class Configuration:
    """One row of the demo for a workload."""

    name: str
    what: Callable[[Any], Any] | None
    """Given the package slimgrad, what to apply; None for the untouched model."""
    exact: bool
    """Whether it promises the very weights that the untouched model reaches."""


CONFIGURATIONS = (
    Configuration("untouched", None, exact=True),
    Configuration("lossless", lambda sg: sg.Lossless(), exact=True),
    Configuration("derive", lambda sg: sg.Derive(), exact=True),
    Configuration("fewbit 3 bit", lambda sg: sg.fewbit(bits=3), exact=False),
    Configuration("quant 4 bit", lambda sg: sg.Quant(bits=4), exact=False),
    Configuration("dropit 10 %", lambda sg: sg.dropit(keep=0.1), exact=False),
    Configuration("blocks 10 %", lambda sg: sg.block_pruning(keep=0.1, block=(16, 16), means=16), exact=False),
    Configuration("comet 1 %", lambda sg: sg.comet(target=0.01), exact=False),
)
"""The first is what the others are measured against."""

PLANNED = Configuration("plan, 4x", lambda sg: planned(sg, "4x"), exact=False)
"""The fastest that keeps a quarter, by what this machine was measured to take."""

UNDER_BUDGET = (
    Configuration("untouched", None, exact=True),
    Configuration("trady 10 %", lambda sg: sg.trady(budget=11_000), exact=False),
)
"""The first trains everything. 11,000 elements are a tenth of inputs and weights of one image."""


@dataclass(frozen=True)
class Workload:
    """One table of the demo."""

    title: str
    configurations: Sequence[Configuration]
    adapts: bool
    """Whether it starts from what the first one learnt untouched, on negatives."""
    frozen: bool = False
    """Whether most layers are frozen by hand."""


WORKLOADS = (
    Workload(SCRATCH, (*CONFIGURATIONS, PLANNED), adapts=False),
    Workload(ADAPT, CONFIGURATIONS, adapts=True, frozen=True),
    Workload(BUDGET, UNDER_BUDGET, adapts=True),
)


@dataclass(frozen=True)
class Row:
    """One trained configuration."""

    workload: str
    name: str
    kept_bytes: int
    ratio: float
    """How many times less is kept than by the first configuration of the workload."""
    accuracy: float
    step_ms: float
    identical: bool
    """Whether the final weights are those of the first configuration, bit for bit."""


def demo(
    epochs: int = typer.Option(6, "--epochs", min=1, help="Epochs per training."),
    seed: int = typer.Option(0, "--seed", help="Decides weights, order of images and dropout."),
    out: Path = typer.Option(Path("out"), "--out", help="Folder for demo.json, demo.png and frontier.html."),
    quick: bool = typer.Option(False, "--quick", help="One epoch: to see it run, not to compare accuracies."),
) -> None:
    """Train a small network on handwritten digits with and without slimgrad; compare bytes, time and weights."""
    check_folder("out", out)
    console = Console()
    epochs = 1 if quick else epochs
    rows = all_rows(epochs, seed, console)
    for table in workload_tables(rows):
        console.print(table, "")
    paths = written(rows, out, {"epochs": epochs, "seed": seed})
    for path in (*paths, frontier_page(out)):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    checked(rows)


def all_rows(epochs: int, seed: int, console: Console) -> list[Row]:
    """Every workload under its configurations."""
    import slimgrad as sg
    from slimgrad.cli.digits import Start, load_digits, one_thread, trained

    data = load_digits()
    rows: list[Row] = []
    start = None
    trainings = sum(len(workload.configurations) for workload in WORKLOADS)
    with one_thread(), progress_bar(console) as progress:
        task = progress.add_task("", total=trainings * epochs * data.steps)
        tick = partial(progress.advance, task)
        for workload in WORKLOADS:
            progress.update(task, description="adapting" if workload.adapts else "from scratch")
            whats = [each.what(sg) if each.what else None for each in workload.configurations]
            used = data.negatives() if workload.adapts else data
            how = Start(start if workload.adapts else None, workload.frozen, seed)
            outcomes = trained(used, how, whats=whats, epochs=epochs, tick=tick)
            rows += compared(workload, outcomes)
            start = start or outcomes[0].state
    return rows


def planned(sg: Any, budget: str) -> Any:
    """A plan for the demo's network."""
    return sg.plan(network_profile(sg), budget)


def network_profile(sg: Any) -> Any:
    from slimgrad.cli.digits import example

    return sg.profile(*example(), fake=True)


def frontier_page(out: Path) -> Path:
    """Budgets for the demo's network, on a page to play with."""
    import slimgrad as sg

    path = out / "frontier.html"
    sg.frontier(network_profile(sg)).save(path)
    return path


def progress_bar(console: Console) -> Progress:
    columns = (TextColumn("{task.description:<12}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    return Progress(*columns, TimeRemainingColumn(), console=console, transient=True)


def compared(workload: Workload, outcomes: Sequence[Outcome]) -> list[Row]:
    """The outcomes of one workload, each beside the first."""
    from slimgrad.cli.digits import same_state

    first = outcomes[0]
    return [
        Row(
            workload=workload.title,
            name=configuration.name,
            kept_bytes=outcome.kept_bytes,
            ratio=first.kept_bytes / max(outcome.kept_bytes, 1),
            accuracy=outcome.accuracy,
            step_ms=outcome.step_ms,
            identical=same_state(first.state, outcome.state),
        )
        for configuration, outcome in zip(workload.configurations, outcomes, strict=True)
    ]


def workload_tables(rows: Sequence[Row]) -> Iterator[Table]:
    """One table per workload, with columns that stand below each other."""
    for workload, group in groupby(rows, key=lambda row: row.workload):
        table = Table(title=workload, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        table.show_edge = table.pad_edge = False
        table.add_column("", min_width=12, no_wrap=True)
        for header, width in COLUMNS:
            table.add_column(header, justify="right", no_wrap=True, min_width=width)
        first, *others = group
        table.add_row(*cells(first), "")
        for row in others:
            table.add_row(*cells(row, human_ratio(first.kept_bytes, row.kept_bytes)), "yes" if row.identical else "no")
        yield table


COLUMNS = (("kept", 9), ("", 10), ("accuracy", 8), ("step", 9), ("identical weights", 17))


def cells(row: Row, change: str = "") -> tuple[str, ...]:
    return row.name, human_bytes(row.kept_bytes), change, f"{100 * row.accuracy:.1f}%", f"{row.step_ms:.1f} ms"


def written(rows: Sequence[Row], out: Path, settings: dict[str, int]) -> list[Path]:
    """The rows as JSON and as a figure, in the folder `out`."""
    out.mkdir(parents=True, exist_ok=True)
    data = {"format": "slimgrad", "type": "Demo", "version": 1, **settings, "rows": [asdict(row) for row in rows]}
    path = out / "demo.json"
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return [path, demo_plot(rows, out / "demo.png")]


def checked(rows: Sequence[Row]) -> None:
    """Refuse to call a result exact that is not."""
    promised = {configuration.name for configuration in CONFIGURATIONS if configuration.exact}
    broken = [f"{row.name} ({row.workload})" for row in rows if row.name in promised and not row.identical]
    if broken:
        raise SlimgradError(f"exact configurations ended with other weights than the untouched model: {broken}")
    typer.echo("exact configurations ended with the very same weights: yes")
