from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slimgrad.cli import demo as command
from slimgrad.cli.demo import BUDGET, CONFIGURATIONS, PLANNED, SCRATCH, WORKLOADS, Row
from slimgrad.cli.main import app
from slimgrad.errors import SlimgradError


def row(**changes: object) -> Row:
    plain = {"workload": SCRATCH, "name": "lossless", "kept_bytes": 1 << 20, "ratio": 2.0}
    return Row(**{**plain, "accuracy": 0.9, "step_ms": 10.0, "identical": True, **changes})  # type: ignore[arg-type]


def test_the_demo_measures_against_the_untouched_model() -> None:
    assert CONFIGURATIONS[0].what is None
    assert len({configuration.name for configuration in CONFIGURATIONS}) == len(CONFIGURATIONS)


def test_an_exact_row_with_other_weights_is_an_error() -> None:
    with pytest.raises(SlimgradError, match=r"lossless \(training from scratch\)"):
        command.checked([row(), row(identical=False)])


def test_a_lossy_row_may_end_with_other_weights(capsys: pytest.CaptureFixture[str]) -> None:
    command.checked([row(), row(name="lossy", identical=False)])
    assert "exact configurations ended with the very same weights: yes" in capsys.readouterr().out


def test_the_results_are_written_as_json_and_as_a_figure(tmp_path: Path) -> None:
    paths = command.written([row(name="untouched"), row()], tmp_path / "out", {"epochs": 1, "seed": 0})
    assert [path.name for path in paths] == ["demo.json", "demo.png"]
    data = json.loads(paths[0].read_text())
    assert data["epochs"] == 1
    assert [item["name"] for item in data["rows"]] == ["untouched", "lossless"]
    assert paths[1].exists()


def test_the_network_is_small() -> None:
    from slimgrad.cli.digits import network

    assert 90_000 < sum(parameter.numel() for parameter in network().parameters()) < 110_000


def test_adapting_trains_the_first_convolution_and_the_head_alone() -> None:
    from slimgrad.cli.digits import Start, network, prepared

    model = prepared(Start(network().state_dict(), frozen=True, seed=0))
    training = {name.rsplit(".", 1)[0] for name, value in model.named_parameters() if value.requires_grad}
    assert training == {"stem.conv", "head.2", "head.4"}
    assert not model.get_submodule("stem.norm").training
    assert model.get_submodule("head").training


def test_the_order_of_batches_follows_from_the_seed() -> None:
    pytest.importorskip("sklearn")
    from slimgrad.cli.digits import load_digits

    data = load_digits()
    one, again, other = (next(data.batches(seed))[1] for seed in (1, 1, 2))
    assert one.equal(again)
    assert not one.equal(other)


def test_a_missing_scikit_learn_is_an_error_with_the_command_that_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    shown = CliRunner().invoke(app, ["demo", "--quick"])
    assert shown.exit_code == 2
    assert "pip install scikit-learn" in shown.stderr


def test_the_quick_demo_saves_bytes_and_ends_with_the_very_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    shown = CliRunner().invoke(app, ["demo", "--quick", "--out", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "exact configurations ended with the very same weights: yes" in shown.output
    rows = json.loads((tmp_path / "demo.json").read_text())["rows"]
    assert [(item["workload"], item["name"]) for item in rows] == [
        (workload.title, configuration.name) for workload in WORKLOADS for configuration in workload.configurations
    ]
    exact = {configuration.name for configuration in CONFIGURATIONS if configuration.exact}
    assert all(item["identical"] for item in rows if item["name"] in exact)
    from_scratch = [item for item in rows if item["workload"] == SCRATCH]  # to adapt, blocks find too few rows
    open_ended = {*exact, PLANNED.name}  # a plan may be exact too, where that is faster
    assert not any(item["identical"] for item in from_scratch if item["name"] not in open_ended)
    assert all(item["ratio"] > 1.2 for item in rows if item["name"] == "lossless")
    assert all(item["ratio"] > 8 for item in rows if item["name"] == "quant 4 bit")
    (budgeted,) = [item for item in rows if item["workload"] == BUDGET and item["name"] != "untouched"]
    assert budgeted["ratio"] > 4
    assert (tmp_path / "demo.png").exists()
