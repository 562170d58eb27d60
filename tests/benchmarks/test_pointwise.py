from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_functions_are_timed_beside_stock_ones(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    words = [sys.executable, "benchmarks/pointwise.py", "--device", "cpu", "--sizes", "4K", "--repeats", "2"]
    words += ["--functions", "gelu", "--bits", "3", "--dtypes", "float32", "--json", str(rows)]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    row, packed, gated = json.loads(rows.read_text())
    assert row["function"] == "gelu" and row["time_ratio"] > 0 and abs(row["kept_ratio"] - 32 / 3) < 0.01
    assert packed["function"] == "gelu of x" and abs(packed["kept_ratio"] - 32 / 3.25) < 0.01
    assert gated["function"] == "gelu * b" and gated["bits"] is None and gated["time_ratio"] > 0
    assert "gelu          3 float32" in shown.stdout
