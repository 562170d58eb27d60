from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_plans_stand_beside_what_a_step_takes_and_beside_checkpointing(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    rows, picture, plans = tmp_path / "out" / "rows.json", tmp_path / "picture.png", tmp_path / "plans"
    words = [sys.executable, "benchmarks/planned.py", "vit_b16", "--small", "--device", "cpu", "--rounds", "2"]
    words += ["--budgets", "2x", "1000x", "--systems", "derive()", "--allow", "exact"]
    words += ["--json", str(rows), "--plot", str(picture), "--plans", str(plans)]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr

    found = {row["system"]: row for row in json.loads(rows.read_text())["rows"]}
    assert list(found) == ["untouched", "checkpoint", "derive()", "plan(2x)", "plan(1000x)"]
    untouched, plan = found["untouched"], found["plan(2x)"]
    assert all(0 < found[name]["kept"] < untouched["kept"] for name in ("checkpoint", "derive()", "plan(2x)"))
    assert plan["kept"] <= plan["kept_promised"] <= untouched["kept"] / 2
    assert plan["gradient_error"] == 0
    assert "the smallest reachable kept" in found["plan(1000x)"]["error"]
    assert "| plan(2x) | " in shown.stdout
    assert picture.stat().st_size > 10_000
    assert len(list(plans.iterdir())) == 1
