"""Rules: what they select, what they refuse, and their JSON."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import slimgrad as sg
from slimgrad.rules import path_matches
from tests.codecs.halved import Halved
from tests.models import cnn, hook_count, images


@pytest.mark.parametrize(
    ("path", "pattern", "expected"),
    [
        ("head", "head.*", True),
        ("head.fc", "head.*", True),
        ("header", "head.*", False),
        ("a.b.c", "a.*", True),
        ("layer1.0.conv", "layer?.0.*", True),
        ("", "*", True),
        ("x", "y", False),
    ],
)
def test_path_globs_include_the_module_itself(path: str, pattern: str, expected: bool) -> None:
    assert path_matches(path, pattern) is expected


def treated_paths(model: nn.Module, what: object) -> set[str]:
    run = sg.apply(model, what)
    model(images()).sum().backward()
    paths = {site.site.path for site in run.report().sites}
    run.remove()
    return paths


def test_the_first_rule_that_matches_wins() -> None:
    everything = treated_paths(cnn(), sg.Lossless())
    assert everything == {"2", "3", "4", "6", "7"}
    assert treated_paths(cnn(), [sg.Rule("4", sg.Keep()), sg.Rule("*", sg.Lossless())]) == everything - {"4"}


def test_rules_select_by_class_need_path_and_predicate() -> None:
    lossless = sg.Lossless()
    assert treated_paths(cnn(), [sg.Rule(nn.Dropout, lossless)]) == {"4"}
    assert treated_paths(cnn(), [sg.Rule(sg.Need.INDEX, lossless)]) == {"3"}
    assert treated_paths(cnn(), [sg.Rule("[67]", lossless)]) == {"6", "7"}
    assert treated_paths(cnn(), [sg.Rule(lambda site: site.fn == "dropout", lossless)]) == {"4"}


def test_sites_that_no_rule_names_are_never_touched() -> None:
    model = cnn()
    run = sg.apply(model, [sg.Rule("5", Halved())])
    model(images()).sum().backward()
    assert {site.site.path for site in run.report().sites} <= {"5"}


def test_a_path_that_matches_no_module_is_refused_with_close_names() -> None:
    model = nn.ModuleDict({"encoder": nn.Linear(2, 2), "decoder": nn.Linear(2, 2)})
    with pytest.raises(sg.RuleError, match=r"no path is like 'encodr\.\*'; close are 'encoder'"):
        sg.apply(model, [sg.Rule("encodr.*", sg.Lossless())])
    assert hook_count(model) == 0


def test_a_class_that_the_model_lacks_is_refused_with_those_it_has() -> None:
    with pytest.raises(sg.RuleError, match=r"no LSTM; it has AvgPool2d, BatchNorm2d, Conv2d"):
        sg.apply(cnn(), [sg.Rule(nn.LSTM, sg.Lossless())])


@pytest.mark.parametrize("with_batch", [False, True])
def test_a_codec_that_cannot_serve_the_need_is_refused_and_nothing_stays_applied(with_batch: bool) -> None:
    model = cnn()

    def apply_and_step() -> None:
        sg.apply(model, [sg.Rule(nn.Linear, sg.Lossless())], batch=images() if with_batch else None)
        model(images())

    with pytest.raises(
        sg.RuleError, match=r"cannot serve what it matches: .* need OPERAND, the codec serves .* What would fit: Keep"
    ):
        apply_and_step()
    assert hook_count(model) == 0
    model(images()).sum().backward()


def test_a_need_that_nothing_has_is_refused_when_the_sites_are_known() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    with pytest.raises(sg.RuleError, match="matches nothing that is kept for backward; the model keeps tensors for"):
        sg.apply(model, [sg.Rule(sg.Need.INDEX, sg.Lossless())], batch=torch.randn(64, 64))


@pytest.mark.parametrize("what", [3, [], [sg.Lossless()], sg.Lossless, None])
def test_anything_but_codecs_and_rules_is_refused_with_what_would_fit(what: object) -> None:
    with pytest.raises(
        sg.RuleError,
        match=r"expected a codec \(Keep\(\), Lossless\(\), Quant\(\), .*, Offload\(\)\), a list of Rule",
    ):
        sg.apply(cnn(), what)


def test_rules_are_checked_when_they_are_made() -> None:
    with pytest.raises(sg.RuleError, match="second part must be a codec such as"):
        sg.Rule("*", "lossless")
    with pytest.raises(sg.RuleError, match="first part must be a path glob"):
        sg.Rule(3, sg.Lossless())


@pytest.mark.parametrize("where", ["head.*", nn.Linear, sg.Need.MASK])
def test_rules_round_trip_through_json(where: object) -> None:
    rule = sg.Rule(where, sg.Lossless())
    assert sg.Rule.from_json(rule.to_json()) == rule


def test_rules_print_as_typed() -> None:
    assert repr(sg.Rule(nn.Linear, sg.Lossless())) == "Rule(Linear, Lossless())"
    assert repr(sg.Rule("head.*", sg.Keep())) == "Rule('head.*', Keep())"


def test_a_rule_with_a_function_cannot_be_written_to_json() -> None:
    with pytest.raises(sg.SpecError, match="cannot be written to JSON; use a path, a class or a Need"):
        sg.Rule(lambda site: True, sg.Lossless()).to_json()
