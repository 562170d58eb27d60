from __future__ import annotations

import platform

import torch
from typer.testing import CliRunner

from slimgrad.cli.main import app


def test_info_names_versions_devices_and_kernels() -> None:
    shown = CliRunner().invoke(app, ["info"])
    assert shown.exit_code == 0, shown.output
    lines = dict(line.split(maxsplit=1) for line in shown.output.splitlines())
    assert lines["torch"].startswith(torch.__version__.split("+")[0])
    assert lines["python"].startswith(platform.python_version())
    assert lines["cpu"].endswith("torch kernels") or lines["cpu"].endswith("triton kernels")
    assert {"slimgrad", "triton"} <= lines.keys()
