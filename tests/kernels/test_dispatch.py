"""Which twin serves which tensor, and that Triton stays away until it is wanted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import slimgrad.kernels
from slimgrad.errors import SpecError
from slimgrad.kernels import backend

SOURCE = Path(slimgrad.kernels.__file__).parents[2]

PACK = """
import torch, sys
before = "triton" in sys.modules
from slimgrad import kernels
rule = kernels.Interval(0.0, 1.0, closed=True, outside=False, nan=False)
assert kernels.pack_bits(torch.tensor([0.5, 2.0]), rule).tolist() == [1]
assert ("triton" in sys.modules) == before
assert not torch.cuda.is_initialized()
"""

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from slimgrad import kernels
assert kernels.backend("cuda") == "torch"
"""


def run(script: str) -> None:
    path = os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_packing_on_cpu_imports_no_triton_and_wakes_no_cuda() -> None:
    run(PACK)


def test_without_triton_the_reference_serves_cuda_too() -> None:
    run(WITHOUT_TRITON)


def test_cpu_tensors_go_to_the_reference() -> None:
    assert backend("cpu") == "torch"
    assert backend(torch.device("cpu"), force="torch") == "torch"


def test_the_reference_can_be_forced_on_any_device() -> None:
    assert backend("cuda", force="torch") == "torch"


def test_forcing_triton_on_cpu_without_its_interpreter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(SpecError, match="TRITON_INTERPRET=1"):
        backend("cpu", force="triton")
