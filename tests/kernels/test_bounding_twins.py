"""Values within a bound: Triton against the reference, bit for bit. See test_twins.py for where these run."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.kernels import BoundedParts, Coding, Layout
from slimgrad.kernels.bounds import LANES, Extent
from slimgrad.kernels.geometry import PATTERNS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAN, INF = float("nan"), float("inf")


def white(n: int) -> Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0))


DATA = {
    "white": white(700),
    "relu": white(4500).relu(),
    "smooth": torch.sin(torch.arange(700) / 50) * 3,
    "zeros": torch.zeros(300),
    "a NaN": torch.cat([white(300), torch.tensor([NAN])]),
    "odd ones": torch.tensor([INF, -INF, 1e38, -1e38, 1e-40, 0.0, -0.0]),
    "huge": white(300) * 1e30,
    "tiny": white(300) * 1e-40,
    "of all sizes": white(900) * torch.exp(white(900).flip(0) * 4),
}
"""One is larger than a tile, which takes the interpreter a second."""

CODINGS = [
    Coding(),
    Coding("lorenzo", zeros=True),
    Coding("auto"),
    Coding("none", zeros=True, dither=True),
    Coding("auto", dither=True),
]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> torch.device:
    pytest.importorskip("triton")
    return torch.device(request.param)


def in_order(kept: BoundedParts, itemsize: int) -> list[Tensor]:
    """The tiles one behind the other, as they lie on a CPU."""
    words, heads, places, _ = (part.cpu() for part in kept)
    extent = Extent(0, itemsize)
    lengths = (heads.int() & 0xFFFF) >> extent.length_shift
    lengths[lengths == extent.raw_length] = extent.raw_words
    sizes = [int(tile.sum()) for tile in lengths.split(LANES)]
    tiles = [words[place : place + size] for place, size in zip(places[:-1].tolist(), sizes, strict=True)]
    return [torch.cat(tiles), heads, places[-1:]]


def bits(x: Tensor) -> Tensor:
    return x.view(PATTERNS[x.element_size()])


@pytest.mark.parametrize("how", CODINGS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", DATA)
def test_streams_and_values_are_the_same(name: str, dtype: torch.dtype, how: Coding, place: torch.device) -> None:
    check(DATA[name].to(dtype), 0.1, how, place)


@pytest.mark.parametrize("bound", [1e-3, 1e-5])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_bounds_take_wide_codes(dtype: torch.dtype, bound: float, place: torch.device) -> None:
    for name in ("white", "of all sizes"):
        check(DATA[name].to(dtype), bound, Coding("auto", zeros=True), place)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bounds_near_the_largest_number(dtype: torch.dtype, place: torch.device) -> None:
    for part in (0.3, 0.6):
        check(DATA["white"].to(dtype), part * torch.finfo(dtype).max, Coding("auto", zeros=True), place)


def check(x: Tensor, bound: float, how: Coding, place: torch.device) -> None:
    expected = kernels.pack_bounded(x, torch.tensor([bound]), how, force="torch")
    found = kernels.pack_bounded(x.to(place), torch.tensor([bound], device=place), how, force="triton")
    assert all(
        torch.equal(a, b) for a, b in zip(in_order(found, x.itemsize), in_order(expected, x.itemsize), strict=True)
    )
    back = kernels.unpack_bounded(found, Layout.of(x.to(place)), how, force="triton").cpu()
    assert torch.equal(bits(back), bits(kernels.unpack_bounded(expected, Layout.of(x), how, force="torch")))


def test_what_does_not_fit_is_not_written(place: torch.device) -> None:
    x, bound, how = DATA["white"].to(place), torch.tensor([0.01], device=place), Coding()
    used = int(kernels.pack_bounded(x, bound, how, force="triton").places[-1])
    found = kernels.pack_bounded(x, bound, how, used // 2, force="triton")
    assert len(found.words) == used // 2
    assert int(found.places[-1]) == used


@pytest.mark.parametrize("bound", [0.0, NAN])
def test_without_a_bound_all_is_kept_as_it_is(bound: float, place: torch.device) -> None:
    x = DATA["relu"].to(place)
    for how in (Coding(), Coding("auto", zeros=True)):
        kept = kernels.pack_bounded(x, torch.tensor([bound], device=place), how, force="triton")
        assert torch.equal(kernels.unpack_bounded(kept, Layout.of(x), how, force="triton"), x)


def test_channels_last_is_taken_in_the_order_of_memory(place: torch.device) -> None:
    x = white(4 * 6 * 9 * 11).view(4, 6, 9, 11).to(memory_format=torch.channels_last)
    how = Coding("auto")
    kept = kernels.pack_bounded(x.to(place), torch.tensor([0.1], device=place), how, force="triton")
    back = kernels.unpack_bounded(kept, Layout.of(x.to(place)), how, force="triton")
    assert back.stride() == x.stride()
    assert (back.cpu() - x).abs().max() <= 0.1
