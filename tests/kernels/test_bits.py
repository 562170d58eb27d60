"""One bit per element: the reference against loops in plain Python."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels import Interval, reference
from slimgrad.kernels.reference import pack_bits, unpack_bits
from tests.kernels.cases import FLOATS, INF, INTEGERS, LEVELS, RULES, SIZES, same_bits, sample

RELU = Interval(-INF, 0.0, closed=True, outside=True, nan=True)


def bit_of(value: float, rule: Interval) -> bool:
    if value != value:
        return rule.nan
    inside = rule.lo <= value <= rule.hi if rule.closed else rule.lo < value < rule.hi
    return inside != rule.outside


def packed_by_hand(x: Tensor, rule: Interval) -> list[int]:
    packed = [0] * -(-x.numel() // 8)
    for i, value in enumerate(x.tolist()):
        packed[i // 8] |= bit_of(value, rule) << (i % 8)
    return packed


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_packing_agrees_with_a_loop_over_the_elements(dtype: torch.dtype) -> None:
    for n in (0, 1, 7, 8, 9, 150):
        x = sample(n, dtype)
        for rule in RULES:
            assert pack_bits(x, rule).tolist() == packed_by_hand(x, rule), (n, rule)


@pytest.mark.parametrize("n", SIZES)
def test_every_size_has_a_byte_per_eight_bits_and_zeros_after_the_last(n: int) -> None:
    packed = pack_bits(torch.ones(n), RELU)
    assert packed.shape == (-(-n // 8),)
    assert packed.dtype == torch.uint8
    assert sum(byte.bit_count() for byte in packed.tolist()) == n


@pytest.mark.parametrize("dtype", [*FLOATS, torch.uint8, torch.bool], ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_unpacking_gives_on_for_set_bits_and_off_for_the_others(n: int, dtype: torch.dtype) -> None:
    x = sample(n, torch.float32)
    set_bits = torch.tensor([bit_of(value, RELU) for value in x.tolist()], dtype=torch.bool)
    for on, off in LEVELS if dtype.is_floating_point else ((1.0, 0.0), (0.0, 1.0)):
        expected = torch.tensor([off, on], dtype=dtype)[set_bits.long()]
        assert same_bits(unpack_bits(pack_bits(x, RELU), n, on, off, dtype), expected)


def test_a_bool_mask_comes_back_as_it_was() -> None:
    mask = sample(5000, torch.float32) > 0
    non_zero = Interval(0.0, 0.0, closed=True, outside=True, nan=True)
    assert torch.equal(unpack_bits(pack_bits(mask, non_zero), 5000, 1.0, 0.0, torch.bool), mask)


def test_relu_passes_infinity_and_nan_and_stops_both_zeros() -> None:
    x = torch.tensor([INF, float("nan"), 0.0, -0.0, 1e-45, -1e-45, -INF, 1.0])
    assert pack_bits(x, RELU).tolist() == [0b10010011]


def test_float64_is_not_rounded_before_it_is_compared() -> None:
    x = torch.tensor([1.0, 1.0 + 2**-52, 1.0 - 2**-53], dtype=torch.float64)
    assert pack_bits(x, Interval(-INF, 1.0, closed=True, outside=True, nan=False)).tolist() == [0b010]


def test_large_integers_are_not_rounded_before_they_are_compared() -> None:
    x = torch.tensor([2**62, 2**62 + 1, 2**63 - 1, -(2**63)])
    assert pack_bits(x, Interval(2.0**62, INF, closed=False, outside=False, nan=False)).tolist() == [0b0110]


def test_float8_is_packed_by_its_values() -> None:
    x = torch.tensor([-1.0, 0.0, 0.5, float("nan")]).to(torch.float8_e5m2)
    assert pack_bits(x, RELU).tolist() == [0b1100]


def test_chunks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    x = sample(5001, torch.float32)
    whole = pack_bits(x, RELU)
    monkeypatch.setattr(reference, "CHUNK", 64)
    assert torch.equal(pack_bits(x, RELU), whole)
    assert torch.equal(unpack_bits(whole, 5001, 1.0, 0.0, torch.float32).bool(), ~(x <= 0))


def test_a_tensor_that_needs_a_gradient_is_packed_like_any_other() -> None:
    x = sample(100, torch.float32)
    packed = pack_bits(x.clone().requires_grad_(), RELU)
    assert not packed.requires_grad
    assert torch.equal(packed, pack_bits(x, RELU))


@pytest.mark.parametrize("x", [torch.zeros(2, 4), torch.zeros(8)[::2], torch.zeros(4, dtype=torch.complex64)])
def test_only_flat_contiguous_real_tensors_are_packed(x: Tensor) -> None:
    with pytest.raises(SpecError, match="contiguous 1-D"):
        pack_bits(x, RELU)


@pytest.mark.parametrize("bits", [torch.zeros(3, dtype=torch.uint8), torch.zeros(2, dtype=torch.int8)])
def test_bits_that_do_not_match_the_count_are_refused(bits: Tensor) -> None:
    with pytest.raises(SpecError, match="expected 2 contiguous bytes"):
        unpack_bits(bits, 16, 1.0, 0.0, torch.float32)


def test_an_interval_with_a_nan_bound_is_refused() -> None:
    with pytest.raises(SpecError, match="bounds must be numbers"):
        Interval(float("nan"), 0.0, closed=True, outside=False, nan=False)


def test_bounds_are_floats_whatever_they_are_given_as() -> None:
    # nn.Hardtanh(0, 6) and nn.Hardtanh(0.0, 6.0) must reach one compiled kernel with the same kinds of arguments.
    rule = Interval(0, 1, closed=True, outside=False, nan=False)
    assert (type(rule.lo), type(rule.hi)) == (float, float)
