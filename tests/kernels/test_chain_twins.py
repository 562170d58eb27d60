"""Steps behind the unpacking of groups: Triton against the reference; see test_twins.py for where this runs."""

from __future__ import annotations

import pytest
import torch

from slimgrad import kernels
from slimgrad.kernels import Layout
from tests.kernels.cases import CHAINS, ChainCase
from tests.kernels.test_twins import place

__all__ = ["place"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CHAINS, ids=str)
def test_chains_make_the_same_numbers(place: torch.device, case: ChainCase, dtype: torch.dtype) -> None:
    _, packed, operands = case.made()
    layout = Layout(torch.Size((case.n,)), (1,), dtype, torch.device("cpu"))
    expected = kernels.unpack_chain(packed, case.chain, operands, layout)
    there = layout._replace(device=place)
    given = [operand.to(place) for operand in operands]
    found = kernels.unpack_chain(packed.to(place), case.chain, given, there, force="triton")
    assert found.dtype is dtype and found.shape == expected.shape
    torch.testing.assert_close(found.cpu(), expected, rtol=2 * torch.finfo(dtype).eps, atol=2e-6)


def test_operands_that_begin_anywhere_in_memory_are_read_the_same(place: torch.device) -> None:
    case = CHAINS[0]
    _, packed, operands = case.made()
    layout = Layout(torch.Size((case.n,)), (1,), torch.float32, place)
    aligned = [operand.to(place) for operand in operands]
    shifted = [torch.cat([operand.new_zeros(1), operand])[1:] for operand in aligned]
    for _ in range(2):
        one, other = (
            kernels.unpack_chain(packed.to(place), case.chain, given, layout, force="triton")
            for given in (aligned, shifted)
        )
        assert torch.equal(one, other)
