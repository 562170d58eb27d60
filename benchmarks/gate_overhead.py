"""What the gate itself costs: a step of a small model, where Python time shows, untouched and under slimgrad.

Four rows on the same weights: untouched; a gate that has nothing to do (every site exempted); `Lossless` as users get
it, which on a GPU leaves storages under 2 MiB alone, so that this small model may have no packed site at all; and
`Lossless` down to 4 KiB, which shows what packed sites cost. The first step is the watched one, paid once per shape.
Rounds are interleaved, so that a machine that drifts drifts for all rows alike.

    python benchmarks/gate_overhead.py [--device cuda] [--autocast] [--json out.json]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

import slimgrad as sg

BATCH = 32


def vit_tiny(size: int) -> nn.Module:
    """ViT-tiny/16: 12 blocks, width 192, 3 heads, 5.7 M parameters."""
    config = ViTConfig(
        hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, image_size=size
    )
    return ViTForImageClassification(config)


ROWS: dict[str, Callable[[nn.Module], Any] | None] = {
    "untouched": None,
    "gate with nothing to do": lambda model: sg.apply(model, sg.Keep()),
    "lossless": lambda model: sg.apply(model, sg.Lossless()),
    "lossless, every site >= 4 KiB": lambda model: sg.apply(model, sg.Lossless(), min_bytes=4096),
}


def step_of(model: nn.Module, batch: dict[str, torch.Tensor], device: str, autocast: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Callable[[], None], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def measure(device: str, autocast: bool, rounds: int, size: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    base = vit_tiny(size).to(device).train()
    batch = {
        "pixel_values": torch.randn(BATCH, 3, size, size, device=device),
        "labels": torch.randint(0, 2, (BATCH,), device=device),
    }
    steps, first = {}, {}
    sites = dict.fromkeys(ROWS, 0)
    for name, treat in ROWS.items():
        model = copy.deepcopy(base)
        run = None if treat is None else treat(model)
        steps[name] = step_of(model, batch, device, autocast)
        first[name] = timed(steps[name], device)
        sites[name] = 0 if run is None else len(run.report().sites)
        for _ in range(2):
            steps[name]()
    times: dict[str, list[float]] = {name: [] for name in ROWS}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(timed(step, device))
    untouched = statistics.median(times["untouched"])
    return [
        {
            "row": name,
            "device": device,
            "autocast": autocast,
            "median_ms": statistics.median(values),
            "ratio": statistics.median(values) / untouched,
            "paired_ratio": statistics.median(v / u for v, u in zip(values, times["untouched"], strict=True)),
            "first_step_ms": first[name],
            "packed_sites": sites[name],
        }
        for name, values in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=None, help="default 200 on cuda, 10 on cpu")
    parser.add_argument("--size", type=int, default=224, help="image side")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rounds = args.rounds or (200 if args.device == "cuda" else 10)
    rows = [row for autocast in (False, True) for row in measure(args.device, autocast, rounds, args.size)]
    print(f"ViT-tiny/16, batch {BATCH}, {args.size} px, {args.device}, torch {torch.__version__}, {rounds} rounds")
    print(f"{'row':30} {'dtype':10} {'sites':>5} {'median ms':>10} {'ratio':>7} {'paired':>7} {'first step ms':>14}")
    for row in rows:
        dtype = "bf16 auto" if row["autocast"] else "fp32"
        figures = (
            f"{row['median_ms']:10.2f} {row['ratio']:7.3f} {row['paired_ratio']:7.3f} {row['first_step_ms']:14.1f}"
        )
        print(f"{row['row']:30} {dtype:10} {row['packed_sites']:5d} {figures}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
