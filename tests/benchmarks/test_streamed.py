from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_systems_take_turns_beside_the_untouched_model(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    words = [sys.executable, "benchmarks/streamed.py", "bert", "--small", "--device", "cpu", "--rounds", "2"]
    words += ["--systems", "lossless()", "comet()", "--json", str(rows)]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    untouched, *others = json.loads(rows.read_text())
    assert (untouched["system"], untouched["ratio"]) == ("untouched", 1.0)
    assert [row["system"] for row in others] == ["lossless()", "comet()"]
    assert all(row["ms"] > 0 and row["ratio"] > 0 for row in others)
    assert shown.stdout.count(" ms ") == 3
