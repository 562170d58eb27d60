"""The strongest blocks: Triton against the reference. See test_twins.py for where these run.

Data are small integers, whose sums are exact: so norms, and with them the selection, agree bit for bit.
"""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.kernels import Grid, Layout, reference_blocks
from slimgrad.kernels.blocks import LAYOUTS, NORMS
from slimgrad.kernels.geometry import feature_dim
from slimgrad.kernels.twins import twin

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
PLACES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]
# The interpreter multiplies the bits of bfloat16 as if they were integers.
DTYPES = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
SHAPES: dict[str, tuple[int, ...]] = {
    "whole blocks": (256, 128),
    "ragged": (203, 100),
    "one row of blocks": (7, 60),
    "leading dimensions": (3, 50, 44),
    "images": (4, 24, 9, 11),
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> torch.device:
    pytest.importorskip("triton")
    return torch.device(request.param)


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def matrix(x: Tensor) -> Tensor:
    return x.movedim(feature_dim(x.dim()), -1).flatten(0, -2)


def check(x: Tensor, grid: Grid, place: torch.device) -> None:
    expected = kernels.keep_blocks(x, grid, force="torch")
    found = kernels.keep_blocks(x.to(place), grid, force="triton")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(found, expected, strict=True))
    layout = (x.shape, x.stride(), grid)
    back = kernels.put_blocks_back(*found[:2], *layout, *found[2:], force="triton")
    assert back.stride() == x.stride()
    assert torch.equal(back.cpu(), kernels.put_blocks_back(*expected[:2], *layout, *expected[2:], force="torch"))
    for outputs in (40, 37):  # with and without the tensor memory accelerator
        dy = numbers((grid.rows, outputs), x.dtype)
        for turned in (False, True):
            how = {"turned": turned, "force": "triton"}
            dw = kernels.block_product(*found[:2], dy.to(place), grid, *found[2:], **how).cpu()
            exact = dy.t().double() @ matrix(back.cpu()).double()
            exact = exact.t() if turned else exact
            if grid.group or grid.unbiased:  # a second product is added, after a rounding; values are not integers
                assert torch.allclose(dw.double(), exact, rtol=4 * torch.finfo(x.dtype).eps, atol=0.1)
            else:
                assert torch.equal(dw, exact.to(x.dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_kept_blocks_and_products_agree(
    shape: tuple[int, ...], dtype: torch.dtype, layout: str, place: torch.device
) -> None:
    check(numbers(shape, dtype), Grid.of(shape, 0.4, (32, 16), layout, "l1"), place)


@pytest.mark.parametrize("block", [(16, 16), (64, 64), (64, 128), (128, 32), (128, 128)], ids=str)
@pytest.mark.parametrize("keep", [0.1, 1.0])
def test_every_size_of_block(block: tuple[int, int], keep: float, place: torch.device) -> None:
    check(numbers((700, 270), torch.float16), Grid.of((700, 270), keep, block, "balanced", "l1"), place)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("group", [2, 16, 32])
def test_means_of_what_is_dropped(group: int, shape: tuple[int, ...], layout: str, place: torch.device) -> None:
    """Sums of 2, 16 or 32 small integers, of 11 or of 18 at the end: their means round alike."""
    x = numbers(shape, torch.float32)
    check(x, Grid.of(shape, 0.4, (32, 16), layout, "l1", group), place)


@pytest.mark.parametrize("block", [(16, 16), (64, 128)], ids=str)
@pytest.mark.parametrize("sample", [2, 8])
def test_norms_of_some_rows(sample: int, block: tuple[int, int], place: torch.device) -> None:
    x = numbers((700, 270), torch.float32)
    check(x, Grid.of(x.shape, 0.3, block, "balanced", "l1", sample=sample), place)


def of_all_strengths(shape: tuple[int, ...]) -> Tensor:
    """Integers that are larger in some places, so that some blocks are certain to be drawn."""
    x = numbers(shape, torch.float32)
    return x * (torch.arange(x.numel()).view(shape) // 97 % 5 * 2)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("sample", "keep"), [(1, 0.4), (4, 0.1), (1, 1.0)])
def test_drawn_blocks(sample: int, keep: float, shape: tuple[int, ...], layout: str, place: torch.device) -> None:
    grid = Grid.of(shape, keep, (32, 16), layout, "l1", sample=sample, unbiased=True)
    check(of_all_strengths(shape), grid, place)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rows", [0, 40, 100])
def test_drawn_blocks_where_few_have_anything_in_them(rows: int, layout: str, place: torch.device) -> None:
    x = numbers((203, 100), torch.float32)
    x[rows:] = 0
    check(x, Grid.of(x.shape, 0.7, (32, 16), layout, "l1", unbiased=True), place)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize(("group", "norm"), [(0, "l2"), (16, "l1"), (32, "l2")])
def test_drawn_blocks_of_norms_that_are_no_integers(
    group: int, norm: str, shape: tuple[int, ...], place: torch.device
) -> None:
    """Sums depend on their order here, so the reference draws by the norms that the kernel found."""
    x = of_all_strengths(shape)
    grid = Grid.of(shape, 0.4, (32, 16), "balanced", norm, group, unbiased=True)
    there = x.to(place)
    norms, means = twin("blocking", place, "triton").packer(Layout.of(there), grid).strengths(there)
    assert torch.allclose(norms.cpu(), reference_blocks.strengths(x, grid)[0], rtol=1e-5)
    chosen = reference_blocks.select(norms.cpu(), grid)
    expected = reference_blocks.gather_blocks(x, chosen, grid, means.cpu() if group else None)
    found = kernels.keep_blocks(there, grid, force="triton")
    assert torch.equal(found[1].cpu(), expected[1])
    assert torch.allclose(found[0].cpu(), expected[0], rtol=1e-3)
    back = kernels.put_blocks_back(*found[:2], x.shape, x.stride(), grid, *found[2:], force="triton")
    whole = reference_blocks.put_blocks_back(*expected[:2], x.shape, x.stride(), grid, *expected[2:])
    assert torch.allclose(back.cpu(), whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("norm", NORMS)
def test_both_norms_and_ties(norm: str, place: torch.device) -> None:
    x = numbers((512, 64), torch.float32).sign()
    check(x, Grid.of(x.shape, 0.3, (16, 16), "balanced", norm), place)
    check(torch.ones(512, 64), Grid.of((512, 64), 0.3, (16, 16), "bsr", norm), place)


LAYOUTS_IN_MEMORY = {
    "channels_last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "permuted": lambda x: x.permute(2, 0, 3, 1),
}


@pytest.mark.parametrize("lay", LAYOUTS_IN_MEMORY.values(), ids=LAYOUTS_IN_MEMORY.keys())
def test_however_a_tensor_lies_in_memory(lay, place: torch.device) -> None:
    x = lay(numbers((4, 20, 6, 10), torch.float32))
    check(x, Grid.of(x.shape, 0.5, (16, 16), "balanced", "l1"), place)


def test_a_nan_is_stronger_than_all(place: torch.device) -> None:
    x = numbers((512, 16), torch.float32)
    x[300, 3] = float("nan")
    grid = Grid.of(x.shape, 1 / 32, (16, 16), "balanced", "l1")
    for force, where in (("torch", torch.device("cpu")), ("triton", place)):
        assert kernels.keep_blocks(x.to(where), grid, force=force)[1].tolist() == [300 // 16]


def test_more_rows_than_one_program_has_room_for(place: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    module = twin("blocking", place, "triton")
    monkeypatch.setattr(module, "MOST_DOWN", 8)
    module.packer.cache_clear()
    check(numbers((400, 32), torch.float32), Grid.of((400, 32), 0.3, (16, 16), "balanced", "l1"), place)
    module.packer.cache_clear()


def test_a_product_split_among_programs_gives_the_same_bits_every_time(place: torch.device) -> None:
    x, dy = torch.randn(4096, 32), torch.randn(4096, 48)
    grid = Grid.of(x.shape, 0.9, (16, 32), "balanced", "l2")
    values, index = kernels.keep_blocks(x.to(place), grid, force="triton")
    module = twin("blocking", place, "triton")
    assert module.tiling(grid, 48, 4, place).splits > 1
    first, second = (kernels.block_product(values, index, dy.to(place), grid, force="triton") for _ in range(2))
    assert torch.equal(first, second)
    back = kernels.put_blocks_back(values, index, x.shape, x.stride(), grid, force="triton").cpu()
    assert torch.allclose(first.cpu().double(), dy.double().t() @ back.double(), rtol=1e-4, atol=1e-3)
