from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a script sees the modules beside it

import frontier
from frontier_plot import plotted
from frontier_rows import PEERS, Row, by_workload, command, compared, loaded, markdown, merged, missing, saved
from frontier_systems import NEED_CUDA, TREATMENTS
from frontier_workers import in_turn
from workloads import WORKLOADS, MissingLibraryError

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
BERT = "BERT-base, small"


def row(system: str = "untouched", **changes: object) -> Row:
    plain = {"workload": BERT, "kept": 100 * MIB, "peak": 120 * MIB, "ms": 10.0, "time_ratio": 1.0, "rounds": 4}
    return Row(system=system, **{**plain, **changes})  # type: ignore[arg-type]


def test_the_small_mode_measures_prints_and_draws(tmp_path: Path) -> None:
    rows, page, picture = (tmp_path / name for name in ("rows.json", "docs/page.md", "docs/images/picture.png"))
    words = [sys.executable, "benchmarks/frontier.py", "--small", "--device", "cpu", "--rounds", "2"]
    words += ["--workloads", "bert", "--systems", "untouched", "lossless()"]
    words += ["--json", str(rows), "--markdown", str(page), "--plot", str(picture)]
    shown = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr

    untouched, lossless = loaded(rows)
    assert (untouched.system, lossless.system) == ("untouched", "lossless()")
    assert untouched.status == lossless.status == "measured", lossless.note
    assert 0 < lossless.kept < untouched.kept
    assert untouched.time_ratio == 1.0
    assert 0.1 < lossless.time_ratio < 10
    assert len(lossless.untouched_ms) == 2 and 0 < lossless.p10 <= lossless.ms <= lossless.p90
    assert "| slimgrad `lossless()` | " in shown.stdout
    assert "![Kept bytes against step time](images/picture.png)" in page.read_text()
    assert picture.stat().st_size > 10_000
    assert "2/2" in shown.stderr


def dying(*words: str) -> list[str]:
    return [sys.executable, "-c", *words]


def test_a_table_goes_on_after_workers_that_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "worker_words", lambda *_: dying("import os; os._exit(9)"))
    words = ["--small", "--workloads", "bert", "gpt2", "--systems", "checkpoint", "--json", str(tmp_path / "rows.json")]
    args = frontier.arguments([*words, "--jobs", "2"])
    rows = frontier.table(args)
    assert [(found.status, found.note) for found in rows] == [("failed", "The worker ended with status 9")] * 4
    assert loaded(args.json) == rows
    assert "checkpoint each block: failed | – |" in markdown(rows)


def test_how_a_worker_ended_is_said_with_its_last_line() -> None:
    ((answer, _),) = in_turn([dying("print('one'); raise SystemExit('out of memory')")], 30)
    assert answer == {"status": "failed", "note": "The worker ended with status 1: out of memory"}


def test_a_worker_that_takes_too_long_is_stopped() -> None:
    ((answer, seconds),) = in_turn([dying("import time; time.sleep(600)")], 0.2)
    assert answer["status"] == "failed" and seconds < 60


WORKER = """
import sys, time
from pathlib import Path
from frontier_workers import serve

folder = Path(sys.argv[-1])
log = folder.parent / "events"

def measure(ready):
    with log.open("a") as events:
        print("prepared", file=events)
    ready()
    with log.open("a") as events:
        print("measures", file=events, flush=True)
        time.sleep(0.1)
        print("measured", file=events)
    return {"events": log.read_text().split()}

serve(folder, measure)
"""


def test_all_prepare_before_one_measures_and_they_measure_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))
    answers = [answer for answer, _ in in_turn([dying(WORKER)] * 3, 60)]
    assert answers[-1]["events"] == ["prepared"] * 3 + ["measures", "measured"] * 3


def test_an_exception_in_a_worker_is_its_answer() -> None:
    pytest.importorskip("transformers")
    words = ["--small", "--device", "cpu", "--rounds", "2", "--workloads", "bert", "--systems", "nonsense(bits=4)"]
    answer = frontier.answered(frontier.arguments(words), lambda: None)
    assert answer["status"] == "failed" and "nonsense" in answer["note"]


def test_a_peer_that_needs_a_gpu_is_skipped_with_a_reason() -> None:
    words = ["--small", "--device", "cpu", "--workloads", "bert", "--systems", "save_on_cpu"]
    answer = frontier.answered(frontier.arguments(words), lambda: None)
    assert answer == {"status": "skipped", "note": "Needs CUDA: it moves bytes from a GPU to the host."}


def test_a_new_row_replaces_the_old_one_of_the_same_workload_and_system(tmp_path: Path) -> None:
    rows = [row(), row("checkpoint", kept=7)]
    assert merged(rows, row("checkpoint", kept=8)) == [row(), row("checkpoint", kept=8)]
    assert merged(rows, row("lossless()")) == [*rows, row("lossless()")]
    saved(rows, tmp_path / "rows.json")
    assert loaded(tmp_path / "rows.json") == rows


def test_only_what_is_missing_is_measured_and_the_untouched_model_first() -> None:
    rows = [row(), row("checkpoint"), row("lossless()", status="failed")]
    wanted = ["checkpoint", "lossless()", "quant(bits=4)"]
    assert missing(rows, [BERT], wanted, fresh=False) == [(BERT, "lossless()"), (BERT, "quant(bits=4)")]
    assert missing(rows, [BERT], ["checkpoint"], fresh=True) == [(BERT, "checkpoint")]
    assert missing([], [BERT], ["checkpoint"], fresh=False) == [(BERT, "untouched"), (BERT, "checkpoint")]


def test_ratios_are_against_the_untouched_row_of_the_workload() -> None:
    quant = row("quant(bits=4)", kept=25 * MIB, peak=60 * MIB)
    beside = compared(quant, [row(), quant])
    assert (beside.kept_ratio, beside.peak_ratio, beside.kept_share) == (4.0, 2.0, 0.25)
    assert beside.reaching_peak == 60 / 75
    peer = row("checkpoint", kept=25 * MIB, peak=60 * MIB)
    assert compared(peer, [row(), peer]).reaching_peak is None
    offloaded = row("save_on_cpu", kept=512, peak=60 * MIB)
    assert compared(offloaded, [row(), offloaded]).kept_ratio is None
    assert compared(quant, [quant]).kept_ratio is None


def test_the_page_lists_peers_before_slimgrad_and_names_its_command() -> None:
    rows = [row("quant(bits=4)"), row("checkpoint"), row()]
    assert [found.system for found in by_workload(rows)[BERT]] == ["untouched", "checkpoint", "quant(bits=4)"]
    words = "--small --workloads bert --systems 'quant(bits=4)' checkpoint untouched --rounds 4"
    assert command(rows) == f"python benchmarks/frontier.py {words}"


def test_the_page_says_what_is_not_measured() -> None:
    rows = [row(), row("compile"), row(workload="GPT-2 medium, small")]
    assert "- Not measured: compile on GPT-2 medium, small." in markdown(rows)
    assert "Without figures" not in markdown(rows[:2])


def test_rows_far_off_and_without_figures_are_drawn_too(tmp_path: Path) -> None:
    far = row("save_on_cpu", kept=0, time_ratio=7.1)
    path = plotted([row(), far, row("quant(bits=4)", status="failed", kept=None, time_ratio=None)], tmp_path / "p.png")
    assert path.stat().st_size > 10_000


def test_every_peer_can_be_measured() -> None:
    assert list(TREATMENTS) == list(PEERS)
    assert NEED_CUDA.keys() < PEERS.keys()


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_small_workload_has_blocks_or_says_what_it_lacks(name: str) -> None:
    pytest.importorskip("transformers")
    try:
        with torch.device("meta"):
            built = WORKLOADS[name].build(True)
    except MissingLibraryError as error:
        pytest.skip(str(error))
    assert len(built.blocks()) > 1
