"""Gated units as ops of their own: exact both ways, and nothing kept but a and b."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.kernels.reference_gated import FUNCTIONS
from slimgrad.ops import gated_function
from slimgrad.ops.gated import gated_backward, gated_forward
from tests.models import run_everywhere

ROUNDING = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half a step between numbers, for one rounding of a result; float32 itself computes with a few of them."""

STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "sigmoid": torch.sigmoid,
}

Operands = tuple[Tensor, Tensor, Tensor]


def operands(device: torch.device, dtype: torch.dtype = torch.float32) -> Operands:
    """a and b, which need gradients, and dY."""
    generator = torch.Generator().manual_seed(0)
    a, b, dy = (torch.randn(33, 70, generator=generator, dtype=torch.float64) * 2 for _ in range(3))
    return a.to(device, dtype).requires_grad_(), b.to(device, dtype).requires_grad_(), dy.to(device, dtype)


def exact(name: str, a: Tensor, b: Tensor, dy: Tensor) -> Operands:
    """The result and both gradients by autograd in double precision, on the CPU: CUDA takes a sixth in single."""
    a, b = (t.detach().cpu().double().requires_grad_() for t in (a, b))
    y = STOCK[name](a) * b
    return (y.detach(), *torch.autograd.grad(y, (a, b), dy.cpu().double()))


def near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """To the rounding of `dtype`; near zero, to that of float32 at the size of dY * b, which reaches 40."""
    bound = (ROUNDING[dtype] + 2e-6) * expected.abs() + 2e-5 if dtype != torch.float64 else ROUNDING[dtype] * 10
    return bool(((found.detach().cpu().double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", STOCK)
def test_results_and_gradients_are_exact_to_one_rounding(name: str, dtype: torch.dtype, device: torch.device) -> None:
    a, b, dy = operands(device, dtype)
    y = gated_function(name)(a, b)
    assert y.dtype == dtype
    gradients = torch.autograd.grad(y, (a, b), dy)
    for found, expected in zip((y, *gradients), exact(name, a, b, dy), strict=True):
        assert near(found, expected, dtype)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("name", STOCK)
def test_forward_equals_stock_but_for_its_roundings(name: str, dtype: torch.dtype, device: torch.device) -> None:
    a, b, _ = operands(device, dtype)
    stock = STOCK[name](a) * b  # up to four roundings: of 1.702 x, of its logistic function, of f, of the product
    difference = (gated_function(name)(a, b) - stock).double().abs()
    # 1.702 x moves by its own rounding, and x * logistic by less than x times that
    assert (difference <= 12 * ROUNDING[dtype] * (stock.double().abs() + b.double().abs())).all()


def test_every_function_is_tested() -> None:
    assert STOCK.keys() == FUNCTIONS.keys()


def kept(call: Callable[[], Tensor]) -> list[Tensor]:
    """Everything that is saved for backward."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        call()
    return saved


def storages(*tensors: Tensor) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("name", STOCK)
def test_nothing_is_kept_but_a_and_b(name: str, device: torch.device) -> None:
    a, b, _ = operands(device)
    assert storages(*kept(lambda: gated_function(name)(a, b))) == storages(a, b)
    stock = sum(storages(*kept(lambda: STOCK[name](a) * b)).values())
    assert stock > a.nbytes + b.nbytes or name == "sigmoid"  # whose slope stock PyTorch computes from its value


def test_of_a_projection_in_halves_nothing_is_kept_but_the_projection(device: torch.device) -> None:
    x = torch.randn(5, 2080, device=device, requires_grad=True)
    assert storages(*kept(lambda: gated_function("silu")(*x.chunk(2, -1)))) == storages(x)


def test_without_gradients_nothing_is_kept(device: torch.device) -> None:
    f, (a, b, _) = gated_function("gelu"), operands(device)
    expected = f(a, b).detach()
    with torch.no_grad():
        assert torch.equal(f(a, b), expected) and not kept(lambda: f(a, b))
    assert not kept(lambda: f(a.detach(), b.detach()))


@pytest.mark.parametrize("needing", [0, 1])
def test_one_operand_alone_may_need_a_gradient(needing: int, device: torch.device) -> None:
    a, b, dy = operands(device)
    pair = [a.detach(), b.detach()]
    pair[needing].requires_grad_()
    gated_function("silu")(*pair).backward(dy)
    assert near(pair[needing].grad, exact("silu", a, b, dy)[1 + needing], torch.float32)
    assert pair[1 - needing].grad is None


LAYOUTS: dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {
    "transposed": lambda x: x.t().chunk(2, 0),
    "halves": lambda x: x.chunk(2, -1),
    "halves of a block": lambda x: x.view(4, 8, -1).chunk(2, -1),
    "channels_last": lambda x: x.view(2, 16, 10, -1).to(memory_format=torch.channels_last).chunk(2, 0),
    "with gaps": lambda x: (x[:, ::2], x[:, 1::2]),
    "of two orders": lambda x: (x[:16, :16], x[16:, :16].t()),
    "expanded": lambda x: (x[:1].expand_as(x), x),
    "empty": lambda x: x[:0].chunk(2, -1),
    "zero dimensions": lambda x: (x[0, 0], x[1, 1]),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_any_layout_and_an_expanded_gradient_will_do(
    layout: Callable[[Tensor], tuple[Tensor, Tensor]], device: torch.device
) -> None:
    x = torch.randn(32, 1280, generator=torch.Generator().manual_seed(0)).to(device).requires_grad_()
    again = x.detach().clone().requires_grad_()
    y, stock = gated_function("gelu")(*layout(x)), STOCK["gelu"](layout(again)[0]) * layout(again)[1]
    assert y.shape == stock.shape and torch.allclose(y, stock, atol=1e-5)
    y.sum().backward()
    stock.sum().backward()
    assert torch.allclose(x.grad, again.grad, atol=1e-5)


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t(), lambda x: x.view(33, 10, 7).transpose(0, 1)])
def test_the_result_lies_in_memory_as_a_does(view: Callable[[Tensor], Tensor], device: torch.device) -> None:
    a, b, _ = operands(device)
    assert gated_function("silu")(view(a), view(b).contiguous()).stride() == view(a).stride()


class Block(nn.Module):
    """A feed-forward layer with a gate, as language models have them."""

    def __init__(self, gate: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(70, 128), nn.Linear(64, 70)
        self.gate = gate

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.up(x).chunk(2, -1)
        return self.down(self.gate(a, b))


def made(device: torch.device) -> Block:
    torch.manual_seed(0)
    return Block(gated_function("silu")).to(device)


def test_it_works_under_autocast_and_checkpoint_and_beside_a_gate(device: torch.device) -> None:
    x, _, dy = operands(device)
    run, outputs = run_everywhere(made(device), x, dy)
    assert all(output.dtype == torch.bfloat16 for output in outputs)
    assert run.report().kept_after == run.report().promised


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_compiler_takes_a_block_whole(dynamic: bool, device: torch.device) -> None:
    block, (x, _, dy) = made(device), operands(device)
    results = []
    for call in (block, torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)):
        block.zero_grad()
        x.grad = None
        output = call(x)
        output.backward(dy)
        results.append((output.detach(), x.grad.clone(), block.up.weight.grad.clone()))
    for plain, compiled in zip(*results, strict=True):
        assert torch.allclose(plain, compiled, atol=1e-5)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "halves", "with gaps"])
def test_its_ops_pass_torchs_own_checks(layout: str) -> None:
    whole = torch.randn(20, 14)
    a, b = {"contiguous": lambda x: (x, x + 1), **LAYOUTS}[layout](whole)
    dy = torch.randn(a.shape)
    torch.library.opcheck(gated_forward, (a.detach().requires_grad_(), b.detach().requires_grad_(), "gelu"))
    torch.library.opcheck(gated_backward, (a, b, dy, "gelu"))


def test_a_second_order_gradient_is_refused(device: torch.device) -> None:
    a, b, _ = operands(device)
    with pytest.raises(sg.DoubleBackwardError, match="gated unit"):
        torch.autograd.grad(gated_function("silu")(a, b).sum(), a, create_graph=True)


def test_an_operand_that_is_changed_before_backward_is_reported(device: torch.device) -> None:
    a, b, _ = operands(device)
    b = b * 1.0
    y = gated_function("silu")(a, b)
    b.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_what_does_not_fit_is_refused_by_name() -> None:
    f, a = gated_function("silu"), torch.randn(3, 4)
    with pytest.raises(sg.SpecError, match=r"expected one of silu, .*found 'relu'"):
        gated_function("relu")
    with pytest.raises(sg.SpecError, match=r"found \(3, 4\) .* and \(4,\)"):
        f(a, a[0])
    with pytest.raises(sg.SpecError, match=r"found \(3, 4\) torch.float32 .* and \(3, 4\) torch.bfloat16"):
        f(a, a.bfloat16())
    with pytest.raises(sg.SpecError, match=r"floating-point tensors, found a of torch.int64"):
        f(torch.arange(3), torch.arange(3))
    with pytest.raises(sg.SpecError, match=r"on cpu and .* on meta"):
        f(a, a.to("meta"))
    assert repr(f) == "gated_function('silu')"
