from __future__ import annotations

import pytest

from slimgrad.errors import SpecError
from slimgrad.report.explain import MEANING
from slimgrad.report.human import NEEDS, WIDTH
from slimgrad.spec import Profile


def test_every_need_has_a_meaning_in_words() -> None:
    assert set(MEANING) == set(NEEDS)


def test_an_explanation_says_size_slot_need_and_what_could_be_kept(profile: Profile) -> None:
    said = profile.explain("layer1.0.bn1")
    assert said.startswith("layer1.0.bn1 (BatchNorm2d) saves 1 tensor.")
    assert "12.0 MiB: float32[32,64,56,56] made by ConvolutionBackward0." in said
    assert "NativeBatchNormBackward0.input needs VALUES of it" in said
    assert "Could be kept instead: a quantized copy" in said


def test_an_explanation_names_who_else_keeps_the_storage_and_who_needs_more(profile: Profile) -> None:
    said = profile.explain("layer1.0.relu")
    assert "also kept by layer1.0.conv2 (ConvolutionBackward0.input, needs OPERAND)" in said
    assert "But more of it is needed by layer1.0.conv2" in said


def test_the_saver_who_asks_for_most_still_needs_the_others_to_let_go(profile: Profile) -> None:
    assert "The storage is freed only when every saver lets go of it." in profile.explain("layer1.0.conv2")


def test_a_parameter_is_said_to_live_on_anyway(profile: Profile) -> None:
    said = profile.explain("layer1.0.conv2")
    assert "float32[32,64,56,56], the parameter layer1.0.conv2.weight." in said
    assert "It is a parameter and lives on anyway" in said
    assert "It is an input and lives on anyway" in profile.explain("")


@pytest.mark.parametrize("path", ["layer1", "layer1.0", "layer1.*", "layer?.0.*"])
def test_a_module_above_or_a_glob_explains_all_modules_beneath(profile: Profile, path: str) -> None:
    said = profile.explain(path)
    assert all(name in said for name in ("layer1.0.relu (", "layer1.0.conv2 (", "layer1.0.bn1 ("))
    assert "pool (" not in said


def test_the_model_itself_may_be_asked_for_by_its_shown_name(profile: Profile) -> None:
    assert profile.explain("(model)") == profile.explain("")


def test_an_unknown_path_is_refused_with_close_matches(profile: Profile) -> None:
    with pytest.raises(SpecError, match=r"no module at 'layer1\.0\.conv3'.*close matches: 'layer1\.0\.conv2'"):
        profile.explain("layer1.0.conv3")


def test_a_path_like_no_other_is_refused_with_examples(profile: Profile) -> None:
    with pytest.raises(SpecError, match=r"modules that do: 'layer1\.0\.relu'"):
        profile.explain("zzz")


def test_lines_fit_the_page(profile: Profile, long_profile: Profile) -> None:
    for said in (profile.explain("*"), long_profile.explain("model")):
        assert max(map(len, said.splitlines())) <= WIDTH
