"""Max-pool indices as bytes: the reference against torch's own pools; and narrow integers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from slimgrad.errors import SpecError
from slimgrad.kernels import Windows, narrow_int, reference, widen_int
from slimgrad.kernels.geometry import divider
from slimgrad.kernels.reference import narrow_dtype, pack_window, unpack_window
from tests.kernels.cases import POOLS, Pool


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_indices_come_back_exactly_in_shape_and_strides(pool: Pool) -> None:
    indices = pool.indices()
    codes = pack_window(indices, pool.geometry())
    assert codes.dtype == torch.uint8
    assert codes.shape == indices.shape
    assert int(codes.max()) < math.prod(pool.geometry()[1])
    back = unpack_window(codes, pool.geometry())
    assert torch.equal(back, indices)
    assert back.stride() == indices.stride()


@pytest.mark.parametrize("pool", [pool for pool in POOLS if pool.rank == 2][:40], ids=str)
def test_a_code_is_the_row_major_position_inside_the_window(pool: Pool) -> None:
    (_, width), (_, kw), (sh, sw), (ph, pw), (dh, dw) = pool.geometry()
    indices = pool.indices()
    codes = pack_window(indices, pool.geometry())
    for i, plane in enumerate(indices.flatten(0, -3)):
        for y, row in enumerate(plane.tolist()):
            for x, index in enumerate(row):
                local_y, local_x = index // width - (y * sh - ph), index % width - (x * sw - pw)
                assert codes.flatten(0, -3)[i, y, x] == local_y // dh * kw + local_x // dw


def test_indices_without_a_known_memory_order_are_packed_by_a_copy() -> None:
    indices = F.max_pool2d(torch.randn(2, 3, 10, 10), 2, return_indices=True)[1]
    odd = indices.transpose(-1, -2).contiguous().transpose(-1, -2)
    geometry = Windows((10, 10), (2, 2), (2, 2), (0, 0), (1, 1))
    assert torch.equal(pack_window(odd, geometry), pack_window(indices, geometry))


def test_chunks_leave_no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = POOLS[-1]
    whole = pack_window(pool.indices(), pool.geometry())
    monkeypatch.setattr(reference, "CHUNK", 100)
    assert torch.equal(pack_window(pool.indices(), pool.geometry()), whole)
    assert torch.equal(unpack_window(whole, pool.geometry()), pool.indices())


def test_no_indices_at_all_pack_to_no_bytes_at_all() -> None:
    geometry = Windows((10, 10), (2, 2), (2, 2), (0, 0), (1, 1))
    none = torch.zeros(0, 3, 5, 5, dtype=torch.int64)
    assert pack_window(none, geometry).shape == none.shape
    assert unpack_window(pack_window(none, geometry), geometry).shape == none.shape


@pytest.mark.parametrize(
    "geometry",
    [
        Windows((300, 300), (16, 17), (1, 1), (0, 0), (1, 1)),  # 272 positions
        Windows((2, 2), (2, 2), (1, 1), (1, 1), (3, 3)),  # torch's own index lies outside the plane here
        Windows((5, 5, 5, 5), (1,) * 4, (1,) * 4, (0,) * 4, (1,) * 4),
        Windows((5, 5), (2,), (2,), (0,), (1,)),
    ],
)
def test_a_pool_whose_positions_do_not_fit_a_byte_is_refused(geometry: Windows) -> None:
    indices = torch.zeros(1, 1, 1, 1, 1, dtype=torch.int64)
    assert not geometry.fits
    with pytest.raises(SpecError, match="cannot be packed"):
        pack_window(indices, geometry)
    with pytest.raises(SpecError, match="cannot be packed"):
        unpack_window(indices.byte(), geometry)


def test_indices_of_another_dtype_are_refused() -> None:
    with pytest.raises(SpecError, match=r"expected torch\.int64"):
        pack_window(torch.zeros(1, 1, dtype=torch.int32), Windows((4,), (2,), (2,), (0,), (1,)))


@given(size=st.integers(1, 2**30), x=st.integers(0, 2**31 - 1))
def test_a_division_is_a_multiplication_and_a_shift(size: int, x: int) -> None:
    multiplier, shift = divider(size)
    assert multiplier < 2**32
    for value in (x, x // size * size, max(0, x // size * size - 1), 2**31 - 1):
        assert value * multiplier >> (31 + shift) == value // size


@pytest.mark.parametrize(
    ("bound", "dtype"),
    [
        (1, torch.uint8),
        (256, torch.uint8),
        (257, torch.int16),
        (2**15, torch.int16),
        (2**15 + 1, torch.int32),
        (2**31, torch.int32),
        (2**31 + 1, torch.int64),
    ],
)
def test_integers_are_narrowed_as_far_as_their_bound_allows(bound: int, dtype: torch.dtype) -> None:
    values = torch.tensor([[0, bound // 2, bound - 1]])
    narrow = narrow_int(values, bound)
    assert narrow.dtype == dtype == narrow_dtype(bound)
    assert narrow.data_ptr() != values.data_ptr()
    assert torch.equal(widen_int(narrow), values)


def test_narrowing_keeps_the_strides() -> None:
    indices = POOLS[-1].indices()
    assert narrow_int(indices, 33 * 31).stride() == indices.stride()


def test_only_int64_is_narrowed() -> None:
    with pytest.raises(SpecError, match="expected int64"):
        narrow_int(torch.zeros(3), 4)


def test_the_largest_plane_that_is_divided_in_floats_is_exact() -> None:
    size = (2048, 2048)  # 2**22 cells
    pool = Windows(size, (3, 3), (2, 2), (1, 1), (1, 1))
    _, indices = F.max_pool2d(torch.rand(1, 1, *size), 3, 2, 1, return_indices=True)
    assert torch.equal(reference.unpack_window(reference.pack_window(indices, pool), pool), indices)


def test_an_index_outside_its_window_is_taken_for_index_zero() -> None:
    pool = Windows((8, 8), (2, 2), (2, 2), (0, 0), (1, 1))
    _, indices = F.max_pool2d(torch.rand(1, 1, 8, 8), 2, return_indices=True)
    indices[0, 0, 3, 3] = 0
    codes = reference.pack_window(indices, pool)
    assert codes[0, 0, 3, 3] == 255
    assert torch.equal(reference.unpack_window(codes, pool), indices)
