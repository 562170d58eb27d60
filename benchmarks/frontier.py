"""What slimgrad and what torch itself offer, on the same workloads: kept bytes, peak bytes and step time.

    python benchmarks/frontier.py --json out/frontier.json --markdown out/frontier.md --plot out/frontier.png
    python benchmarks/frontier.py --workloads gpt2 bert --systems checkpoint compile "lossless()" "quant(bits=4)"
    python benchmarks/frontier.py --render out/frontier.json --plot out/frontier.png     # measures nothing
    python benchmarks/frontier.py --small                                                # a smoke test on a CPU

A system is a peer (untouched, checkpoint, save_on_cpu, compile, compile(budget=0.5)) or a text for `sg.apply`. Each is
measured in a process of its own, one at a time, the untouched model of a workload first. Rows are written to --json
one by one; rows that are measured there already are kept, so a run that was cut short goes on where it stopped.
docs/measuring.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from frontier_rows import MIB, Row, loaded, markdown, merged, missing, saved
from frontier_workers import in_turn, serve, shortened
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from workloads import WORKLOADS, MissingLibraryError

SYSTEMS = ("untouched", "checkpoint", "lossless()", "quant(bits=4)", "quant(bits=2)", "fewbit(bits=3)")


def table(args: argparse.Namespace) -> list[Row]:
    """Measure what is missing, each row in its own process, and keep every row as soon as it is there."""
    rows = loaded(args.json) if args.json and args.json.exists() else []
    titles = {WORKLOADS[name].title(args.small): name for name in args.workloads}
    todo = missing(rows, list(titles), args.systems, args.fresh)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(todo))
        for first in range(0, len(todo), args.jobs):
            batch = todo[first : first + args.jobs]
            progress.update(bar, description="; ".join(f"{title}: {system}" for title, system in batch[:2]) + " ...")
            commands = [worker_words(titles[title], system, args) for title, system in batch]
            for (title, system), (figures, seconds) in zip(batch, in_turn(commands, args.timeout), strict=True):
                row = row_of(title, system, figures, seconds)
                rows = merged(rows, row)
                if args.json:
                    saved(rows, args.json)
                progress.console.print(said(row), markup=False, highlight=False, soft_wrap=True)
                progress.advance(bar)
    return rows


def worker_words(workload: str, system: str, args: argparse.Namespace) -> list[str]:
    words = [sys.executable, __file__, "--workloads", workload, "--systems", system, "--rounds", str(args.rounds)]
    return [*words, "--device", args.device, *(["--small"] if args.small else []), "--worker"]


def row_of(title: str, system: str, figures: dict[str, Any], seconds: float) -> Row:
    figures["untouched_ms"] = tuple(figures.get("untouched_ms", ()))
    return Row(workload=title, system=system, seconds=seconds, **figures)


def said(row: Row) -> str:
    name = f"{row.workload} | {row.system}"
    if row.status != "measured":
        return f"{name}: {row.status}. {row.note}"
    peak = "" if row.peak is None else f"peak {row.peak / MIB:.0f} MiB, "
    return f"{name}: kept {row.kept / MIB:.1f} MiB, {peak}{row.ms:.1f} ms, {row.time_ratio:.3f}x ({row.seconds:.0f} s)"


def answered(args: argparse.Namespace, ready: Callable[[], None]) -> dict[str, Any]:
    """The worker's part: the figures of the one row that is asked for."""
    from frontier_systems import SkippedError, measured

    (workload,), (system,) = args.workloads, args.systems
    how = {"small": args.small, "device": args.device, "rounds": args.rounds}
    try:
        return measured(WORKLOADS[workload], system, ready, **how)
    except (SkippedError, MissingLibraryError) as reason:
        return {"status": "skipped", "note": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"status": "failed", "note": shortened(f"{type(error).__name__}: {error}")}


def show(rows: Sequence[Row], args: argparse.Namespace) -> None:
    if args.plot:
        from frontier_plot import plotted

        plotted(rows, args.plot)
    if args.markdown:
        picture = Path(os.path.relpath(args.plot, args.markdown.parent)).as_posix() if args.plot else None
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(markdown(rows, picture))
    print(markdown(rows))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS), metavar="NAME")
    parser.add_argument("--systems", nargs="+", default=SYSTEMS, metavar="SYSTEM", help=f"default: {' '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps, besides as many of the untouched model")
    parser.add_argument("--timeout", type=float, default=240, help="seconds to prepare a batch, and to measure a row")
    parser.add_argument("--jobs", type=int, help="processes that prepare side by side; default 8 on a GPU, 1 on a CPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small models; the only size for a CPU")
    parser.add_argument("--json", type=Path, help="rows, kept and added to")
    parser.add_argument("--fresh", action="store_true", help="measure the named systems again, other rows stay")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--render", type=Path, metavar="JSON", help="draw these rows, measure nothing")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    args.jobs = args.jobs or (8 if args.device == "cuda" else 1)
    if args.rounds < 2:
        parser.error("--rounds must be 2 or more: there is no spread in one step")
    if args.device == "cpu" and not args.small and not args.render:
        parser.error("the full sizes need a GPU; for a smoke test on a CPU give --small")
    return args


def main() -> None:
    args = arguments()
    if args.worker:
        serve(args.worker, lambda ready: answered(args, ready))
    else:
        show(loaded(args.render) if args.render else table(args), args)


if __name__ == "__main__":
    main()
