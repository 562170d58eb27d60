"""The benchmark of block products runs, and says what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_it_prints_writes_and_draws_a_row_for_each_block_and_part(tmp_path: Path) -> None:
    words = [sys.executable, "benchmarks/block_ops.py", "--device", "cpu", "--small", "--repeats", "2"]
    words += ["--shapes", "vit_proj", "resmlp_tok", "--dtypes", "float32", "--layouts", "balanced", "bsr"]
    words += ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 2 * 2 * 2 * 2
    assert all(row["product_us"] > 0 and row["pack_us"] > 0 for row in rows)
    assert (tmp_path / "rows.png").stat().st_size > 1000
    assert "faster" in done.stdout
