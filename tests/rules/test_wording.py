"""Rules as text: what can be written, and what is said of what cannot."""

from __future__ import annotations

import pytest

import slimgrad as sg
from slimgrad.rules import as_rules
from tests.models import cnn, hook_count

EVERYWHERE = sg.Rule("*", sg.Lossless())


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("lossless", (EVERYWHERE,)),
        ("Lossless()", (EVERYWHERE,)),
        ("quant(bits=2, rounding='stochastic')", (sg.Rule("*", sg.Quant(bits=2, rounding="stochastic")), EVERYWHERE)),
        ("5.*: keep(); lossless()", (sg.Rule("5.*", sg.Keep()), EVERYWHERE)),
        ("OPERAND: quant(bits=8);", (sg.Rule(sg.Need.OPERAND, sg.Quant(bits=8)),)),
        ("quant(); keep()", (sg.Rule("*", sg.Quant()), sg.Rule("*", sg.Keep()))),
    ],
)
def test_a_text_says_the_same_as_the_rules_it_spells(text: str, rules: tuple[sg.Rule, ...]) -> None:
    assert as_rules(text) == rules


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "expected a codec such as 'quant"),
        (" ; ", "expected a codec such as 'quant"),
        ("magic()", r"unknown codec 'magic'; known are keep, lossless, quant, fewbit"),
        ("quant(4)", "a name and keyword arguments"),
        ("quant(bits=4", r"cannot read 'quant\(bits=4' as a codec"),
        ("quant(bits=open('x'))", "as a codec such as"),
        ("quant(bit=4)", "unexpected keyword argument 'bit'"),
        ("quant(bits=5)", r"bits must be one of \[2, 3, 4, 8\], found 5"),
        ("quant(bits=4.0)", r"bits must be one of \[2, 3, 4, 8\], found 4.0"),
        ("no.such.layer: keep()", "matches no module"),
    ],
)
def test_a_text_that_cannot_be_read_is_refused_and_nothing_is_applied(text: str, said: str) -> None:
    model = cnn()
    with pytest.raises(sg.SlimgradError, match=said):
        sg.apply(model, text)
    assert hook_count(model) == 0
