"""The README's code runs, its commands exist, and its links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import slimgrad as sg
from slimgrad.planner import timing
from slimgrad.planner.offers import CHOICES
from slimgrad.report.frontiers import COLUMNS
from tests.planner.models import SPEEDS, made

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_code_of_the_readme_runs_from_top_to_bottom() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    names: dict[str, object] = {
        "model": nn.Linear(2, 2),
        "batch": (torch.randn(4, 2), torch.randn(4, 2)),
        "loss_fn": nn.functional.mse_loss,
    }
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        for block in blocks:
            exec(block, names)
    assert len(blocks) == 3
    assert "A real step held" in shown.getvalue()
    assert "autograd keeps" in shown.getvalue() and "What did not shrink, and why" in shown.getvalue()


def test_the_code_on_plans_runs_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(timing, "speeds_of", lambda *args: SPEEDS)
    monkeypatch.setattr(timing, "worth_timing", lambda *args: [])
    model, batch = made("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    names: dict[str, object] = {"sg": sg, "model": model, "batch": batch, "loss_fn": None, "optimizer": optimizer}
    names["train"] = lambda *_: None
    shown = io.StringIO()
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "planner.md").read_text(), flags=re.DOTALL)
    with contextlib.redirect_stdout(shown):
        for block in blocks:
            exec(block, names)
            if "fitted" in names:
                names.pop("fitted").run.remove()  # type: ignore[attr-defined]
    assert len(blocks) == 5
    for words in ("A real step held", "budget 12GiB -> 4x less kept", "plans for GPT2LMHeadModel on cpu"):
        assert words in shown.getvalue()
    assert isinstance(names["edited"], sg.Plan)
    assert {"plan.json", "frontier.html", "frontier.png"} <= {path.name for path in tmp_path.iterdir()}


def test_the_page_on_plans_names_every_column_and_everything_that_may_be_done() -> None:
    text = (ROOT / "docs" / "planner.md").read_text()
    rows = {name for cells in re.findall(r"^\| ([a-z, ]+) \|", text, flags=re.MULTILINE) for name in cells.split(", ")}
    assert {"was", "now", "times", "where", "what", *COLUMNS} <= rows
    assert all(name in text for name in CHOICES)


def test_the_sentences_below_the_profile_hold(tmp_path: Path) -> None:
    names: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)[1], names)
    profile = names["profile"]
    assert isinstance(profile, sg.Profile)
    assert "transformer.h.0.mlp.act" in profile.explain("transformer.h.0.mlp.act")
    assert profile.plot(tmp_path / "kept.png").stat().st_size > 10_000


@pytest.mark.parametrize("target", re.findall(r"^make (\w+)", README, flags=re.MULTILINE))
def test_every_make_command_of_the_readme_is_a_target(target: str) -> None:
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []
