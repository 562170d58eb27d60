"""Steps behind the unpacking of groups: Triton against the reference; see test_twins.py for where this runs."""

from __future__ import annotations

import pytest
import torch

from slimgrad import kernels
from slimgrad.kernels import Groups, Layout
from slimgrad.kernels.chains import DERIVATIVES
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["plain", "some wild", "one NaN"])
@pytest.mark.parametrize("function", DERIVATIVES)
def test_a_function_that_packs_what_it_is_given(
    place: torch.device, function: str, kind: str, dtype: torch.dtype
) -> None:
    """The very bits of packing alone, the same values as without it, and in place as well."""
    torch.manual_seed(0)
    x = 2 * torch.randn(3001)
    x[700] = float("nan") if kind == "one NaN" else 1.0
    x[5::997] = float("inf") if kind == "some wild" else 1.0
    x, dy = x.to(dtype), torch.randn(3001).to(dtype)
    how, layout = Groups(4, 128), Layout.of(x)
    own = kernels.grouped_fusion(layout, how, function)
    other = kernels.grouped_fusion(layout._replace(device=place), how, function, force="triton")
    y, packed = own.forward(x, None)
    found, bits = other.forward(x.to(place), None)
    assert torch.equal(bits.cpu(), packed) and torch.equal(packed, kernels.pack_groups(x, how))
    over, again = x.to(place, copy=True), {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4e-6, "equal_nan": True}
    assert other.forward(over, over)[0] is over and torch.equal(over.nan_to_num(), found.nan_to_num())
    known = ~x.isinf()  # some of torch's own kernels have no GELU there
    torch.testing.assert_close(found.cpu()[known], y[known], **again)
    value, dx = other.value(bits).cpu(), other.backward(bits, dy.to(place)).cpu()
    torch.testing.assert_close(value[known], own.value(packed)[known], **again)
    torch.testing.assert_close(dx[known], own.backward(packed, dy)[known], **again)


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
