"""Chains: elementwise steps behind the unpacking of groups equal the same steps on what is unpacked."""

from __future__ import annotations

import pytest
import torch

import slimgrad as sg
from slimgrad import kernels
from slimgrad.kernels import Chain, Groups, Layout, Step
from tests.kernels.cases import CHAINS, ChainCase


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CHAINS, ids=str)
def test_steps_are_those_of_torch_on_what_is_unpacked(case: ChainCase, dtype: torch.dtype) -> None:
    values, packed, operands = case.made()
    layout = Layout(torch.Size((case.rows, case.inner)), (case.inner, 1), dtype, values.device)
    found = kernels.unpack_chain(packed, case.chain, operands, layout)
    assert found.dtype is dtype
    torch.testing.assert_close(found, case.expected(values, operands).to(dtype), rtol=1e-2, atol=1e-6)


LAYOUT = Layout(torch.Size((4, 64)), (64, 1), torch.float32, torch.device("cpu"))
PACKED = kernels.pack_groups(torch.randn(256), Groups(4, 128))


@pytest.mark.parametrize(
    ("chain", "operands"),
    [
        (Chain(Groups(4, 128), (Step("pow", "row"),), 64), [torch.ones(4)]),
        (Chain(Groups(4, 128), (Step("gelu", "row"),), 64), [torch.ones(4)]),
        (Chain(Groups(4, 128), (Step("add"),), 64), []),
        (Chain(Groups(4, 128), (Step("silu"),) * 5, 64), []),
        (Chain(Groups(4, 128), (Step("add", "row"),), 64), []),
        (Chain(Groups(4, 128), (Step("add", "row"),), 64), [torch.ones(5)]),
        (Chain(Groups(4, 128), (Step("add", "same"),), 64), [torch.ones(64, 4).t()]),
        (Chain(Groups(4, 128), (Step("add", "packed"),), 64), [torch.ones(256)]),
        (Chain(Groups(4, 128), (Step("add", "row"),), 60), [torch.ones(4)]),
        (Chain(Groups(4, 128), (Step("add", "row"),), 512), [torch.ones(1)]),
        (Chain(Groups(8, 128), (), 64), []),
    ],
)
def test_what_no_chain_can_be_is_refused(chain: Chain, operands: list[torch.Tensor]) -> None:
    with pytest.raises(sg.SpecError, match="unpack_"):
        kernels.unpack_chain(PACKED, chain, operands, LAYOUT)
