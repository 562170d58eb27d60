"""Quant over the zoo: what is promised is held, and eight bits hardly show in the gradients."""

from __future__ import annotations

import copy

import pytest
import torch

import slimgrad as sg
from tests.zoo import ZOO, Entry, fresh, gradients, relative_error

SMALL = 4096


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("entry", ZOO, ids=str)
def test_eight_bits_hold_what_they_promise_and_keep_the_gradients_close(
    entry: Entry, autocast: torch.dtype | None, device: torch.device
) -> None:
    plain = fresh(entry, device)
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, sg.Quant(bits=8), min_bytes=SMALL)
    for seed in range(3):  # watched, counted, worked
        expected = gradients(entry, plain, device, autocast=autocast, seed=seed)
        found = gradients(entry, treated, device, autocast=autocast, seed=seed)
        error = relative_error(expected, found)
        assert error <= 0.05, f"seed {seed}: {error:.3f}"
    report = run.report()
    assert report.kept_after == report.promised, report
    if not (entry.name == "lstm" and device.type == "cuda"):  # cuDNN keeps all it needs in one buffer of its own
        assert any("Quant" in site.codec for site in report.sites)
