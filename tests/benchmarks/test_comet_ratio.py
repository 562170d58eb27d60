"""The benchmark of COMET's ratios runs, and counts each tensor once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
VGG_INPUTS = 12
"""Of 13 convolutions the first reads the images."""


def ran(folder: Path, *words: str) -> list[dict[str, object]]:
    pytest.importorskip("sklearn")
    command = [sys.executable, "benchmarks/comet_ratio.py", "--device", "cpu", "--small", "--tasks", "vgg16", *words]
    command += ["--data", str(folder), "--cache", str(folder / "cache"), "--json", str(folder / "rows.json")]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0, shown.stderr
    return json.loads((folder / "rows.json").read_text())


def test_the_path_of_bounds_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    picture = tmp_path / "bounds.png"
    command = [sys.executable, "benchmarks/comet_ratio.py", "--device", "cpu", "--small", "--tasks", "resnet20"]
    command += ["--data", str(tmp_path), "--cache", str(tmp_path / "cache"), "--path", str(picture)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert shown.returncode == 0, shown.stderr
    assert picture.stat().st_size > 10_000 and "refreshed at [0]" in shown.stdout


def test_it_tells_of_each_tensor_that_a_convolution_reads_and_of_all(tmp_path: Path) -> None:
    rows = ran(tmp_path, "--configs", "comet()", "comet(target=0.1)")
    found = {config: [row for row in rows if row["config"] == config] for config in ("comet()", "comet(target=0.1)")}
    assert [len(each) for each in found.values()] == [VGG_INPUTS + 1] * 2
    for *layers, everything in found.values():
        assert len({row["layer"] for row in layers}) == VGG_INPUTS and everything["layer"] == "all"
        for name in ("before", "after"):
            assert sum(row[name] for row in layers) == everything[name]
        # batches of 8; convolutions that read 64x32x32, 64x16x16, 128x16x16, and so on
        assert everything["before"] == 8 * 4 * 1024 * (64 + 16 + 32 + 8 + 2 * 16 + 4 + 2 * 8 + 2 + 2 * 2)
        assert all(row["bound"] > 0 and 0 < row["nonzero"] <= 1 for row in layers)
        assert all(1 < row["before"] / row["after"] < 1.1 * row["limit"] for row in layers)
    fine, coarse = (each[-1]["after"] for each in found.values())
    assert coarse < fine


def test_under_autocast_it_counts_from_half_the_bytes(tmp_path: Path) -> None:
    *_, everything = ran(tmp_path, "--dtype", "bf16")
    assert everything["before"] == 8 * 2 * 1024 * (64 + 16 + 32 + 8 + 2 * 16 + 4 + 2 * 8 + 2 + 2 * 2)
    assert everything["before"] > everything["after"]


def test_what_is_no_comet_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"lossless\(\) is no comet"):
        ran(tmp_path, "--configs", "lossless()")
