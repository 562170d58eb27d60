"""The benchmark of picking runs, and says what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_prints_and_writes_a_row_for_each_dtype_and_part(tmp_path: Path) -> None:
    words = [sys.executable, "benchmarks/picking.py", "--device", "cpu", "--sizes", "64K", "--repeats", "2"]
    words += ["--keep", "0.1", "0.3", "--json", str(tmp_path / "rows.json")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [(row["dtype"], row["keep"], row["signs"]) for row in rows] == [
        (dtype, *one) for dtype in ("bfloat16", "float32") for one in ((0.1, False), (0.3, False), (0.05, True))
    ]
    assert all(row["pick_us"] > 0 and row["times_less"] > 2 for row in rows)
    assert "BYTES" in done.stdout and "BITS" in done.stdout
