"""Few-bit derivatives through the gate: any call of a pointwise function, exactly the levels of its table."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimgrad as sg
from tests.functions import STOCK, Stock
from tests.zoo import ZOO, Entry, fresh, gradients, relative_error

COMPOSITE = ("quick_gelu", "softsign", "tanhshrink")
FUNCTIONS: dict[str, Stock] = {
    **{name: pair for name, pair in STOCK.items() if name not in (*COMPOSITE, "logsigmoid")},
    "silu inplace": (lambda x: F.silu(x, inplace=True), {}),
    "elu inplace": (lambda x: F.elu(x, alpha=0.5, inplace=True), {"alpha": 0.5}),
}
"""Those that are one node to autograd; the log-sigmoid has a test of its own."""
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
"""Representatives are rounded to the dtype, and so is the slope that torch finds from them."""


class Pointwise(nn.Module):
    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.f = f

    def forward(self, x: Tensor) -> Tensor:
        return self.f(x * 1.0) * 1.0  # what f returns is nobody else's, and what it is given neither


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_gradient_is_the_level_times_what_comes_in(
    name: str, dtype: torch.dtype, bits: int, device: torch.device
) -> None:
    f, parameters = FUNCTIONS[name]
    model, codec = Pointwise(f), sg.FewBit(bits=bits)
    run = sg.apply(model, codec, min_bytes=64)
    table = codec.table(name.split()[0], **parameters)
    for seed in range(3):  # watched, counted, worked
        torch.manual_seed(seed)
        x = (torch.randn(64, 33, device=device, dtype=torch.float64) * 2).to(dtype).requires_grad_()
        incoming = torch.randn(64, 33, device=device, dtype=torch.float64).to(dtype)
        output = model(x)
        assert torch.equal(output, f(x.detach() * 1.0)), "forward is exact"
        output.backward(incoming)
        expected = table.slope(x.detach().double()) * incoming.double()
        wrong = (x.grad.double() - expected).abs() > TOLERANCE[dtype] * 1.1 * incoming.double().abs() + 1e-6
        assert not (wrong & ~near_a_border(x.detach(), table, f)).any()
    report = run.report()
    assert report.kept_after == report.promised == bits * 128 * 3, report  # three tiles of 1024 elements


def near_a_border(x: Tensor, table: sg.Table, f: Callable[[Tensor], Tensor]) -> Tensor:
    """There either level is right: borders are compared in the tensor's precision, some by f(x), which is rounded."""
    rounding = 2.0**-7 if x.itemsize == 2 else 1e-4
    borders = torch.tensor(table.borders, dtype=torch.float64, device=x.device)
    at = x.double().abs() if table.even else x.double()
    by_x = (at[..., None] - borders).abs() <= rounding * at[..., None].abs() + 1e-4
    by_result = (f(at.clone())[..., None] - f(borders.clone())).abs() <= rounding
    return (by_x | (by_result if table.even or x.itemsize == 2 else by_x)).any(-1)


def test_log_sigmoid_is_served_where_its_node_reads_x(device: torch.device) -> None:
    model = Pointwise(F.logsigmoid)
    run = sg.apply(model, sg.FewBit(bits=3), min_bytes=64)
    x = torch.randn(64, 32, device=device, requires_grad=True)
    model(x).sum().backward()
    # A CPU's node finds f' from a buffer and reads the sign of x, so nothing is packed there.
    assert [site.codec[:6] for site in run.report().sites] == (["FewBit"] if device.type == "cuda" else [])
    expected = sg.fewbit_table("logsigmoid", 3).slope(x.detach()) if device.type == "cuda" else torch.sigmoid(-x)
    assert torch.allclose(x.grad, expected, atol=1e-5)


TRANSFORMERS = [entry for entry in ZOO if entry.name in ("hf-bert", "hf-gpt2", "hf-vit", "hf-llama")]


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("entry", TRANSFORMERS, ids=str)
def test_many_bits_keep_the_gradients_of_real_models_close(
    entry: Entry, autocast: torch.dtype | None, device: torch.device
) -> None:
    plain = fresh(entry, device)
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, sg.FewBit(bits=6), min_bytes=1024)
    for seed in range(3):
        expected = gradients(entry, plain, device, autocast=autocast, seed=seed)
        found = gradients(entry, treated, device, autocast=autocast, seed=seed)
        error = relative_error(expected, found)
        assert error <= 0.05, f"seed {seed}: {error:.3f}"
    report = run.report()
    assert report.kept_after == report.promised
    assert any("FewBit" in site.codec for site in report.sites)


def test_rules_give_derivatives_to_fewbit_and_the_rest_to_quant() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    run = sg.apply(model, "fewbit(bits=3); quant(bits=4); lossless()", min_bytes=256)
    model(torch.randn(128, 64)).sum().backward()
    codecs = {site.site.node: site.codec.split("(")[0] for site in run.report().sites}
    assert codecs["GeluBackward0"] == "FewBit" and codecs["AddmmBackward0"] == "Quant"


def test_another_function_than_the_one_learnt_is_an_error_not_a_wrong_gradient() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU())
    sg.apply(model, sg.FewBit(bits=3, fused=False), min_bytes=64)
    x = torch.randn(64, 32)
    for _ in range(2):
        model(x).sum().backward()
    model[1].approximate = "tanh"
    output = model(x)
    with pytest.raises(sg.SiteChangedError, match="tanh"):
        output.sum().backward()


def test_a_second_order_gradient_is_refused() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh())
    sg.apply(model, sg.FewBit(bits=3, fused=False), min_bytes=64)
    x = torch.randn(64, 32, requires_grad=True)
    model(x).sum().backward()
    with pytest.raises(sg.DoubleBackwardError, match="FewBit"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_function_with_more_jumps_than_borders_is_not_served() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Hardswish())
    sg.apply(model, [sg.Rule(nn.Hardswish, sg.FewBit(bits=1))], min_bytes=64)
    with pytest.raises(sg.RuleError, match="cannot serve"):
        model(torch.randn(64, 32))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bits": 0}, "bits"),
        ({"bits": 3.0}, "bits"),
        ({"interval": (1, 1)}, "interval"),
        ({"interval": 3}, "interval"),
        ({"weight": "x"}, "weight"),
        ({"fused": 1}, "fused"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(sg.SpecError, match=message):
        sg.FewBit(**settings)


def test_it_round_trips_through_json() -> None:
    codec = sg.FewBit(bits=2, interval=(-6.0, 6.0), weight="normal", fused=False)
    assert sg.FewBit.from_json(codec.to_json()) == codec
    assert repr(codec) == "FewBit(bits=2, interval=(-6.0, 6.0), weight='normal', fused=False)"
