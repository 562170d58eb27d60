from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import pytest

from slimgrad.errors import SpecError
from slimgrad.report.human import NEEDS
from slimgrad.report.plots import COLOURS, TOP, demo_plot, storage_bars
from slimgrad.spec import Profile


@dataclass(frozen=True)
class Row:
    workload: str
    name: str
    kept_bytes: int
    accuracy: float
    step_ms: float


ROWS = [Row("scratch", "untouched", 3 << 20, 0.98, 20.0), Row("scratch", "lossless", 1 << 20, 0.98, 22.0)]


def test_every_need_has_a_colour_of_its_own() -> None:
    assert set(COLOURS) == set(NEEDS)
    assert len(set(COLOURS.values())) == len(NEEDS)


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_profile_is_drawn_to_the_path_given(profile: Profile, tmp_path: Path, suffix: str) -> None:
    path = profile.plot(tmp_path / "new" / f"profile.{suffix}")
    assert path.exists()
    assert path.stat().st_size > 1000


def test_no_module_name_is_taken_for_a_formula(profile: Profile, tmp_path: Path) -> None:
    sites = tuple(replace(site, path=r"pays$\nothing$") for site in profile.sites)
    path = replace(profile, sites=sites).plot(tmp_path / "profile.svg")
    assert r"pays$\nothing$" in path.read_text()


def test_an_unknown_suffix_is_refused_before_anything_is_written(profile: Profile, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"must be one of \.png, \.pdf, \.svg, \.jpg"):
        profile.plot(tmp_path / "new" / "profile.gif")
    assert not (tmp_path / "new").exists()


def test_a_profile_of_nothing_can_be_drawn(tmp_path: Path) -> None:
    assert Profile(sites=(), storages=()).plot(tmp_path / "empty.png").exists()


def test_the_bars_of_a_profile_add_up_to_what_is_kept(profile: Profile, long_profile: Profile) -> None:
    for drawn in (profile, long_profile):
        assert sum(bar.bytes for bar in storage_bars(drawn)) == drawn.kept_bytes


def test_what_does_not_fit_is_one_last_bar(long_profile: Profile) -> None:
    loose = Profile(
        sites=tuple(type(site)(**{**vars(site), "path": f"m{i}"}) for i, site in enumerate(long_profile.sites)),
        storages=long_profile.storages,
    )
    bars = storage_bars(loose)
    assert len(bars) == TOP + 1
    assert bars[-1].label == f"{len(loose.storages) - TOP} smaller storages"


def test_demo_rows_are_drawn_with_accuracy_and_step_time(tmp_path: Path) -> None:
    text = demo_plot(ROWS, tmp_path / "demo.svg").read_text()
    assert "1.0 MiB (3.0x less)" in text
    assert "accuracy 98.0%" in text
    assert "22.0 ms/step" in text


def test_drawing_no_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="at least one row"):
        demo_plot([], tmp_path / "demo.png")


def test_drawing_leaves_the_users_matplotlib_settings_alone(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    demo_plot(ROWS, tmp_path / "demo.png")
    assert dict(matplotlib.rcParams) == before


def test_importing_the_reports_does_not_import_matplotlib() -> None:
    code = "import sys, slimgrad.report.plots, slimgrad.report.text; print('matplotlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
