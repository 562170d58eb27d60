"""Step times as a training has them: steps follow each other without a wait, and systems take turns.

    python benchmarks/streamed.py resmlp vit_b16 --systems "block_pruning(keep=0.1, block=(64, 128), sample=8)"
    python benchmarks/streamed.py resnet50 --systems "lossless()" "quant(bits=4)" --rounds 20
    python benchmarks/streamed.py vit_b16 --small                        # a smoke test on a CPU

frontier.py waits for the device after every step, so that the host's work at the beginning of one shows. Here the host
may run ahead, as it does in a training that does not ask for its loss in every step. A round applies each system in
turn to one model and times STEPS steps; the ratio is the median over rounds of the times beside those of the untouched
model in the same round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from frontier_systems import prepared
from workloads import WORKLOADS, Workload

import slimgrad as sg

UNTOUCHED = "untouched"
STEPS, FIRST = 4, 2
"""Timed in each round, and before."""


def milliseconds(step: Callable[[], None], wait: Callable[[], None]) -> float:
    for _ in range(FIRST):
        step()
    wait()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    wait()
    return (time.perf_counter() - start) / STEPS * 1e3


def rounds_of(workload: Workload, systems: Sequence[str], args: argparse.Namespace) -> dict[str, list[float]]:
    """The times of each system, round by round."""
    bench = prepared(workload, args.small, args.device)
    model = bench.built.model
    times: dict[str, list[float]] = {system: [] for system in (UNTOUCHED, *systems)}
    for _ in range(args.rounds):
        for system, found in times.items():
            run = None if system == UNTOUCHED else sg.apply(model, system, optimizer=bench.optimizer)
            found.append(milliseconds(lambda: bench.step(model), bench.wait))
            if run is not None:
                run.remove()
    return times


def rows(args: argparse.Namespace) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for name in args.workloads:
        times = rounds_of(WORKLOADS[name], args.systems, args)
        for system, mine in times.items():
            ratios = [one / other for one, other in zip(mine, times[UNTOUCHED], strict=True)]
            ms, ratio = statistics.median(mine), statistics.median(ratios)
            print(f"{name:14} {system:70} {ms:8.2f} ms {ratio:6.3f}x", flush=True)
            found.append({"workload": name, "system": system, "ms": ms, "ratio": ratio})
    return found


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=list(WORKLOADS), metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--systems", nargs="+", default=["lossless()"], help="texts for slimgrad.apply")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--small", action="store_true", help="small models; the only size for a CPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    found = rows(args)
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
