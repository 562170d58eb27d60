"""What compression does to accuracy: real trainings on real data, with fixed seeds, configuration by configuration.

    python benchmarks/accuracy.py
    python benchmarks/accuracy.py --tasks resnet18 vit --configs untouched "lossless()" "quant(bits=2)" --seeds 0 1 2 3
    python benchmarks/accuracy.py --quick                         # a few steps of everything: does it run?
    python benchmarks/accuracy.py --steps vit=2000 --scale 2      # all trainings twice as long, the ViT's 2000 steps
    python benchmarks/accuracy.py --prepare carry --tasks sst2 trec   # copy the files that these tasks read
    python benchmarks/accuracy.py --table one.json other.json     # the table of trainings done before
    python benchmarks/accuracy.py --table one.json --curve "dropit(keep=*)" --plot out/keep.png

Tasks: ResNet-18, ResNet-20 (for a CPU), a small ViT and a small ResMLP on CIFAR-10; MiniLM fine-tuned on SST-2 and on
TREC; a character GPT on TinyShakespeare. Sizes and recipes stand in benchmarks/tasks/__init__.py. bf16 autocast on a
GPU, single precision on a CPU. All configurations of a seed begin with the same weights and see the same batches and
dropout draws.

A configuration is `untouched`, what `slimgrad.apply` takes as text, or "plan(budget='8x')", planned for a batch of the
training. Storages from 64 KiB on are packed, and each row
tells how much less was kept, measured: accuracy counts only for what was compressed.

The data folder (--data, else the variable SLIMGRAD_DATA, else data/) holds

    cifar10_webp90.npz               images as WebP: data, offsets, labels, split (0 train, 1 test)
    minilm/                          config.json, tokenizer.json, model.fp16.safetensors
    text/sst2/train.tsv, test.tsv    sentence<TAB>label
    text/TREC.train.all, .test.all   label sentence
    text/tinyshakespeare.txt

Without CIFAR-10 the image models train on scikit-learn's digits, and the rows say so. Text tasks without their files
are skipped.

Every finished training is written to the JSON file at once, and found there again: a second run does what is missing,
with the same sizes on the same kind of machine. Delete the file after a change to the code. Trainings run side by side
(--jobs), so this is no measurement of time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tasks import TASKS, table
from tasks.base import Places, Recipe
from tasks.training import PLAN, UNTOUCHED, Entry, Job, trained
from torch import nn

import slimgrad as sg

CONFIGS = (
    UNTOUCHED,
    "lossless()",
    "quant(bits=4)",
    "quant(bits=3)",
    "quant(bits=2)",
    "quant(bits=2, rounding='stochastic')",
    "fewbit(bits=3)",
    "dropit(keep=0.1)",
    "dropit(keep=0.1, signs=True)",
)
SEEDS = (0, 1, 2)
JOBS = {"cpu": 1, "cuda": 4}
QUICK = {"steps": 3, "batch": 8, "test_batches": 1}
SMOKE_TEST = "--quick: a few small steps, a smoke test and not a result"
MIB = 2**20


@dataclass(frozen=True)
class Failure:
    """A training that ended with an exception. It is not written down, so that the next run tries again."""

    job: Job
    text: str


# --- what is to be done -----------------------------------------------------------------------------------------------


def planned(args: argparse.Namespace, places: Places) -> tuple[list[Job], list[str]]:
    """The jobs, and which tasks are skipped and why.

    Seed by seed, so that a run cut short has every row. Tasks in turn, so that those that keep the device busy run
    beside those that wait for the host.
    """
    machine = f"{device_name(args.device)}, torch {torch.__version__}"
    sources = {name: TASKS[name].source(places) for name in args.tasks}
    jobs = [
        Job(name, source.name, config, seed, recipe_for(name, args), args.device, machine, places)
        for seed in args.seeds
        for config in args.configs
        for name, source in sources.items()
        if source is not None
    ]
    skipped = {name: ", ".join(TASKS[name].sources[0].missing(places)) for name in sources if sources[name] is None}
    return jobs, [f"{name} is skipped: the data folder has no {files}" for name, files in skipped.items()]


def device_name(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def recipe_for(name: str, args: argparse.Namespace) -> Recipe:
    recipe = replace(TASKS[name].recipe, **QUICK) if args.quick else TASKS[name].recipe
    return replace(recipe, steps=args.steps.get(name, max(1, round(recipe.steps * args.scale))))


def check_configs(configs: Sequence[str]) -> None:
    """Refuse a configuration that cannot be read before hours are spent on the others."""
    for config in configs:
        if config != UNTOUCHED and not config.startswith(PLAN):
            try:
                sg.apply(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), config).remove()
            except sg.SlimgradError as error:
                raise SystemExit(f"--configs: {error}") from error


# --- doing it ---------------------------------------------------------------------------------------------------------

Show = Callable[[Sequence[Job]], None]


def attempted(job: Job) -> Entry | Failure:
    try:
        return trained(job)
    except Exception:
        return Failure(job, traceback.format_exc())


def results(todo: Sequence[Job], workers: int, show: Show) -> Iterator[Entry | Failure]:
    """Do all jobs; `show` is told which are under way."""
    if workers > 1:
        yield from side_by_side(todo, workers, show)
        return
    for job in todo:
        show([job])
        yield attempted(job)


def side_by_side(todo: Sequence[Job], workers: int, show: Show) -> Iterator[Entry | Failure]:
    """In processes that live for many trainings. No more jobs are handed out than there are processes."""
    load_ahead(todo)
    waiting, running = deque(todo), dict[Future[Entry | Failure], Job]()
    threads = max(1, (os.cpu_count() or 1) // workers)
    spawn = get_context("spawn")  # a forked process cannot use CUDA
    with ProcessPoolExecutor(workers, spawn, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                running[pool.submit(attempted, job)] = job
            show(list(running.values()))
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                del running[future]
                yield future.result()


def load_ahead(todo: Sequence[Job]) -> None:
    """Decode once, before every process would; and see unreadable data fail here."""
    for places, source in {(job.places, TASKS[job.task].source(job.places)) for job in todo}:
        if source is not None:
            source.load(places, torch.device("cpu"))


def work_through(jobs: Sequence[Job], store: Store, workers: int) -> list[Failure]:
    """Do what is not in the store yet, and put it there."""
    console = Console(stderr=True)  # standard output is for the table
    todo = [job for job in jobs if store.find(job) is None]
    console.print(f"{len(todo)} trainings to do, {len(jobs) - len(todo)} already done", highlight=False)
    failures = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=len(todo))

        def show(running: Sequence[Job]) -> None:
            progress.update(bar, description=", ".join(job.name for job in running))

        for result in results(todo, workers, show):
            if isinstance(result, Failure):
                failures.append(result)
            else:
                store.add(result)
            progress.advance(bar)
            progress.console.print(told(result), highlight=False, markup=False, soft_wrap=True)
    return failures


def told(result: Entry | Failure) -> str:
    """One line for the terminal."""
    if isinstance(result, Failure):
        return f"{result.job.name} FAILED\n{result.text}"
    identity = result.identity
    metric = TASKS[identity["task"]].metric
    value = getattr(result, metric.field)
    outcome = f"diverged by step {result.diverged_by}" if value is None else f"{metric.name} {metric.shown(value)}"
    kept = "" if result.kept_before is None else f", kept {table.ratio(result):.2f}x less"
    return f"{identity['task']} {identity['config']} seed {identity['seed']}: {outcome}{kept}, {result.seconds:.1f} s"


# --- writing it down --------------------------------------------------------------------------------------------------


class Store:
    """The finished trainings, in a JSON file that is complete at any moment."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries = read(path) if path.is_file() else []

    def find(self, job: Job) -> Entry | None:
        return next((entry for entry in self.entries if entry.identity == job.identity), None)

    def add(self, entry: Entry) -> None:
        """Write it down, with the rows as they stand now."""
        self.entries.append(entry)
        rows = table.rows_of(table.in_order(self.entries))
        content = {"entries": [asdict(entry) for entry in self.entries], "rows": [asdict(row) for row in rows]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self.path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(content, indent=1, allow_nan=False), encoding="utf-8")
        unfinished.replace(self.path)


def read(path: Path) -> list[Entry]:
    return [entry_from(data) for data in json.loads(path.read_text(encoding="utf-8"))["entries"]]


def entry_from(data: dict[str, Any]) -> Entry:
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    return Entry(**{**data, **lists})


def prepare(folder: Path, tasks: Sequence[str], places: Places) -> None:
    """Copy what these tasks read into a folder that can be given as --data elsewhere."""
    names = dict.fromkeys(name for task in tasks for name in TASKS[task].sources[0].files)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(places.data / name, folder / name)
        print(f"{(folder / name).stat().st_size / MIB:8.2f} MiB  {name}")
    print(f"{sum((folder / name).stat().st_size for name in names) / MIB:8.2f} MiB  in all")


# --- the command ------------------------------------------------------------------------------------------------------


def steps_of_task(text: str) -> tuple[str, int]:
    name, _, steps = text.partition("=")
    if name not in TASKS or not steps.isdigit() or int(steps) < 1:
        raise argparse.ArgumentTypeError(f"expected task=steps, such as vit=1000; found {text!r}")
    return name, int(steps)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=table.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SLIMGRAD_DATA", "data")))
    parser.add_argument("--cache", type=Path, default=Path("out/cache"), help="where decoded images are kept")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), metavar="CONFIG", help="; ".join(CONFIGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--scale", type=float, default=1.0, help="times as many steps")
    parser.add_argument("--steps", nargs="+", type=steps_of_task, default=[], metavar="TASK=STEPS")
    parser.add_argument("--quick", action="store_true", help="a few small steps: a smoke test and not a result")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, help=f"trainings side by side; default {JOBS}")
    parser.add_argument("--json", type=Path, default=Path("out/accuracy.json"))
    parser.add_argument("--markdown", type=Path, help="write the table to this file too")
    parser.add_argument("--table", type=Path, nargs="+", metavar="JSON", help="only print the table of these files")
    curve = "with --table: draw accuracy over the number at the star, one panel for each"
    parser.add_argument("--curve", nargs="+", metavar="CONFIG", help=curve)
    parser.add_argument("--plot", type=Path, default=Path("out/accuracy.png"), help="where --curve is drawn")
    parser.add_argument("--prepare", type=Path, metavar="DIR", help="only copy the tasks' files there, and end")
    args = parser.parse_args(argv)
    if args.curve and not args.table:
        parser.error("--curve draws trainings done before: name their files with --table")
    args.steps = dict(args.steps)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    places = Places(args.data, args.cache)
    if args.prepare is not None:
        prepare(args.prepare, args.tasks, places)
        return 0
    if args.table is not None:
        entries = table.in_order([entry for path in args.table for entry in read(path)])
        print(table.markdown(entries))
        if args.curve:
            from accuracy_plot import plotted  # not in the processes that train

            print(f"\n{plotted(table.rows_of(entries), args.curve, args.plot)}")
        return 0
    check_configs(args.configs)
    jobs, skipped = planned(args, places)
    store = Store(args.json)
    failures = work_through(jobs, store, args.jobs or JOBS[torch.device(args.device).type])
    done = [entry for job in jobs if (entry := store.find(job)) is not None]
    remarks = [SMOKE_TEST] * args.quick + skipped + [f"FAILED: {failure.job.name}" for failure in failures]
    text = table.markdown(done, remarks)
    print(text)
    if args.markdown is not None:
        args.markdown.parent.mkdir(parents=True, exist_ok=True)
        args.markdown.write_text(text + "\n", encoding="utf-8")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
