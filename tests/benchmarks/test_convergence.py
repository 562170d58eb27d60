"""The study of convergence runs on a few steps, and its figures are what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a script sees the modules beside it

from convergence import Sums

ROOT = Path(__file__).resolve().parents[2]


def test_a_few_steps_are_trained_probed_told_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = [sys.executable, "benchmarks/convergence.py", "--quick", "--device", "cpu", "--tasks", "resmlp"]
    words += ["--configs", "dropit(keep=0.1)", "--seeds", "0", "--data", str(tmp_path), "--cache", str(tmp_path)]
    words += ["--json", str(tmp_path / "courses.json"), "--plot", str(tmp_path / "courses.png")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain, dropped = json.loads((tmp_path / "courses.json").read_text())
    assert plain["config"] == "untouched" and len(plain["losses"]) == len(dropped["losses"]) == 3
    assert plain["losses"][0] == dropped["losses"][0], "forward is exact"
    assert plain["noises"] and not dropped["noises"]
    assert all(0 < one["bias"] < 1 and 0 < one["cosine"] < 1 for one in plain["noises"])
    assert all(0 < one["by_weight"] < 1 for one in plain["noises"])
    assert "| resmlp | `dropit(keep=0.1)` |" in done.stdout
    assert (tmp_path / "courses.png").stat().st_size > 1000
    words = [sys.executable, "benchmarks/convergence.py", "--render", str(tmp_path / "courses.json")]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout == done.stdout


def test_variance_and_mean_are_those_of_the_gradients() -> None:
    model = nn.Linear(4, 3)
    sums = Sums(model, torch.device("cpu"))
    found = []
    for seed in range(5):
        torch.manual_seed(seed)
        batch = ((torch.randn(6, 4),), torch.randint(0, 3, (6,)))
        sums.add(batch, seed)
        loss = nn.functional.cross_entropy(model(*batch[0]), batch[1])
        found.append(
            torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))]).double()
        )
    stacked = torch.stack(found)
    assert torch.allclose(sums.mean, stacked.mean(0))
    assert abs(sums.variance - float(stacked.var(0).sum())) < 1e-6
