"""Runs the twins' tests in a process of their own, in which Triton interprets its kernels on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import slimgrad.kernels

TWINS = sorted(Path(__file__).parent.glob("test_*twins.py"))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("file", TWINS, ids=lambda file: file.stem)
def test_interpreted_triton_kernels_agree_with_the_reference_bit_for_bit(file: Path) -> None:
    source = Path(slimgrad.kernels.__file__).parents[2]
    path = os.pathsep.join(filter(None, (str(source), os.environ.get("PYTHONPATH"))))
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}  # xdist's are not ours
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", str(file)],
        env={**own, "TRITON_INTERPRET": "1", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=file.parents[2],
        capture_output=True,
        text=True,
        timeout=480,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout.splitlines()[-1], done.stdout
