"""What slimgrad and what torch itself offer, on the same workloads: kept bytes, peak bytes and step time.

    python benchmarks/frontier.py --json out/frontier.json --markdown out/frontier.md --plot out/frontier.png
    python benchmarks/frontier.py --workloads gpt2 bert --systems checkpoint compile "lossless()" "quant(bits=4)"
    python benchmarks/frontier.py --render out/frontier.json --plot out/frontier.png     # measures nothing
    python benchmarks/frontier.py --small                                                # a smoke test on a CPU

A system is a peer (untouched, checkpoint, save_on_cpu, compile, compile(budget=0.5)) or a text for `sg.apply`. Each is
measured in a process of its own, the untouched model of a workload first. Rows are written to --json one by one; rows
that are measured there already are kept, so a run that was cut short goes on where it stopped. docs/measuring.md says
what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from frontier_rows import MIB, Row, loaded, markdown, merged, missing, saved
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from workloads import WORKLOADS, MissingLibraryError

SYSTEMS = ("untouched", "checkpoint", "lossless()", "quant(bits=4)", "quant(bits=2)")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
NOTE_WIDTH = 240
LOG_LINES = 20
"""Of a failed worker, shown while the table goes on."""


def table(args: argparse.Namespace) -> list[Row]:
    """Measure what is missing, each row in its own process, and keep every row as soon as it is there."""
    rows = loaded(args.json) if args.json and args.json.exists() else []
    titles = {WORKLOADS[name].title(args.small): name for name in args.workloads}
    todo = missing(rows, list(titles), args.systems, args.fresh)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(todo))
        for title, system in todo:
            progress.update(bar, description=f"{title}: {system}")
            row = apart(titles[title], system, args)
            rows = merged(rows, row)
            if args.json:
                saved(rows, args.json)
            progress.console.print(said(row), markup=False, highlight=False, soft_wrap=True)
            progress.advance(bar)
    return rows


def said(row: Row) -> str:
    name = f"{row.workload} | {row.system}"
    if row.status != "measured":
        return f"{name}: {row.status}. {row.note}"
    peak = "" if row.peak is None else f"peak {row.peak / MIB:.0f} MiB, "
    return f"{name}: kept {row.kept / MIB:.1f} MiB, {peak}{row.ms:.1f} ms, {row.time_ratio:.3f}x ({row.seconds:.0f} s)"


def apart(workload: str, system: str, args: argparse.Namespace) -> Row:
    """One row, measured by a worker process."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer.json")
        words = [sys.executable, __file__, "--worker", str(answer), "--workloads", workload, "--systems", system]
        words += ["--rounds", str(args.rounds), "--device", args.device, *(["--small"] if args.small else [])]
        start = time.perf_counter()
        ending, log = finished(words, args.timeout)
        figures = json.loads(answer.read_text()) if answer.exists() else {"status": "failed", "note": ending}
    if figures.get("status") == "failed":
        print(*log[-LOG_LINES:], sep="\n", file=sys.stderr)
    figures["untouched_ms"] = tuple(figures.get("untouched_ms", ()))
    seconds = time.perf_counter() - start
    return Row(workload=WORKLOADS[workload].title(args.small), system=system, seconds=seconds, **figures)


def finished(words: Sequence[str], timeout: float) -> tuple[str, list[str]]:
    """Run a worker to its end, whatever that is: how it ended, and the lines it wrote.

    It writes to a file, not to a pipe: a compiler's helpers may outlive a worker that is stopped, and hold a pipe open.
    """
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out}
        try:
            status = subprocess.run(words, **streams, env={**os.environ, **OFFLINE}, timeout=timeout).returncode
            ending = f"The worker ended with status {status}"
        except subprocess.TimeoutExpired:
            ending = f"No answer within {timeout:g} s"
        out.seek(0)
        log = [line for line in out.read().splitlines() if line.strip()]
    return shortened(": ".join([ending, *log[-1:]])), log


def work(args: argparse.Namespace) -> None:
    """The worker: measure the one row that is asked for, and write its figures; in one move, in case it is stopped."""
    draft = args.worker.with_suffix(".draft")
    draft.write_text(json.dumps(answered(args)))
    draft.replace(args.worker)


def answered(args: argparse.Namespace) -> dict[str, Any]:
    from frontier_systems import SkippedError, measured

    (workload,), (system,) = args.workloads, args.systems
    try:
        return measured(WORKLOADS[workload], system, small=args.small, device=args.device, rounds=args.rounds)
    except (SkippedError, MissingLibraryError) as reason:
        return {"status": "skipped", "note": str(reason)}
    except Exception as error:
        traceback.print_exc()
        return {"status": "failed", "note": shortened(f"{type(error).__name__}: {error}")}


def shortened(text: str) -> str:
    """On one line that a table's notes have room for."""
    return textwrap.shorten(text, NOTE_WIDTH, placeholder=" …")


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
    parser.add_argument("--timeout", type=float, default=240, help="seconds for one row")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small models; the only size for a CPU")
    parser.add_argument("--json", type=Path, help="rows, kept and added to")
    parser.add_argument("--fresh", action="store_true", help="measure the named systems again, other rows stay")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--render", type=Path, metavar="JSON", help="draw these rows, measure nothing")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.rounds < 2:
        parser.error("--rounds must be 2 or more: there is no spread in one step")
    if args.device == "cpu" and not args.small and not args.render:
        parser.error("the full sizes need a GPU; for a smoke test on a CPU give --small")
    return args


def main() -> None:
    args = arguments()
    if args.worker:
        work(args)
    else:
        show(loaded(args.render) if args.render else table(args), args)


if __name__ == "__main__":
    main()
