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
    layout = Layout(torch.Size((case.n,)), (1,), dtype, values.device)
    found = kernels.unpack_chain(packed, case.chain, operands, layout)
    assert found.dtype is dtype
    torch.testing.assert_close(found, case.expected(values, operands).to(dtype), rtol=1e-2, atol=1e-6)


LAYOUT = Layout(torch.Size((4, 64)), (64, 1), torch.float32, torch.device("cpu"))
PACKED = kernels.pack_groups(torch.randn(256), Groups(4, 128))
FOUR = Groups(4, 128)


@pytest.mark.parametrize(
    ("chain", "operands"),
    [
        (Chain(FOUR, (Step("pow", "spread", 64),)), [torch.ones(4)]),
        (Chain(FOUR, (Step("gelu", "spread", 64),)), [torch.ones(4)]),
        (Chain(FOUR, (Step("add"),)), []),
        (Chain(FOUR, (Step("silu"),) * 5), []),
        (Chain(FOUR, (Step("add", "spread", 64),)), []),
        (Chain(FOUR, (Step("add", "spread", 64),)), [torch.ones(5)]),
        (Chain(FOUR, (Step("add", "spread"),)), [torch.ones(4)]),
        (Chain(FOUR, (Step("add", "spread", 60),)), [torch.ones(4)]),
        (Chain(FOUR, (Step("add", "spread", 32, 3),)), [torch.ones(3)]),
        (Chain(FOUR, (Step("add", "same"),)), [torch.ones(512)[::2]]),
        (Chain(FOUR, (Step("add", "packed"),)), [torch.ones(256)]),
        (Chain(Groups(8, 128), ()), []),
    ],
)
def test_what_no_chain_can_be_is_refused(chain: Chain, operands: list[torch.Tensor]) -> None:
    with pytest.raises(sg.SpecError, match="unpack_"):
        kernels.unpack_chain(PACKED, chain, operands, LAYOUT)
