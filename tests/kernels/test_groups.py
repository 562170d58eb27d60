"""Group quantization: the reference against what groups.py promises."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels import Groups, pack_groups, reference, unpack_groups
from slimgrad.kernels.geometry import LANES, ROUNDS, THREADS, TILE
from slimgrad.kernels.groups import DTYPES, GROUP_SIZES, PLANES
from tests.kernels.cases import INF, same_bits, sample

BITS = tuple(PLANES)


def back(x: Tensor, how: Groups) -> Tensor:
    return unpack_groups(pack_groups(x, how), x.shape, x.stride(), how, x.dtype)


def steps(x: Tensor, how: Groups) -> Tensor:
    """The step of each element's group, read off the packed buffer."""
    packed = pack_groups(x, how)
    scales = packed[how.scales_at(x.numel()) :].view(torch.int32)
    per_group = (scales & 0x7FFF0000).view(torch.float32)
    in_tiles = per_group.repeat_interleave(how.group).view(-1, THREADS, ROUNDS, LANES)
    return in_tiles.transpose(1, 2).reshape(-1)[: x.numel()]


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("group", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("zeros", [False, True])
def test_every_element_is_within_half_a_step_or_a_whole_one(
    bits: int, group: int, zeros: bool, stochastic: bool
) -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(bits)) * 3 + 1
    x = x.relu() if zeros else x
    how = Groups(bits, group, zeros, stochastic)
    allowed = steps(x, how) * (1.0 if stochastic else 0.5) * (1 + 1e-5)  # what float32 rounds on the way
    assert ((back(x, how) - x).abs() <= allowed).all()


def test_steps_are_no_larger_than_the_range_asks_for() -> None:
    x = torch.randn(TILE, generator=torch.Generator().manual_seed(0))
    for bits in BITS:
        step = steps(x, Groups(bits, 1024))[0]
        assert step <= (x.max() - x.min()) / (2**bits - 1) * (1 + 2**-7) + x.abs().max() * 2**-8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bits", BITS)
def test_the_mask_of_a_relu_survives_exactly(bits: int, dtype: torch.dtype) -> None:
    x = sample(6000, dtype).relu()  # NaN, infinity, subnormals and the largest numbers among them
    y = back(x, Groups(bits, 128, zeros=True))
    assert torch.equal(~(x <= 0), ~(y <= 0))
    assert torch.equal(x == 0, y == 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_nan_and_infinity_survive_and_harm_only_the_precision_of_their_own_group(
    bits: int, zeros: bool, dtype: torch.dtype
) -> None:
    x = torch.rand(3 * TILE, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[5], x[40] = float("nan"), INF
    if not zeros:
        x[7] = -INF
    how = Groups(bits, 128, zeros)
    y = back(x, how)
    assert torch.equal(x.isnan(), y.isnan())
    assert torch.equal(x == INF, y == INF) and torch.equal(x == -INF, y == -INF)
    clean = x.clone()
    clean[[5, 7, 40]] = 0.5
    harmed = torch.zeros(len(x), dtype=torch.bool)
    for place in (5, 7, 40):  # a group of 128 is 4 runs of 32, 256 apart
        harmed[[place // 32 * 32 + lane + 256 * turn for lane in range(32) for turn in range(ROUNDS)]] = True
    assert same_bits(y[~harmed], back(clean, how)[~harmed])


def test_numbers_that_overflow_when_added_stay_finite() -> None:
    for dtype in DTYPES:
        largest = torch.finfo(dtype).max
        x = torch.tensor([largest, -largest, largest / 2, 0.0] * 300, dtype=dtype)
        for bits in BITS:
            assert back(x, Groups(bits, 128)).isfinite().all()


@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_numbers_whose_range_overflows_are_within_half_a_step_too(
    bits: int, dtype: torch.dtype, stochastic: bool
) -> None:
    """The largest bfloat16 is 2^-9 of it below the largest float32, which an offset or a value may so be off."""
    x = (torch.rand(3000, generator=torch.Generator().manual_seed(bits)) * 2 - 1).double() * torch.finfo(dtype).max
    x = x.to(dtype)
    how = Groups(bits, 64, stochastic=stochastic)
    allowed = steps(x.float(), how).double() * (1.0 if stochastic else 0.5) + torch.finfo(dtype).max * 2.0**-8
    assert ((back(x, how).double() - x.double()).abs() <= allowed).all()


def test_constant_groups_come_back_exactly() -> None:
    for value in (0.0, -0.0, 1.5, -2.0, 2.0**-120):
        x = torch.full((300,), value, dtype=torch.bfloat16)
        assert torch.equal(back(x, Groups(2, 32)), x)


def test_stochastic_rounding_has_no_bias_over_ten_thousand_draws() -> None:
    x = torch.randn(TILE, generator=torch.Generator().manual_seed(2))
    for bits in (2, 4):
        total = torch.zeros(TILE, dtype=torch.float64)
        for seed in range(10_000):
            total += back(x, Groups(bits, 128, stochastic=True, seed=seed)).double()
        error = (total / 10_000 - x.double()) / steps(x, Groups(bits, 128)).double()
        # One draw is off by at most a step, with a deviation of half a step at most: 0.005 steps for the mean of 10^4.
        assert error.abs().max() < 5 * 0.005
        assert error.mean().abs() < 4 * 0.005 / math.sqrt(TILE)


def test_the_seed_alone_decides_and_torchs_generators_are_left_alone() -> None:
    x = torch.randn(5000)
    state = torch.get_rng_state()
    draws = [pack_groups(x, Groups(4, 128, stochastic=True, seed=seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])
    assert torch.equal(state, torch.get_rng_state())


def test_the_next_tensor_draws_other_numbers_under_the_same_seed() -> None:
    """Errors of one step must not repeat in the next, or they would add up instead of averaging out."""
    x = torch.randn(TILE, generator=torch.Generator().manual_seed(3))
    how = Groups(2, 1024, stochastic=True)
    first, second = back(x, how) - x, back(x * 1.01, how) - x * 1.01
    assert torch.corrcoef(torch.stack([first.sign(), second.sign()]))[0, 1] < 0.8


@settings(max_examples=60, deadline=None)
@given(n=st.integers(0, 4000), bits=st.sampled_from(BITS), group=st.sampled_from(GROUP_SIZES), data=st.data())
def test_bytes_are_as_declared_for_any_size(n: int, bits: int, group: int, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    how = Groups(bits, group)
    packed = pack_groups(torch.randn(n).to(dtype), how)
    tiles = math.ceil(n / 1024)
    assert packed.numel() == how.nbytes(n) == tiles * (128 * bits + 4 * 1024 // group)


def test_any_dense_order_of_dimensions_is_packed_as_it_lies_in_memory() -> None:
    x = torch.randn(3, 4, 5, 6)
    how = Groups(4, 32)
    for view in (x, x.to(memory_format=torch.channels_last), x.transpose(1, 3), x.permute(3, 0, 2, 1)):
        y = back(view, how)
        assert y.stride() == view.stride()
        assert torch.equal(pack_groups(view, how), pack_groups(view.as_strided((360,), (1,)), how))


def test_chunks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(10 * TILE + 77)
    how = Groups(3, 128, stochastic=True)
    whole = pack_groups(x, how)
    monkeypatch.setattr(reference, "CHUNK", 2 * TILE)
    assert torch.equal(pack_groups(x, how), whole)
    assert torch.equal(back(x, how), unpack_groups(whole, x.shape, x.stride(), how, x.dtype))


def test_what_cannot_be_packed_is_refused() -> None:
    how = Groups(4, 128)
    with pytest.raises(SpecError, match="expected a dense tensor"):
        pack_groups(torch.randn(6, 10)[:, ::2], how)
    with pytest.raises(SpecError, match=r"found bits=4, group=128 and torch\.float64"):
        pack_groups(torch.randn(6).double(), how)
    with pytest.raises(SpecError, match="found bits=5"):
        pack_groups(torch.randn(6), Groups(5, 128))
    with pytest.raises(SpecError, match="expected 544 bytes"):
        unpack_groups(torch.zeros(7, dtype=torch.uint8), (6,), (1,), how, torch.float32)
