"""The benchmark of values within a bound runs, and says what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_prints_writes_and_draws_a_row_for_each_way(tmp_path: Path) -> None:
    words = [sys.executable, "benchmarks/bounded.py", "--device", "cpu", "--small", "--repeats", "1", "--tasks", "vit"]
    words += ["--data", str(tmp_path), "--cache", str(tmp_path / "cache"), "--bounds", "0.1", "0.3"]
    words += ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())
    ways = {row["way"] for row in rows}
    assert {"Bounded none", "Bounded auto", "Bounded dithered", "entropy"} <= ways
    assert len(rows) == 2 * len(ways)
    ratios = {(row["way"], row["bound"]): row["ratio"] for row in rows}
    assert all(ratios[way, 0.3] > ratios[way, 0.1] > 1 for way in ways)
    assert ratios["Bounded auto", 0.1] >= ratios["Bounded none", 0.1]
    assert (tmp_path / "rows.png").stat().st_size > 1000
    assert "of copy" in done.stdout
