from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))  # a script sees the modules beside it

import accuracy
from accuracy_plot import setting
from tasks import TASKS, table
from tasks.base import Places
from tasks.characters import CONTEXT, Characters
from tasks.images import CIFAR10_FILE, CIFAR10_LOOK, Images, load_cifar10
from tasks.sentences import Classifier, read_sst2, read_trec
from tasks.training import Entry, schedule

CPU = torch.device("cpu")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data folder with a text, and without images."""
    text = tmp_path / "data" / "text" / "tinyshakespeare.txt"
    text.parent.mkdir(parents=True)
    text.write_text("To be, or not to be, that is the question:\n" * 100)
    return tmp_path / "data"


def options(data: Path, *tasks: str, seeds: str = "0") -> list[str]:
    folder = data.parent
    places = ["--data", str(data), "--cache", str(folder / "cache"), "--json", str(folder / "found.json")]
    return [*places, "--quick", "--device", "cpu", "--tasks", *tasks, "--seeds", *seeds.split()]


def entries(data: Path) -> list[dict[str, Any]]:
    return json.loads((data.parent / "found.json").read_text())["entries"]


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_trains_compares_and_resumes(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    asked = [*options(data, "resmlp", "shakespeare", "sst2", seeds="0 1"), "--configs", "untouched", "lossless()"]
    command = [sys.executable, accuracy.__file__, *asked, "--jobs", "2"]
    shown = subprocess.run(command, capture_output=True, text=True, encoding="utf-8")
    assert shown.returncode == 0, shown.stderr
    assert "8 trainings to do, 0 already done" in shown.stderr
    assert "| ResMLP on digits (fallback) | `lossless()` |" in shown.stdout
    assert "sst2 is skipped" in shown.stdout and "minilm/config.json" in shown.stdout

    found = {(e["identity"]["task"], e["identity"]["config"], e["identity"]["seed"]): e for e in entries(data)}
    assert len(found) == 8
    for task in ("resmlp", "shakespeare"):
        for seed in (0, 1):
            plain, exact = (found[task, config, seed] for config in ("untouched", "lossless()"))
            assert plain["kept_before"] is None
            figures = ("loss", "accuracy", "training_losses")
            assert [exact[name] for name in figures] == [plain[name] for name in figures]
        assert found[task, "untouched", 0]["loss"] != found[task, "untouched", 1]["loss"]
    packed = found["shakespeare", "lossless()", 0]
    assert packed["kept_after"] < packed["kept_before"] and packed["packed_sites"] > 0  # the dropout masks

    assert accuracy.main(["--table", str(data.parent / "found.json")]) == 0
    assert shown.stdout.startswith(capsys.readouterr().out.partition("\n\n")[0])

    before = (data.parent / "found.json").read_bytes()
    assert accuracy.main(asked) == 0
    again = capsys.readouterr()
    assert "0 trainings to do, 8 already done" in again.err
    assert again.out == shown.stdout
    assert (data.parent / "found.json").read_bytes() == before


def test_other_sizes_are_other_trainings(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*options(data, "shakespeare"), "--configs", "untouched", "--steps"]
    assert accuracy.main([*asked, "shakespeare=1"]) == accuracy.main([*asked, "shakespeare=2"]) == 0
    assert [entry["identity"]["recipe"]["steps"] for entry in entries(data)] == [1, 2]
    assert "shakespeare 2 x 8" in capsys.readouterr().out


def test_a_training_that_diverges_is_written_down(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = TASKS["shakespeare"]
    wild = dataclasses.replace(task, recipe=dataclasses.replace(task.recipe, lr=1e30))
    monkeypatch.setitem(TASKS, "shakespeare", wild)
    assert accuracy.main([*options(data, "shakespeare"), "--configs", "untouched"]) == 0
    (entry,) = entries(data)
    assert entry["diverged_by"] == accuracy.QUICK["steps"] and entry["loss"] is None
    assert "diverged in 1 of 1" in capsys.readouterr().out


def test_a_training_that_fails_is_told_and_tried_again(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*options(data, "shakespeare"), "--configs", "untouched"]
    with monkeypatch.context() as broken:
        broken.setattr(accuracy, "trained", lambda job: 1 / 0)
        assert accuracy.main(asked) == 1
    shown = capsys.readouterr()
    assert "ZeroDivisionError" in shown.err and "FAILED: shakespeare untouched seed 0" in shown.out
    assert accuracy.main(asked) == 0
    assert len(entries(data)) == 1


def test_a_configuration_that_cannot_be_read_is_refused_at_once(data: Path) -> None:
    with pytest.raises(SystemExit, match="nonsense"):
        accuracy.main([*options(data, "shakespeare"), "--configs", "untouched", "nonsense(bits=4)"])
    assert not (data.parent / "found.json").exists()


def test_preparing_copies_what_the_tasks_read(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = data.parent / "copy"
    accuracy.main([*options(data, "shakespeare"), "--prepare", str(copy)])
    assert [path.name for path in copy.rglob("*") if path.is_file()] == ["tinyshakespeare.txt"]
    assert "text/tinyshakespeare.txt" in capsys.readouterr().out


# --- the verdict ------------------------------------------------------------------------------------------------------


def test_a_difference_below_the_scatter_of_untouched_is_noise() -> None:
    # Differences of exactly 0.25 have no error, so that the scatter of untouched decides: 1.0.
    found = table.compared([1.25, 2.25, 3.25], [1.0, 2.0, 3.0], higher_is_better=True)
    assert found == table.Comparison(mean=0.25, error=0.0, verdict=table.WITHIN)


def test_a_difference_below_two_of_its_standard_errors_is_noise() -> None:
    # Untouched does not scatter. Differences 0 and 2: mean 1, deviation sqrt(2), error 1.
    found = table.compared([5.0, 7.0], [5.0, 5.0], higher_is_better=True)
    assert found.mean == 1.0 and found.error == pytest.approx(1.0) and found.verdict == table.WITHIN


@pytest.mark.parametrize(
    ("higher_is_better", "change", "verdict"),
    [(True, 2.0, table.BETTER), (True, -2.0, table.WORSE), (False, 2.0, table.WORSE), (False, -2.0, table.BETTER)],
)
def test_a_larger_difference_is_better_or_worse(higher_is_better: bool, change: float, verdict: str) -> None:
    untouched = [1.0, 2.0, 3.0]
    values = [value + change for value in untouched]
    assert table.compared(values, untouched, higher_is_better=higher_is_better).verdict == verdict


def test_one_seed_gives_no_verdict() -> None:
    assert table.compared([1.0], [1.0], higher_is_better=True) == table.Comparison(0.0, None, table.ONE_SEED)


def entry(
    config: str, seed: int, accuracy: float | None, kept: tuple[int, int] | None = None, steps: int = 100
) -> Entry:
    return Entry(
        identity={"task": "vit", "source": "CIFAR-10", "config": config, "seed": seed, "recipe": {"steps": steps}},
        training_losses=(),
        diverged_by=None if accuracy is not None else 100,
        seconds=1.0,
        accuracy=accuracy,
        loss=accuracy,
        kept_before=kept[0] if kept else None,
        kept_after=kept[1] if kept else None,
    )


def test_seeds_are_paired_whatever_their_order() -> None:
    plain = [entry("untouched", 0, 0.5), entry("untouched", 1, 0.75)]
    other = [entry("other", 1, 0.5, (300, 100)), entry("other", 0, 0.25, (200, 100)), entry("other", 2, 0.125)]
    row = table.rows_of([*plain, *other])[1]
    assert row.comparison is not None and (row.comparison.mean, row.comparison.error) == (-0.25, 0.0)
    assert row.seeds == (0, 1, 2)


def test_a_row_tells_the_worst_ratio_of_its_seeds() -> None:
    (row,) = table.rows_of([entry("other", 0, 0.5, (300, 100)), entry("other", 1, 0.5, (200, 100))])
    assert table.ratio(row) == 2.0
    assert row.comparison is None  # untouched was not trained


def test_trainings_of_other_length_are_not_compared() -> None:
    rows = table.rows_of([entry("untouched", 0, 0.5, steps=100), entry("other", 0, 0.75, steps=200)])
    assert [row.comparison for row in rows] == [None, None]


def test_one_diverged_seed_leaves_no_mean_to_boast_of() -> None:
    plain = [entry("untouched", seed, 0.5) for seed in (0, 1)]
    row = table.rows_of([*plain, entry("other", 0, 0.5), entry("other", 1, None)])[1]
    assert row.mean is None and row.comparison is None
    assert table.figures(row) == ("diverged in 1 of 2", table.NONE, "no, diverged")


# --- the data ---------------------------------------------------------------------------------------------------------


def test_a_pack_of_images_is_decoded_once_and_split(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    encoded = []
    for number in range(4):
        file = io.BytesIO()
        image.new("RGB", (32, 32), (60 * number, 0, 0)).save(file, "WEBP", quality=90)
        encoded.append(file.getvalue())
    np.savez(
        tmp_path / CIFAR10_FILE,
        data=np.frombuffer(b"".join(encoded), dtype=np.uint8),
        offsets=np.cumsum([0, *map(len, encoded)]),
        labels=np.array([3, 1, 2, 0], dtype=np.uint8),
        split=np.array([0, 1, 0, 0], dtype=np.uint8),
    )
    places = Places(tmp_path, tmp_path / "cache")
    found = load_cifar10(places, CPU)
    assert found.labels.tolist() == [3, 2, 0] and found.test_labels.tolist() == [1]
    assert found.images.shape == (3, 3, 40, 40)
    assert found.test_images[0, 0].float().mean() == pytest.approx(60, abs=4)  # WebP is lossy
    (cached,) = (tmp_path / "cache").iterdir()
    written = cached.stat().st_mtime_ns
    assert torch.equal(load_cifar10(places, CPU).images, found.images)
    assert cached.stat().st_mtime_ns == written


def test_batches_follow_from_the_seed_and_are_crops() -> None:
    images = torch.arange(10 * 3 * 32 * 32, dtype=torch.int32).remainder(251).to(torch.uint8).view(10, 3, 32, 32)
    labels = torch.arange(10)
    found = Images((images, labels), (images, labels), CIFAR10_LOOK, CPU)
    one, again, other = (list(found.batches(seed, steps=3, size=8)) for seed in (1, 1, 2))
    assert all(torch.equal(a[0][0], b[0][0]) and torch.equal(a[1], b[1]) for a, b in zip(one, again, strict=True))
    assert not torch.equal(one[0][0][0], other[0][0][0])
    middle = torch.full((10,), 4)
    assert torch.equal(found._cropped(labels, middle, middle), images)
    assert torch.equal(found._cropped(labels, middle - 4, middle)[:, :, 4:], images[:, :, :-4])


def test_the_next_character_is_the_target() -> None:
    found = Characters(torch.arange(20 * CONTEXT), CPU)
    for (inputs,), targets in (*found.batches(0, steps=2, size=4), *found.tests(1)):
        assert torch.equal(inputs + 1, targets)
        assert inputs.shape[1] == CONTEXT


def test_sentences_are_read_with_their_labels(tmp_path: Path) -> None:
    (tmp_path / "sst2").write_text("a stirring film\t1\nno yuks\t0")
    (tmp_path / "trec").write_bytes("3 Who was Dvo\xf8ak ?\n".encode("latin-1"))
    assert read_sst2(tmp_path / "sst2") == [("a stirring film", 1), ("no yuks", 0)]
    assert read_trec(tmp_path / "trec") == [("Who was Dvo\xf8ak ?", 3)]


def test_the_classifier_pools_what_bert_says_of_the_real_tokens() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, attn_implementation="sdpa"), add_pooling_layer=False)
    model = Classifier(bert, classes=3).eval()
    ids = torch.randint(50, (2, 6))
    real = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    tokens = bert(input_ids=ids, attention_mask=real.long()).last_hidden_state
    pooled = torch.stack([tokens[0].mean(0), tokens[1, :4].mean(0)])
    torch.testing.assert_close(model(ids, real), model.head(pooled))


def test_the_rate_rises_and_falls_to_zero() -> None:
    recipe = dataclasses.replace(TASKS["vit"].recipe, steps=100, warmup=0.1)
    rates = [schedule(step, recipe) for step in range(100)]
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert rates[0] == 0.1 and rates[-1] < 0.001


def test_a_setting_is_read_where_the_star_is() -> None:
    assert setting("dropit(keep=0.05)", "dropit(keep=*)") == 0.05
    assert setting("dropit(keep=0.05, rest=quant(bits=4))", "dropit(keep=*)") is None
    assert setting("quant(bits=4)", "dropit(keep=*)") is None


def test_a_curve_is_drawn_of_trainings_done_before(data: Path) -> None:
    pytest.importorskip("sklearn")
    found, picture = data.parent / "found.json", data.parent / "curve.png"
    accuracy.main([*options(data, "resmlp"), "--configs", "untouched", "quant(bits=4)", "quant(bits=8)"])
    assert accuracy.main(["--table", str(found), "--curve", "quant(bits=*)", "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 1000
    with pytest.raises(SystemExit):
        accuracy.main(["--curve", "quant(bits=*)"])
    with pytest.raises(SystemExit, match=r"no task has two configurations like 'fewbit\(bits=\*\)'"):
        accuracy.main(["--table", str(found), "--curve", "fewbit(bits=*)", "--plot", str(picture)])
