from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import Result
from typer.testing import CliRunner

from slimgrad.cli.main import app
from slimgrad.spec import Profile

SOURCE = """
import torch
from torch import nn


def make():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(32, 8)


def with_loss():
    model, batch = make()
    return model, batch, lambda output: output.square().mean()


def only_a_model():
    return make()[0]


def not_a_model():
    return "model", 1


def bad_loss():
    return (*make(), 3)


def loses_its_data():
    open("/nowhere/data.bin")


def is_given_nothing(path):
    return make()


def has_wrong_shapes():
    return make()[0], torch.randn(32, 9)


number = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module in the working directory, which is not on the path yet."""
    (tmp_path / "my_models.py").write_text(SOURCE)
    (tmp_path / "broken_models.py").write_text("import surely_not_installed\n")
    (tmp_path / "unread_models.py").write_text("def make(:\n")
    (tmp_path / "loud_models.py").write_text("names = {}\nnames['make']\n")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield "my_models"
    sys.path[:] = path
    for name in ("my_models", "broken_models", "unread_models", "loud_models"):
        sys.modules.pop(name, None)


def slimgrad(*args: str) -> Result:
    return CliRunner().invoke(app, ["profile", *args])


@pytest.mark.parametrize("factory", ["make", "with_loss"])
def test_a_factory_in_the_working_directory_is_profiled(module: str, factory: str) -> None:
    shown = slimgrad(f"{module}:{factory}")
    assert shown.exit_code == 0, shown.output
    assert "autograd keeps" in shown.output
    assert "by need" in shown.output


def test_the_profile_is_written_as_json_that_reads_back(module: str, tmp_path: Path) -> None:
    shown = slimgrad(f"{module}:make", "--json", "new/profile.json", "--plot", "new/profile.png")
    assert shown.exit_code == 0, shown.output
    text = (tmp_path / "new" / "profile.json").read_text()
    assert json.loads(text)["type"] == "Profile"
    assert Profile.from_json(text).kept_bytes > 0
    assert (tmp_path / "new" / "profile.png").exists()
    assert "wrote new/profile.json" in shown.output


def test_a_module_is_explained_in_words(module: str) -> None:
    shown = slimgrad(f"{module}:make", "--explain", "2")
    assert shown.exit_code == 0, shown.output
    assert "2 (Linear) saves" in shown.output


def test_fake_tensors_and_a_device_are_passed_on(module: str) -> None:
    shown = slimgrad(f"{module}:make", "--fake", "--device", "cpu", "--limit", "1")
    assert shown.exit_code == 0, shown.output
    assert "fake tensors" in shown.output


def test_autocast_shows_in_the_types_that_are_kept(module: str) -> None:
    shown = slimgrad(f"{module}:make", "--fake", "--autocast", "bf16")
    assert shown.exit_code == 0, shown.output
    assert "bfloat16[" in shown.output


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_models", "expected package.module:factory, found 'my_models'"),
        ("my_modles:make", "no module 'my_modles' in"),
        ("my_models.deeper:make", "no module 'my_models.deeper' in"),
        ("broken_models:make", "the module 'broken_models' imports 'surely_not_installed', which is not installed"),
        ("my_models:mak", "the module 'my_models' has no 'mak'; did you mean 'make'?"),
        ("my_models:number", "my_models:number is a value of type int, not a function"),
        ("my_models:only_a_model", "it returned a value of type Sequential"),
        ("my_models:not_a_model", "its model is a value of type str, not an nn.Module"),
        ("my_models:bad_loss", "its loss_fn is a value of type int, not callable"),
        ("my_models:loses_its_data", "raised FileNotFoundError: [Errno 2] No such file or directory: '/nowhere/data"),
        ("my_models:is_given_nothing", "my_models:is_given_nothing raised TypeError: is_given_nothing() missing 1"),
        ("unread_models:make", "the module 'unread_models' raised SyntaxError: invalid syntax (unread_models.py, line"),
        ("loud_models:make", "the module 'loud_models' raised KeyError: 'make' ("),
    ],
)
def test_a_wrong_factory_is_an_error_in_one_line(module: str, target: str, message: str) -> None:
    refused(slimgrad(target), message)


def test_what_a_factory_raises_is_told_with_its_line(module: str, tmp_path: Path) -> None:
    refused(slimgrad(f"{module}:loses_its_data"), f"({tmp_path}/my_models.py:28)")
    refused(slimgrad("loud_models:make"), f"({tmp_path}/loud_models.py:2)")


def test_what_fails_on_fake_tensors_is_one_line_without_what_torch_logs(
    module: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    monkeypatch.setattr(logger, "handlers", [*logger.handlers, caplog.handler])
    refused(slimgrad(f"{module}:has_wrong_shapes", "--fake"), "Sequential failed on fake tensors")
    assert caplog.records == []
    logger.error("the next one is heard again")
    assert caplog.records != []


def test_an_unknown_device_is_an_error_in_one_line(module: str) -> None:
    refused(slimgrad(f"{module}:make", "--device", "abacus"), "'abacus' is not a device")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to move to")
def test_a_device_that_is_not_there_is_an_error_in_one_line(module: str) -> None:
    refused(slimgrad(f"{module}:make", "--device", "cuda:0"), "cannot move to 'cuda:0'")


def test_a_real_step_runs_on_the_device_named(module: str) -> None:
    shown = slimgrad(f"{module}:with_loss", "--device", "cpu")
    assert shown.exit_code == 0, shown.output
    assert "on cpu: autograd keeps" in shown.output


def test_an_unknown_module_to_explain_is_an_error_in_one_line(module: str) -> None:
    refused(slimgrad(f"{module}:make", "--explain", "nowhere"), "no module at 'nowhere'")


def refused(shown: Result, message: str) -> None:
    assert shown.exit_code == 2, shown.output
    assert message in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
    assert "Traceback" not in shown.output
