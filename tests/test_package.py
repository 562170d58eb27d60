"""The package as a whole: what importing it does, and the names it shows."""

from __future__ import annotations

import subprocess
import sys

import slimgrad as sg

CHECK = """
import sys, slimgrad, torch
assert "triton" not in sys.modules, "triton was imported"
assert "matplotlib" not in sys.modules, "matplotlib was imported"
assert not torch.cuda.is_initialized(), "CUDA was initialised"
"""


def test_importing_the_package_touches_neither_cuda_nor_triton() -> None:
    subprocess.run([sys.executable, "-c", CHECK], check=True)


def test_every_public_name_exists_and_every_error_is_of_one_family() -> None:
    public = [getattr(sg, name) for name in sg.__all__]
    errors = [item for item in public if isinstance(item, type) and issubclass(item, Exception)]
    assert all(issubclass(error, (sg.SlimgradError, Warning)) for error in errors)
    assert sorted(sg.__all__) == list(sg.__all__)
