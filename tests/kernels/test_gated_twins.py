"""Gated units: Triton against the reference, on a GPU or, as in test_twins.py, through Triton's interpreter."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.kernels.reference_gated import FUNCTIONS
from tests.kernels.cases import FLOATS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
NAN = float("nan")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> torch.device:
    pytest.importorskip("triton")
    return torch.device(request.param)


def operands(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and dY."""
    generator = torch.Generator().manual_seed(sum(shape))
    a, b, dy = (torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(3))
    return a * 3, b, dy


def agree(a: Tensor, b: Tensor, dy: Tensor, function: str, place: torch.device) -> None:
    """Both twins' results: the same layout, and the same numbers but for the order of their roundings."""
    expected = (kernels.gated_forward(a, b, function), *kernels.gated_backward(a, b, dy, function))
    a, b, dy = (moved(t, place) for t in (a, b, dy))
    y = kernels.gated_forward(a, b, function, force="triton")
    found = (y, *kernels.gated_backward(a, b, dy, function, force="triton"))
    rounding = torch.finfo(a.dtype).eps
    # The result is rounded once. f and f' are off by some 1e-6 of 1 + |x|; dY and b of a normal distribution reach 4.
    within = {"rtol": 2 * rounding + 2e-6, "atol": rounding / 4 + 2e-5} if a.dtype != torch.float64 else {}
    for name, mine, its in zip(("y", "da", "db"), found, expected, strict=True):
        assert mine.dtype == its.dtype and mine.stride() == its.stride(), name
        assert torch.allclose(mine.cpu().double(), its.double(), equal_nan=True, **within), name


def moved(t: Tensor, place: torch.device) -> Tensor:
    """The tensor there, at the same place of a storage of the same size, so that gaps stay gaps."""
    whole = t.as_strided((t.untyped_storage().nbytes() // t.itemsize,), (1,), 0).to(place)
    return whole.as_strided(t.shape, t.stride(), t.storage_offset())


@pytest.mark.parametrize("n", [1, 7, 1025, 5000])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_both_twins_compute_the_same(place: torch.device, function: str, dtype: torch.dtype, n: int) -> None:
    agree(*operands((n,), dtype), function, place)


LAYOUTS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "transposed": lambda a, b: (a.transpose(1, 2), b.transpose(1, 2)),
    "halves of a projection": lambda a, b: torch.cat([a, b], -1).chunk(2, -1),
    "one half": lambda a, b: (a, torch.cat([a, b], -1).chunk(2, -1)[1]),
    "short halves": lambda a, b: torch.cat([a, b], -1)[..., :16].chunk(2, -1),
    "rows that lie unevenly": lambda a, b: (torch.cat([a, a], 1)[:, ::2], torch.cat([b, b], 1)[:, :3]),
    "the same row again": lambda a, b: (a[:1, :1].expand_as(a), b),
    "gaps within rows": lambda a, b: (a[..., ::2], b[..., 1::2]),
    "another order": lambda a, b: (a, b.transpose(0, 1).contiguous().transpose(0, 1)),
    "misaligned": lambda a, b: (a.flatten()[1:-2], b.flatten()[3:]),
    "empty": lambda a, b: (a[:0], b[:0]),
    "zero dimensions": lambda a, b: (a[0, 0, 0], b[1, 1, 1]),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_both_twins_take_every_layout(
    place: torch.device, layout: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], dtype: torch.dtype
) -> None:
    a, b, dy = operands((2, 3, 1040), dtype)
    a, b = layout(a, b)
    agree(a, b, dy.flatten()[: a.numel()].view(a.shape), "silu", place)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_both_twins_agree_far_out_and_on_nan(place: torch.device, function: str, dtype: torch.dtype) -> None:
    a = torch.tensor([0.0, -0.0, 16.0, -16.0, 40.0, -40.0, 6e4, -6e4, 1e-7, -1e-7, NAN, 1.0, 1.0], dtype=dtype)
    b, dy = torch.ones_like(a), torch.ones_like(a)
    b[-2], dy[-1] = NAN, NAN
    agree(a, b, dy, function, place)


@pytest.mark.gpu
def test_long_halves_are_not_copied() -> None:
    pytest.importorskip("triton")
    a, b = torch.randn(64, 4096, device="cuda").chunk(2, -1)
    kernels.gated_forward(a, b, "silu")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = kernels.gated_forward(a, b, "silu")
    assert torch.cuda.max_memory_allocated() - before == y.nbytes
