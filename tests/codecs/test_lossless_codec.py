"""What is particular to Lossless: which demands one bit, one byte or a reference can serve exactly."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import slimgrad as sg
from slimgrad.codecs import Demand
from slimgrad.spec import Need

LOSSLESS = sg.Lossless()


def mask(fn: str, **detail: float) -> Demand:
    return Demand(need=Need.MASK, fn=fn, detail=detail)


def test_bounds_that_the_dtype_cannot_hold_exactly_are_not_served() -> None:
    assert LOSSLESS.serves(mask("threshold", threshold=0.25), torch.bfloat16)
    assert not LOSSLESS.serves(mask("threshold", threshold=0.1), torch.bfloat16)
    assert not LOSSLESS.serves(mask("threshold", threshold=0.1), torch.float32)


def test_degenerate_intervals_are_not_served() -> None:
    assert not LOSSLESS.serves(mask("hardtanh", min_val=1.0, max_val=1.0), torch.float32)
    assert not LOSSLESS.serves(mask("shrink", lambd=-1.0), torch.float32)
    assert not LOSSLESS.serves(mask("gelu"), torch.float32)


def test_a_demand_it_cannot_serve_is_refused_when_packing() -> None:
    with pytest.raises(sg.SpecError, match="Lossless cannot serve MASK of gelu"):
        LOSSLESS.pack(torch.randn(4), mask("gelu"))


def test_pool_indices_take_one_byte_each_and_come_back_exactly() -> None:
    x = torch.randn(2, 3, 17, 13)
    for kernel, stride, padding, dilation in [(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2), (5, 3, 2, 1)]:
        _, indices = F.max_pool2d(x, kernel, stride, padding, dilation, return_indices=True)
        detail = {
            "kernel_size": (kernel, kernel),
            "stride": (stride, stride),
            "padding": (padding, padding),
            "dilation": (dilation, dilation),
            "input_size": (17, 13),
        }
        packed = LOSSLESS.pack(indices, Demand(need=Need.INDEX, fn="window", detail=detail))
        assert packed.nbytes == indices.numel()
        assert torch.equal(LOSSLESS.unpack(packed), indices)


def test_a_weight_copy_costs_nothing_and_is_made_again_bit_for_bit() -> None:
    weight = torch.nn.Parameter(torch.randn(64, 32))
    copy = weight.detach().to(torch.bfloat16).t()
    packed = LOSSLESS.pack(copy, Demand(need=Need.WEIGHT, parameter=weight))
    again = LOSSLESS.unpack(packed)
    assert packed.nbytes == 0 and torch.equal(again, copy) and again.stride() == copy.stride()


def test_a_parameter_changed_in_between_is_an_error_that_says_what_to_do() -> None:
    weight = torch.nn.Parameter(torch.randn(8, 8))
    packed = LOSSLESS.pack(weight.detach().to(torch.bfloat16), Demand(need=Need.WEIGHT, parameter=weight))
    with torch.no_grad():
        weight.add_(1)
    with pytest.raises(sg.SavedTensorModifiedError, match=r"before optimizer\.step"):
        LOSSLESS.unpack(packed)
