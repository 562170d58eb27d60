"""Runs the twins' tests in a process of their own, in which Triton interprets its kernels on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import slimgrad.kernels

TWINS = [
    Path(__file__).with_name(name)
    for name in (
        "test_twins.py",
        "test_gated_twins.py",
        "test_picking_twins.py",
        "test_blocking_twins.py",
        "test_bounding_twins.py",
    )
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_interpreted_triton_kernels_agree_with_the_reference_bit_for_bit() -> None:
    source = Path(slimgrad.kernels.__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}  # xdist's are not ours
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", *map(str, TWINS)],
        env={**own, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=TWINS[0].parents[2],
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout
