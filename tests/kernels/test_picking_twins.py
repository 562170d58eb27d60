"""Picking the largest elements: Triton against the reference, bit for bit. See test_twins.py for where these run."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.kernels import Kind, Picks
from tests.kernels.cases import same_bits, sample

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
LARGE = 40_000 if INTERPRETED else 3_000_000  # several programs, and a sample that is not all there is
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> torch.device:
    pytest.importorskip("triton")
    return torch.device(request.param)


def normal(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(dtype)


KINDS_OF_DATA = {
    "normal": normal,
    "awkward": sample,
    "half zeros": lambda n, dtype: normal(n, dtype).relu(),
    "all zeros": lambda n, dtype: torch.zeros(n, dtype=dtype),
    "all equal": lambda n, dtype: torch.full((n,), -2.0, dtype=dtype),
    "few values": lambda n, dtype: normal(n, dtype).round(),
    "wide": lambda n, dtype: (30 * normal(n, torch.float64)).exp2().to(dtype),
    "rising": lambda n, dtype: torch.linspace(0, 1, n).to(dtype),
}


def check(x: Tensor, picks: Picks, place: torch.device) -> None:
    values, places, *signs = kernels.pick_largest(x, picks, force="torch")
    found = kernels.pick_largest(x.to(place), picks, force="triton")
    assert same_bits(found[0].cpu(), values)
    assert torch.equal(found[1].cpu(), places)
    if picks.signed:
        check_signs(found[2].cpu(), signs[0], x.dtype, picks)
        signs = [found[2].cpu()]  # whose means may differ in the last bit
    shape, stride = (x.numel(),), (1,)
    back = kernels.put_back(*found[:2], shape, stride, picks, *found[2:], force="triton")
    assert same_bits(back.cpu(), kernels.put_back(values, places, shape, stride, picks, *signs, force="torch"))


def check_signs(found: Tensor, expected: Tensor, dtype: torch.dtype, picks: Picks) -> None:
    """Bits are equal; means are sums in another order."""
    assert torch.equal(found[: picks.bit_bytes], expected[: picks.bit_bytes])
    means = [signs[picks.bit_bytes :].view(dtype).float() for signs in (found, expected)]
    assert torch.allclose(*means, rtol=1e-5 if dtype.itemsize > 2 else 1e-2, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", KINDS_OF_DATA.values(), ids=KINDS_OF_DATA.keys())
def test_the_same_elements_are_picked_whatever_the_data(place: torch.device, make, dtype: torch.dtype) -> None:
    for part in (0.001, 0.1, 0.6):
        check(make(LARGE, dtype), Picks.of(LARGE, int(part * LARGE)), place)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [0, 1, 7, 255, 256, 257, 4095, 4096, 4097, 9000])
def test_the_same_places_are_written_for_every_size_and_kind(place: torch.device, n: int, kind: Kind) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for k in sorted({0, min(1, n), n // 10, n}):
            check(normal(n, dtype), Picks(n, k, kind), place)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", KINDS_OF_DATA.values(), ids=KINDS_OF_DATA.keys())
def test_signs_and_means_are_the_same_whatever_the_data(place: torch.device, make, dtype: torch.dtype) -> None:
    for part in (0.1,) if INTERPRETED else (0.01, 0.1, 0.6):
        check(make(LARGE, dtype), Picks.of(LARGE, int(part * LARGE), signed=True), place)


@pytest.mark.parametrize("kind", Kind, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n", [1, 7, 1023, 1025, 4095, 4096, 4097, 9000])
def test_signs_are_written_for_every_size_and_kind(place: torch.device, n: int, kind: Kind) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for k in sorted({1, max(1, n // 10), n}):
            check(normal(n, dtype), Picks(n, k, kind, signed=True), place)


def test_memory_that_begins_at_an_odd_place_is_read_rightly(place: torch.device) -> None:
    x = normal(10_001, torch.bfloat16).to(place)[1:]
    picks = Picks.of(10_000, 1000)
    found = kernels.pick_largest(x, picks, force="triton")
    expected = kernels.pick_largest(x.cpu(), picks, force="torch")
    assert all(same_bits(a.cpu(), b) for a, b in zip(found, expected, strict=True))
