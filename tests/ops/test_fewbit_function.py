"""Few-bit functions as ops of their own: exact forward, levels in backward, and nothing kept but codes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.ops.fewbit import fewbit_backward, fewbit_forward
from tests.functions import STOCK
from tests.models import run_everywhere

ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


def made(name: str, bits: int = 3) -> sg.FewBitFunction:
    return sg.fewbit_function(name.split()[0], bits, **STOCK[name][1])


def inputs(device: torch.device, dtype: torch.dtype = torch.float32, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape or (33, 70), generator=generator, dtype=torch.float64) * 2 for _ in range(2))
    return x.to(device, dtype).requires_grad_(), dy.to(device, dtype)


def expected_gradient(f: sg.FewBitFunction, x: Tensor, dy: Tensor) -> Tensor:
    """level * dY in double precision, the interval chosen in the precision in which kernels compare."""
    precision = torch.promote_types(x.dtype, torch.float32)
    levels = torch.tensor(f.table.levels, dtype=torch.float64, device=x.device)[f.table.codes(x.detach().to(precision))]
    return levels * dy.double()


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", STOCK)
def test_forward_is_exact_and_backward_is_the_level(name: str, dtype: torch.dtype, device: torch.device) -> None:
    f, (x, dy) = made(name), inputs(device, dtype)
    y = f(x)
    y.backward(dy)
    exact = STOCK[name][0](x.detach().cpu().double()).to(device)  # CUDA takes a sixth in single precision
    assert ((y.double() - exact).abs() <= ROUNDING[dtype] * (1 + exact.abs())).all()
    expected = expected_gradient(f, x, dy)
    tiny = torch.finfo(dtype).smallest_normal
    assert ((x.grad.double() - expected).abs() <= ROUNDING[dtype] * expected.abs() + tiny).all()


def kept(call: Callable[[], Tensor]) -> list[Tensor]:
    """Everything that is saved for backward."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return saved


@pytest.mark.parametrize("bits", range(1, 9))
def test_nothing_is_kept_but_the_bits(bits: int, device: torch.device) -> None:
    f, (x, _) = sg.fewbit_function("silu", bits), inputs(device)
    (codes,) = kept(lambda: f(x))
    assert codes.dtype == torch.uint8 and codes.nbytes == bits * 128 * math.ceil(33 * 70 / 1024)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "channels_last": lambda x: x.view(1, 33, 10, 7).to(memory_format=torch.channels_last),
    "with gaps": lambda x: x[:, ::2],
    "empty": lambda x: x[:0],
    "zero dimensions": lambda x: x[0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("name", ["gelu", "tanh"])
def test_any_layout_and_an_expanded_gradient_will_do(
    name: str, layout: Callable[[Tensor], Tensor], device: torch.device
) -> None:
    f, (x, _) = made(name), inputs(device)
    view = layout(x)
    y = f(view)
    assert y.shape == view.shape and torch.allclose(y, STOCK[name][0](view), atol=1e-6)
    y.sum().backward()
    again = x.detach().clone().requires_grad_()
    layout(again).backward(expected_gradient(f, layout(x.detach()), torch.ones_like(view)).float())
    assert torch.allclose(x.grad, again.grad, atol=1e-6)


@pytest.mark.parametrize("name", ["silu", "elu"])
def test_in_place_writes_over_its_input(name: str, device: torch.device) -> None:
    f, (x, dy) = made(name), inputs(device)
    z = x * 1.0
    y = f(z, inplace=True)
    assert y.data_ptr() == z.data_ptr() and torch.allclose(y, STOCK[name][0](x), atol=1e-6)
    y.backward(dy)
    assert torch.allclose(x.grad.double(), expected_gradient(f, x, dy), atol=1e-5)
    with pytest.raises(sg.SpecError, match="dense"):
        f((x * 1.0)[:, ::2], inplace=True)


def test_no_gradient_keeps_nothing(device: torch.device) -> None:
    f, (x, _) = made("gelu"), inputs(device)
    with torch.no_grad():
        assert torch.equal(f(x), F.gelu(x)) and not kept(lambda: f(x))
    assert not kept(lambda: f(x.detach()))


def test_a_second_order_gradient_is_refused(device: torch.device) -> None:
    f, (x, _) = made("gelu"), inputs(device)
    with pytest.raises(sg.DoubleBackwardError, match="few-bit function"):
        torch.autograd.grad(f(x).sum(), x, create_graph=True)


def test_it_works_under_autocast_and_checkpoint_and_beside_a_gate(device: torch.device) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(70, 64), nn.Linear(64, 70)
            self.act = made("gelu")

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.act(self.up(x)))

    torch.manual_seed(0)
    run, _ = run_everywhere(Block().to(device), *inputs(device))
    assert run.report().kept_after == run.report().promised


def test_a_compiler_takes_a_transformers_block_whole(device: torch.device) -> None:
    torch.manual_seed(0)
    f, up, down, norm = made("gelu"), nn.Linear(70, 64), nn.Linear(64, 70), nn.LayerNorm(70)
    nn.ModuleList([up, down, norm]).to(device)
    x, dy = inputs(device)

    def block(x: Tensor) -> Tensor:
        return x + down(f(up(norm(x))))

    results = []
    for call in (block, torch.compile(block, backend="aot_eager", fullgraph=True)):
        up.zero_grad()
        output = call(x)
        output.backward(dy)
        results.append((output.detach(), up.weight.grad.clone()))
    for plain, compiled in zip(*results, strict=True):
        assert torch.allclose(plain, compiled, atol=1e-5)


def test_its_ops_pass_torchs_own_checks() -> None:
    text = sg.fewbit_table("gelu", 3).to_json(indent=None)
    x = torch.randn(7, 20).t().requires_grad_()
    torch.library.opcheck(fewbit_forward, (x, text))
    codes = fewbit_forward(x, text)[1].detach()
    torch.library.opcheck(fewbit_backward, (codes, torch.randn(7, 20).t(), text))


def test_any_function_can_be_made_a_few_bit_one(device: torch.device) -> None:
    f, (x, dy) = sg.fewbit_function(lambda x: x * torch.exp(-x * x), 4), inputs(device)
    f(x).backward(dy)
    assert torch.allclose(x.grad.double(), expected_gradient(f, x, dy), atol=1e-5)
    with pytest.raises(sg.SpecError, match="floating-point"):
        f(torch.arange(3, device=device))
