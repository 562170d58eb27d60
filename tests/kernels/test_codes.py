"""Few-bit codes: the reference against plain Python."""

from __future__ import annotations

import math

import pytest
import torch

from slimgrad.errors import SpecError
from slimgrad.kernels import Buckets, pack_codes, unpack_codes
from tests.kernels.cases import buckets, sample

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def code(x: float, table: Buckets) -> int:
    at = abs(x - table.centre) if table.absolute else x
    return len(table.borders) if math.isnan(at) else sum(border < at for border in table.borders)


@pytest.mark.parametrize("n", [0, 1, 7, 8, 65, 1000])
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_count_the_borders_below_and_take_exactly_as_many_bits(bits: int, absolute: bool, n: int) -> None:
    table, x = buckets(bits, absolute=absolute), sample(n, torch.float32)
    packed = pack_codes(x, table)
    assert packed.numel() == bits * 128 * math.ceil(n / 1024) < math.ceil(n * bits / 8) + bits * 128
    found = unpack_codes(packed, (n,), (1,), table, torch.float32)
    narrow = Buckets(tuple(torch.tensor(table.borders).tolist()), table.values, table.centre, absolute)
    assert found.tolist() == [code(value, narrow) for value in x.tolist()]


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_come_back_in_the_tensors_dtype_and_layout(dtype: torch.dtype) -> None:
    table = Buckets((-0.5, 0.0, 0.5), (-0.3, 1 / 3, 0.1, 1.1))
    x = torch.randn(4, 6, 5, 3, dtype=torch.float64).to(dtype).to(memory_format=torch.channels_last)
    found = unpack_codes(pack_codes(x, table), x.shape, x.stride(), table, dtype)
    assert found.dtype == dtype and found.stride() == x.stride()
    values = torch.tensor(table.values, dtype=torch.float64).to(dtype)
    assert torch.equal(found, values[torch.bucketize(x.double(), torch.tensor(table.borders, dtype=torch.float64))])


def test_an_element_on_a_border_belongs_below_it() -> None:
    table = Buckets((0.0,), (1.0, 2.0))
    x = torch.tensor([-0.0, 0.0, 1e-45, -1e-45, float("inf"), float("-inf"), float("nan")])
    found = unpack_codes(pack_codes(x, table), x.shape, (1,), table, torch.float32)
    assert found.tolist() == [1.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0]


def test_large_tensors_are_treated_in_chunks_with_the_same_codes() -> None:
    table, x = buckets(3), torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    found = unpack_codes(pack_codes(x, table), x.shape, (1,), table, x.dtype)
    assert torch.equal(found, torch.bucketize(x, torch.tensor(table.borders)).float())


def test_bad_input_is_refused() -> None:
    table = buckets(2)
    with pytest.raises(SpecError, match="dense"):
        pack_codes(torch.randn(6, 10)[:, ::2], table)
    with pytest.raises(SpecError, match="floating-point"):
        pack_codes(torch.arange(6), table)
    with pytest.raises(SpecError, match="256 contiguous bytes"):
        unpack_codes(torch.zeros(7, dtype=torch.uint8), (6,), (1,), table, torch.float32)
    with pytest.raises(SpecError, match="one border fewer"):
        Buckets((0.0,), (1.0, 2.0, 3.0))
    with pytest.raises(SpecError, match="rise"):
        Buckets((0.0, 0.0, 1.0), (1.0, 2.0, 3.0, 4.0))
