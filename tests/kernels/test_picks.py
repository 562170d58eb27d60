"""The reference for picking: the largest elements, where they were, in as few bytes as promised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slimgrad import kernels
from slimgrad.errors import SpecError
from slimgrad.kernels import Kind, Picks
from slimgrad.kernels.reference_picks import largest


def by_sorting(x: Tensor, k: int) -> Tensor:
    """The k largest magnitudes, the first among equals, in another way: a stable sort."""
    order = x.double().abs().nan_to_num(float("inf")).sort(descending=True, stable=True).indices[:k]
    picked = torch.zeros(x.numel(), dtype=torch.bool)
    picked[order] = True
    return picked


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 2.0, -3.0]), min_size=1, max_size=60), st.data())
@settings(deadline=None)
def test_exactly_k_are_picked_the_largest_and_the_first_among_equals(numbers: list[float], data) -> None:
    x = torch.tensor(numbers)
    k = data.draw(st.integers(0, len(numbers)))
    assert torch.equal(largest(x[None], k).flatten(), by_sorting(x, k))


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("n", [0, 1, 255, 257, 4096, 10_007])
def test_every_kind_puts_them_back_where_they_were(n: int, dtype: torch.dtype, kind: Kind) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)
    for k in {0, n // 20, n // 2, n}:
        picks = Picks(n, k, kind)
        values, places = kernels.pick_largest(x, picks)
        assert values.shape == (k,) and values.dtype == dtype and places.numel() == picks.nbytes
        back = kernels.put_back(values, places, (n,), (1,), picks)
        assert torch.equal(back, torch.where(by_sorting(x, k), x, torch.zeros_like(x)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 1000, 1024, 4097, 10_007])
def test_what_is_not_picked_comes_back_with_its_sign_and_the_mean_of_its_span(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)
    picks = Picks.of(n, max(1, n // 20), signed=True)
    values, places, signs = kernels.pick_largest(x, picks)
    assert signs.numel() == picks.sign_bytes(dtype.itemsize) < 0.14 * n + 600
    back = kernels.put_back(values, places, (n,), (1,), picks, signs)
    picked = by_sorting(x, picks.k)
    assert torch.equal(back[picked], x[picked])
    assert torch.equal(back.signbit(), x.signbit())
    for first in range(0, n, 1024):
        span, dropped = slice(first, first + 1024), ~picked[first : first + 1024]
        if dropped.any():
            mean = x[span].abs()[dropped].double().mean()
            assert torch.allclose(back[span].abs()[dropped].double(), mean, rtol=1e-2 if dtype.itemsize == 2 else 1e-5)


def test_where_nothing_is_negative_zeros_stay_zeros() -> None:
    x = torch.randn(5000, generator=torch.Generator().manual_seed(0)).relu()
    picks = Picks.of(5000, 500, signed=True)
    values, places, signs = kernels.pick_largest(x, picks)
    back = kernels.put_back(values, places, (5000,), (1,), picks, signs)
    assert torch.equal(back == 0, x == 0)
    assert torch.allclose(back.sum(), x.sum())
    plain = kernels.put_back(*kernels.pick_largest(x, Picks.of(5000, 500)), (5000,), (1,), Picks.of(5000, 500))
    assert (back - x).norm() < 0.6 * (plain - x).norm()


def test_a_nan_is_larger_than_all_and_is_kept() -> None:
    x = torch.tensor([1.0, float("inf"), float("nan"), -5.0])
    picks = Picks.of(4, 1)
    assert kernels.pick_largest(x, picks)[0].isnan().all()


@pytest.mark.parametrize(
    ("part", "kind"), [(0.3, Kind.BITS), (0.1, Kind.BYTES), (0.05, Kind.BYTES), (0.01, Kind.WORDS)]
)
def test_the_smallest_kind_is_taken(part: float, kind: Kind) -> None:
    n = 1 << 20
    picks = Picks.of(n, int(part * n))
    assert picks.kind is kind
    assert picks.nbytes == min(Picks(n, picks.k, other).nbytes for other in Kind)
    assert picks.nbytes < 4 * picks.k  # what absolute places of 32 bits would take


def test_what_does_not_fit_is_refused() -> None:
    x = torch.randn(100)
    with pytest.raises(SpecError, match="between none and all of 100 elements, found 101"):
        Picks.of(100, 101)
    values, places = kernels.pick_largest(x, Picks.of(100, 10))
    with pytest.raises(SpecError, match="expected 9 values"):
        kernels.put_back(values, places, (100,), (1,), Picks.of(100, 9))
    with pytest.raises(SpecError, match="expected 528 bytes of signs"):
        kernels.put_back(values, places, (100,), (1,), Picks.of(100, 10, signed=True))
    with pytest.raises(SpecError, match="dense"):
        kernels.pick_largest(torch.randn(10, 10)[:, ::2], Picks.of(50, 5))
