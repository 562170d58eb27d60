"""The example of fine-tuning under a budget, and the benchmark on top of it: they run, and their counts are right."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]


def ran(*words: str) -> str:
    shown = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def test_the_example_runs_without_files() -> None:
    words = ("--task", "shapes", "--epochs", "1", "--methods", "full", "classifier", "trady")
    shown = ran("examples/finetune_mobilenet.py", *words, "--device", "cpu")
    assert "shapes, 1 epochs" in shown
    assert all(method in shown for method in ("full", "classifier", "trady"))


def test_ways_are_compared_with_full_fine_tuning_where_that_is_among_them() -> None:
    words = ("--task", "shapes", "--epochs", "1", "--device", "cpu", "--budget", "0", "--methods")
    shown = ran("examples/finetune_mobilenet.py", *words, "classifier", "trady")
    assert "shapes, 1 epochs, 0 of" in shown and "classifier" in shown and "1/" not in shown
    shown = ran("examples/finetune_mobilenet.py", *words, "classifier", "full")
    (classifier,) = (line for line in shown.splitlines() if "classifier" in line)
    assert "1/" in classifier and "-100.0 %" in classifier


def test_the_text_encoder_runs_without_files() -> None:
    shown = ran("examples/finetune_minilm.py", "--small", "--device", "cpu", "--ways", "full", "head", "budget")
    assert all(way in shown for way in ("full", "head", "budget")) and "256KiB" in shown
    refused = subprocess.run(
        [sys.executable, "examples/finetune_minilm.py", "--data", "nowhere"], cwd=ROOT, capture_output=True, text=True
    )
    assert refused.returncode == 1 and "there is no folder minilm in nowhere" in refused.stderr


def test_the_benchmark_finds_again_what_it_trained(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    words = ("--small", "--device", "cpu", "--json", str(file), "--methods", "full", "trady", "trady, weighted")
    first = ran("benchmarks/budgeted.py", *words)
    rows = json.loads(file.read_text())
    assert [row["method"] for row in rows] == ["full", "trady", "trady", "trady", "trady, weighted"]
    full, smallest, *_ = rows
    assert smallest["kept"] * 10 < full["kept"] and smallest["flops"] * 10 < full["flops"]
    assert [row["flops"] for row in rows[1:4]] == sorted(row["flops"] for row in rows[1:4])
    before = file.stat().st_mtime_ns
    again = ran("benchmarks/budgeted.py", *words)
    assert file.stat().st_mtime_ns == before
    assert again.splitlines() == [line for line in first.splitlines() if line.startswith("|")]


def test_flops_of_weights_are_counted_with_their_groups() -> None:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from finetune_mobilenet import dw_flops
    finally:
        sys.path.remove(str(ROOT / "examples"))
    for conv in (nn.Conv2d(6, 9, 3), nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 9, 1, groups=3, stride=2)):
        y = conv(torch.zeros(2, 6, 8, 8))
        shapes = (y.shape, (2, 6, 8, 8), conv.weight.shape)
        others = (None, [1], [0], [1], False, [0], conv.groups, [True, True, True])
        expected = 2 * conv.weight.numel() * 2 * math.prod(y.shape[2:])
        assert dw_flops(*shapes, *others, out_shape=None) == expected
