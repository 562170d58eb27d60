"""Transfer learning under a strict budget: networks, data sets, ways to fine-tune and seeds, in one table.

    python benchmarks/budgeted.py --data DIR                       # MbV2-w0.35 on Flowers and Pets, all ways, 3 seeds
    python benchmarks/budgeted.py --data DIR --networks mobilenet_v2 --budgets 0.0223 0.0532 0.0748
    python benchmarks/budgeted.py --data DIR --tasks flowers102 --methods full trady --epochs 30 --seeds 0 1 2 3 4
    python benchmarks/budgeted.py --data DIR --tasks cifar10 --epochs 6 --methods classifier static trady
    python benchmarks/budgeted.py --data DIR --held-out --seeds 0 --body-lr 0.1   # for choosing rates
    python benchmarks/budgeted.py --json out/transfer.json --table     # the table of what was trained before
    python benchmarks/budgeted.py --times --batch 64 --threads 1      # step times alone; pictures are random
    python benchmarks/budgeted.py --small                              # drawn shapes, one epoch: does it run?

Every finished training is written to the JSON file, and found there again. Budgets are parts of all elements of a
network; by default those of TraDy's paper, 27,946, 66,592 and 93,696 of 1,252,320. Layers are ranked on the other data
set, as in use: a ranking is made once and taken along. `full` trains everything, `classifier` the last layer.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import mobilenets
import torch
import transfer
import transfer_data
from finetune_mobilenet import METHODS, NETWORKS, Task, fine_tuned, ranking_of, task_of

import slimgrad as sg
from slimgrad.report.human import human_bytes

PAPER_BUDGETS = (27_946 / 1_252_320, 66_592 / 1_252_320, 93_696 / 1_252_320)
FREE = ("full", "classifier")
"""Ways that no budget changes."""
CLASSES, SIDE, ROUNDS = 37, mobilenets.SIDE, 5
"""For step times: the size of Pets, and how often all ways take turns."""
OTHER = {"flowers102": "pets", "pets": "flowers102", "cifar10": "pets", "shapes": "shapes"}
"""On which data layers are ranked."""


@dataclass(frozen=True)
class Job:
    """One training."""

    network: str
    task: str
    method: str
    budget: int
    """Elements per picture; 0 where it changes nothing."""
    seed: int
    epochs: int
    lr: float
    """Of the head."""
    body_lr: float
    """Of all else."""
    clip: float
    batch: int
    held_out: bool
    """Whether accuracy is that of training pictures that were left out."""
    device: str


def jobs_of(args: argparse.Namespace) -> Iterator[Job]:
    for network in args.networks:
        for task in args.tasks:
            everything = _elements(network, task, args)
            for seed in args.seeds:
                for method in args.methods:
                    shares = args.budgets if method == "trady" else args.budgets[:1]
                    for budget in [0] if method in FREE else [round(share * everything) for share in shares]:
                        body_lr = args.full_lr if method == "full" else args.body_lr
                        how = args.epochs, args.lr, body_lr, args.clip, args.batch, args.held_out, args.device
                        yield Job(network, task, method, budget, seed, *how)


def _task(job: Job, args: argparse.Namespace, name: str | None = None) -> Task:
    how = asdict(job) | {"device": torch.device(job.device), "data": args.data, "full_lr": job.body_lr}
    task = task_of(job.network, name or job.task, argparse.Namespace(**how))
    return replace(task, data=task.data.held_out()) if job.held_out else task


def _elements(network: str, task: str, args: argparse.Namespace) -> int:
    built = _task(Job(network, task, "", 0, 0, 1, 0.0, 0.0, 1.0, 16, False, "cpu"), args)
    return mobilenets.elements(built.model(0), built.data.side).total


def trained(job: Job, args: argparse.Namespace, rankings: dict[tuple[str, str], sg.Ranking]) -> dict[str, Any]:
    key = job.network, OTHER[job.task]
    if key not in rankings:
        rankings[key] = ranking_of(_task(job, args, OTHER[job.task]))
    what = METHODS[job.method](job.budget, rankings[key])
    return {**asdict(job), **asdict(fine_tuned(_task(job, args), job.method, what, job.seed))}


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What is missing, and what was there."""
    done = json.loads(args.json.read_text()) if args.json.is_file() else []
    if args.table:
        return done
    rankings: dict[tuple[str, str], sg.Ranking] = {}
    for job in jobs_of(args):
        if any(asdict(job).items() <= entry.items() for entry in done):
            continue
        entry = trained(job, args, rankings)
        print(
            f"{job.network} {job.task} {job.method} {job.budget} seed {job.seed}: {entry['accuracy']:.3f}", flush=True
        )
        done.append(entry)
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(done, indent=1) + "\n")
    return done


def times(args: argparse.Namespace) -> Iterator[str]:
    """Step times beside those of training everything, in the same round; random pictures."""
    device = torch.device(args.device)
    for network in args.networks:
        model = NETWORKS[network](args.data, CLASSES).to(device).train()
        everything = mobilenets.elements(model).total
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        batch = torch.randn(args.batch, 3, SIDE, SIDE, device=device), torch.arange(args.batch, device=device) % CLASSES
        found: dict[int | None, list[float]] = {}
        for _ in range(ROUNDS):
            for budget in (None, 0, *(round(share * everything) for share in args.budgets)):
                transfer.freeze_norms(model)  # as they are under a budget
                run = None if budget is None else sg.apply(model, sg.trady(budget), optimizer=optimizer)
                found.setdefault(budget, []).append(transfer.step_seconds(model, optimizer, *batch))
                if run is not None:
                    run.remove()
        for budget, mine in found.items():
            ratio = statistics.median(one / full for one, full in zip(mine, found[None], strict=True))
            way = "everything" if budget is None else f"trady({budget})"
            yield f"{network:16} batch {args.batch:4} {way:16} {1e3 * statistics.median(mine):8.1f} ms {ratio:6.2f}x"


def table(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Markdown; figures beside those of full fine-tuning of the same network, data and epochs."""
    yield "| network, data | way | elements | rate | accuracy, % (seeds) | minus full | kept | | dW FLOPs | step |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    rows: dict[Job, list[dict[str, Any]]] = {}
    for entry in entries:
        job = Job(**{field.name: entry[field.name] for field in fields(Job)})
        rows.setdefault(replace(job, seed=0), []).append(entry)
    full = {_training(job): found for job, found in rows.items() if job.method == "full"}
    for job, found in rows.items():
        yield _line(job, found, full.get(_training(job)))


def _training(job: Job) -> Job:
    """What ways are compared in."""
    return replace(job, method="", budget=0, lr=0.0, body_lr=0.0, clip=0.0)


def _line(job: Job, found: Sequence[dict[str, Any]], full: Sequence[dict[str, Any]] | None) -> str:
    accuracy = [100 * entry["accuracy"] for entry in found]
    spread = f" ± {statistics.stdev(accuracy):.1f}" if len(accuracy) > 1 else ""
    kept, step, flops = (statistics.median(entry[key] for entry in found) for key in ("kept", "step_seconds", "flops"))
    name = f"{job.network}, {job.task}{', held out' if job.held_out else ''}, {job.epochs} epochs of {job.batch}"
    rates = f"{job.lr:g}" if job.method == "classifier" else f"{job.lr:g}, {job.body_lr:g}"
    cells = [name, job.method, f"{job.budget:,}" if job.budget else "", rates]
    cells += [f"{statistics.mean(accuracy):.1f}{spread} ({len(found)})"]
    if full is None:
        return f"| {' | '.join([*cells, '', human_bytes(kept), '', '', f'{1e3 * step:.0f} ms'])} |"
    whole = {key: statistics.median(entry[key] for entry in full) for key in ("kept", "step_seconds", "flops")}
    minus = statistics.mean(accuracy) - statistics.mean(100 * entry["accuracy"] for entry in full)
    fewer = f"{100 * (1 - flops / whole['flops']):.1f} % fewer" if job.method != "full" else ""
    less = f"{whole['kept'] / kept:.1f}x less" if job.method != "full" else ""
    cells += [f"{minus:+.1f}", human_bytes(kept), less, fewer, f"{step / whole['step_seconds']:.2f}x"]
    return f"| {' | '.join(cells)} |"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=["mbv2-w0.35"])
    parser.add_argument("--tasks", nargs="+", choices=list(OTHER), default=["flowers102", "pets"])
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--budgets", nargs="+", type=float, default=PAPER_BUDGETS, help="parts of all elements")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--lr", type=float, default=0.2, help="of the head, at the peak; SGD without momentum")
    parser.add_argument("--body-lr", type=float, default=0.05, help="of all else under a budget")
    parser.add_argument("--full-lr", type=float, default=0.01, help="of all else where everything is trained")
    parser.add_argument("--clip", type=float, default=4.0, help="longest gradient")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--held-out", action="store_true", help="test on a fifth of what there is to train on")
    parser.add_argument(
        "--data",
        type=Path,
        default=transfer_data.data_folder(),
        help="folder of pictures and weights, see examples/finetune_mobilenet.py",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=Path("out/transfer.json"))
    parser.add_argument("--table", action="store_true", help="train nothing")
    parser.add_argument("--times", action="store_true", help="step times instead of trainings")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--small", action="store_true", help="drawn shapes, one epoch")
    args = parser.parse_args()
    if args.small:
        args.tasks, args.epochs, args.seeds = ["shapes"], 1, [0]
    return args


def main() -> None:
    args = arguments()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    try:
        for line in times(args) if args.times else table(run(args)):
            print(line, flush=True)
    except FileNotFoundError as error:
        raise SystemExit(f"{error}; here: --data DIR, or --small") from None


if __name__ == "__main__":
    main()
