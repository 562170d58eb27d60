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


def test_made_data_come_near_the_known_limits(tmp_path: Path) -> None:
    """At a tenth of the deviation: 12.7x for white noise after a ReLU, 13.8x for differences of x_t = 0.9 x_(t-1)."""
    words = [sys.executable, "benchmarks/bounded.py", "--device", "cpu", "--synthetic", "--repeats", "1"]
    words += ["--bounds", "0.1", "--elements", str(2**17), "--json", str(tmp_path / "rows.json")]
    subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())
    pairs = list(zip(rows[::2], rows[1::2], strict=True))
    assert all(limit["way"] == "entropy" and limit["ratio"] > row["ratio"] for row, limit in pairs)
    found = {(row["dtype"], (row["model"], row["way"])): (row, limit) for row, limit in pairs}
    white, limit = found["float32", ("white, ReLU", "Bounded none")]
    assert white["ratio"] > 10.4 and abs(limit["ratio"] - 12.7) < 0.2
    smooth, limit = found["float32", ("AR(0.9), ReLU", "Bounded lorenzo")]
    assert smooth["ratio"] > 10.5 and abs(limit["ratio"] - 13.8) < 0.2
    assert len(found) == len(pairs) == 16
    for (dtype, way), (row, _) in found.items():
        if dtype == "bfloat16":
            assert 0.9 < 2 * row["ratio"] / found["float32", way][0]["ratio"] < 1
