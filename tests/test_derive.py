"""Derive: what is made again in backward has the very same bits, wherever its sources are kept exactly."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.runtime import derivations
from slimgrad.runtime.derivations import Derivation, Handle
from tests.zoo import ZOO, Entry, assert_same_gradients, fresh, gradients, relative_error

DTYPES = pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
ENTRIES = pytest.mark.parametrize("entry", ZOO, ids=str)
SMALL = 4096


@DTYPES
@ENTRIES
def test_every_gradient_of_the_zoo_is_bit_equal_under_derive(
    entry: Entry, autocast: torch.dtype | None, device: torch.device
) -> None:
    plain = fresh(entry, device)
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, sg.Derive(), min_bytes=SMALL)
    for seed in range(3):  # watched, counted, worked
        expected = gradients(entry, plain, device, autocast=autocast, seed=seed)
        assert_same_gradients(expected, gradients(entry, treated, device, autocast=autocast, seed=seed))
    report = run.report()
    assert report.kept_after == report.promised, report
    assert not [note for note in report.notes if "differently" in note]


class Dropped(nn.Module):
    """A dropout by its own op, whatever its probability."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.last, self.p = nn.Linear(64, 64), nn.Linear(64, 64), p

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.native_dropout(F.gelu(self.first(x)), self.p, True)[0])


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_a_dropout_of_any_probability_leaves_gradients_as_they_were(p: float) -> None:
    plain = Dropped(p)
    treated = copy.deepcopy(plain)
    sg.apply(treated, sg.Derive(), min_bytes=SMALL)
    x = torch.randn(64, 64)
    for seed in range(3):
        for model in (plain, treated):
            model.zero_grad()
            torch.manual_seed(seed)
            model(x).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), treated.parameters(), strict=True))


LEAST_SAVED = {"resnet": 0.2, "hf-vit": 0.25, "hf-llama": 0.25, "hf-bert": 0.15, "hf-resnet": 0.25}


@pytest.mark.parametrize("name", LEAST_SAVED)
def test_derive_saves_more_than_lossless_does(name: str) -> None:
    entry = next(entry for entry in ZOO if entry.name == name)
    kept = {}
    for codec in (sg.Lossless(), sg.Derive()):
        model = fresh(entry)
        run = sg.apply(model, codec, min_bytes=SMALL)
        gradients(entry, model, "cpu")
        kept[codec] = run.report()
    derived = kept[sg.Derive()]
    assert derived.kept_after < (1 - LEAST_SAVED[name]) * derived.kept_before, derived
    assert derived.kept_after < kept[sg.Lossless()].kept_after


@ENTRIES
def test_sites_taught_by_a_batch_are_compared_with_the_first_real_tensors(entry: Entry) -> None:
    plain = fresh(entry)
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, sg.Derive(), batch=entry.batch("cpu"), min_bytes=SMALL)
    for seed in range(2):
        assert_same_gradients(gradients(entry, plain, "cpu", seed=seed), gradients(entry, treated, "cpu", seed=seed))
    assert run.report().kept_after == run.report().promised


@DTYPES
@ENTRIES
def test_every_gradient_of_the_zoo_is_bit_equal_with_products_that_run_again(
    entry: Entry, autocast: torch.dtype | None, device: torch.device
) -> None:
    plain = fresh(entry, device)
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, sg.Derive(products=True), min_bytes=SMALL)
    for seed in range(2):
        expected = gradients(entry, plain, device, autocast=autocast, seed=seed)
        assert_same_gradients(expected, gradients(entry, treated, device, autocast=autocast, seed=seed))
    report = run.report()
    assert report.kept_after == report.promised, report


@ENTRIES
def test_what_one_kernel_makes_of_packed_sources_is_as_near_as_what_the_ops_make_of_them(
    entry: Entry, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nearer, as a rule: the kernel takes a layer norm's own statistics, where the op finds those of the few bits."""
    one, other = fresh(entry, device), fresh(entry, device)
    exact = gradients(entry, fresh(entry, device), device)
    for model in (one, other):
        sg.apply(model, "derive(); quant(bits=8); lossless()", min_bytes=SMALL)
        gradients(entry, model, device)
    chained = gradients(entry, one, device)
    monkeypatch.setattr(derivations, "unpacked_through", lambda *_: None)
    stepwise = gradients(entry, other, device)
    assert relative_error(exact, chained) <= 1.5 * relative_error(exact, stepwise) + 1e-6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def trained(model: nn.Module, x: Tensor, steps: int = 2) -> list[Tensor]:
    for _ in range(steps):
        model.zero_grad()
        model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def sites_of(run: sg.Run, codec: sg.Codec) -> list[str]:
    return [site.site.name for site in run.report().sites if site.codec == repr(codec)]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block()


def test_both_operands_of_a_transformer_block_are_derived(block: Block, x: Tensor) -> None:
    run = sg.apply(block, sg.Derive())
    trained(block, x)
    assert sites_of(run, sg.Derive()) == ["up:AddmmBackward0.mat1", "down:AddmmBackward0.mat1"]
    report = run.report()
    assert report.kept_before - report.kept_after == 128 * (64 + 256) * 4


def test_a_source_in_a_few_bits_is_unpacked_for_what_is_derived_from_it(block: Block, x: Tensor) -> None:
    quant = sg.Quant(bits=4)
    run = sg.apply(block, [sg.Rule("*", sg.Derive()), sg.Rule("*", quant)])
    trained(block, x)
    assert "down:AddmmBackward0.mat1" in sites_of(run, sg.Derive())
    assert "(model):GeluBackward0.self" in sites_of(run, quant)
    seen = {}
    block.up.register_forward_hook(lambda module, args, output: seen.update(wide=output.detach()))
    block.zero_grad()
    out = block(x)
    out.square().mean().backward()
    coarse = F.gelu(quant.unpack(quant.pack(seen["wide"])))
    assert block.down.weight.grad is not None
    torch.testing.assert_close(block.down.weight.grad, (2 * out.detach() / out.numel()).T @ coarse)


def test_what_is_kept_as_a_derivative_alone_is_no_source(block: Block, x: Tensor) -> None:
    run = sg.apply(block, [sg.Rule("*", sg.Derive()), sg.Rule("*", sg.FewBit(bits=3)), sg.Rule("*", sg.Lossless())])
    trained(block, x)
    assert sites_of(run, sg.Derive()) == ["up:AddmmBackward0.mat1"]  # not what GELU made: its input is three bits now


class Functional(nn.Module):
    """Calls a norm with an epsilon that no attribute tells."""

    def __init__(self, eps: float | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64))
        self.linear = nn.Linear(64, 64)
        if eps is not None:
            self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(F.layer_norm(x, (64,), self.weight, None, 1e-3))


def test_a_norm_whose_epsilon_nobody_tells_is_kept(x: Tensor) -> None:
    model = Functional(None)
    run = sg.apply(model, sg.Derive())
    trained(model, x)
    assert not sites_of(run, sg.Derive())


@pytest.mark.parametrize("ahead", [False, True], ids=["watched", "with a batch"])
def test_what_comes_out_differently_is_kept_and_said(x: Tensor, ahead: bool) -> None:
    model = Functional(0.5)  # not the one it uses
    plain = copy.deepcopy(model)
    run = sg.apply(model, sg.Derive(), batch=x if ahead else None)
    for one, two in zip(trained(model, x, 3), trained(plain, x, 3), strict=True):
        assert torch.equal(one, two)
    assert not sites_of(run, sg.Derive())
    assert any("came out differently" in note for note in run.report().notes)


def test_running_statistics_move_once(device: torch.device) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)).to(device)
    plain = copy.deepcopy(model)
    run = sg.apply(model, sg.Derive(), min_bytes=0)
    x = torch.randn(8, 3, 16, 16, device=device)
    for one, two in zip(trained(model, x), trained(plain, x), strict=True):
        assert torch.equal(one, two)
    assert sites_of(run, sg.Derive())
    for name, buffer in plain.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name))


def test_a_norm_of_half_precision_is_made_again_with_statistics_of_full_precision(device: torch.device) -> None:
    """On a CPU their dtype is that of what is known beside the input: nothing, if it were the running statistics."""
    norm = nn.BatchNorm2d(16, affine=False)
    plain = nn.Sequential(nn.Conv2d(3, 16, 3), norm, nn.GELU(), nn.Conv2d(16, 8, 3)).to(device)
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, sg.Derive(), min_bytes=0)
    for step in range(3):
        x = torch.randn(8, 3, 16, 16, device=device) * min(step, 1)
        for model in (plain, treated):
            model.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                out = model(x)
            out.float().square().mean().backward()
        for one, two in zip(plain.parameters(), treated.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)
    assert "2:GeluBackward0.self" in sites_of(run, sg.Derive())
    for one, two in zip(plain.buffers(), treated.buffers(), strict=True):
        assert torch.equal(one, two)


def test_a_frozen_bias_is_found_in_the_module() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    nn.init.normal_(model[1].bias)
    model[1].bias.requires_grad_(False)
    plain = copy.deepcopy(model)
    run = sg.apply(model, sg.Derive())
    x = torch.randn(8, 3, 16, 16)
    for one, two in zip(trained(model, x), trained(plain, x), strict=True):
        assert torch.equal(one, two)
    assert sites_of(run, sg.Derive())


def test_a_bias_changed_between_forward_and_backward_is_an_error() -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3))
    run = sg.apply(model, sg.Derive())
    x = torch.randn(8, 3, 16, 16)
    trained(model, x)
    assert sites_of(run, sg.Derive())
    loss = model(x).square().mean()
    with torch.no_grad():
        model[1].bias.add_(1)
    with pytest.raises(sg.SavedTensorModifiedError, match="cannot be made again"):
        loss.backward()


def test_a_source_changed_in_place_is_an_error_as_in_stock_autograd() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.LayerNorm(64), nn.Linear(64, 64)
            self.change = False

        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            out = self.linear(self.norm(y))
            if self.change:
                y.zero_()
            return out

    model = Changing()
    run = sg.apply(model, sg.Derive())
    x = torch.randn(64, 64, requires_grad=True)
    trained(model, x)
    assert sites_of(run, sg.Derive())
    model.change = True
    loss = model(x).square().mean()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_second_order_gradients_are_exact(block: Block, x: Tensor) -> None:
    plain = copy.deepcopy(block)
    run = sg.apply(block, sg.Derive())
    trained(block, x)
    assert sites_of(run, sg.Derive())
    second = []
    for model in (block, plain):
        model.zero_grad()
        weights = [model.norm.weight, model.up.weight]
        first = torch.autograd.grad(model(x).square().mean(), weights, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        second.append([p.grad for p in model.parameters()])
    for one, two in zip(*second, strict=True):
        assert torch.equal(one, two)


def test_backward_may_run_twice_over_a_retained_graph(block: Block, x: Tensor) -> None:
    run = sg.apply(block, sg.Derive())
    trained(block, x)
    block.zero_grad()
    loss = block(x).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in block.parameters()]
    loss.backward()
    for p, first in zip(block.parameters(), once, strict=True):
        assert torch.equal(p.grad, 2 * first)
    assert sites_of(run, sg.Derive())


def test_what_three_products_read_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(64)
            self.heads = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            return sum(head(x) for head in self.heads)

    model, x = Heads(), torch.randn(8, 16, 64)
    run = sg.apply(model, sg.Derive())
    trained(model, x)
    assert len(sites_of(run, sg.Derive())) == 3
    calls = []
    norm = torch.native_layer_norm
    loss = model(x).square().mean()
    monkeypatch.setattr(torch, "native_layer_norm", lambda *args: calls.append(1) or norm(*args))
    loss.backward()
    assert len(calls) == 1


def test_memory_is_let_go_without_the_garbage_collector(
    block: Block, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ticket holds its tensor's node: if a node ever held itself that way, nothing would free it."""
    handles: list[weakref.ref[Handle]] = []
    handle = Derivation.handle

    def remembered(self: Derivation, tensor: Tensor) -> Handle:
        found = handle(self, tensor)
        handles.append(weakref.ref(found))
        return found

    sg.apply(block, sg.Derive())
    trained(block, x)
    monkeypatch.setattr(Derivation, "handle", remembered)
    gc.disable()
    try:
        out = block(x)
        out.square().mean().backward()
        del out
        assert len(handles) == 2 and not any(ref() for ref in handles)
        out = block(x)  # and where nobody calls backward
        assert all(ref() for ref in handles[2:])
        del out
        assert not any(ref() for ref in handles)
    finally:
        gc.enable()


def test_derive_by_itself_keeps_a_copy(x: Tensor) -> None:
    packed = sg.Derive().pack(x)
    assert torch.equal(sg.Derive().unpack(packed), x) and packed.nbytes == x.nbytes


class NormalizedWeights(nn.Conv2d):
    """A convolution that normalizes its weights, as NFNets do: its bias is its own, not that of the norm."""

    def forward(self, x: Tensor) -> Tensor:
        rows = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(rows, None, None, training=True).reshape_as(self.weight)
        return self._conv_forward(x, weight, self.bias)


class NormalizedOutput(nn.Conv2d):
    """The same of what it makes."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.group_norm(super().forward(x), 4)) * 1.5


class Instances(nn.Conv2d):
    """An instance norm behind it, which repeats its weight and its bias for every example."""

    def __init__(self, *args: int) -> None:
        super().__init__(*args)
        self.norm = nn.InstanceNorm2d(self.out_channels, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(super().forward(x)))


@pytest.mark.parametrize("kind", [NormalizedWeights, NormalizedOutput, Instances])
def test_a_bias_that_is_zero_at_first_and_not_the_norms_is_not_taken_for_it(kind: type[nn.Conv2d]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(kind(3, 16, 3), nn.GELU(), kind(16, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(16 * 144, 4))
    for module in plain[:3:2]:
        nn.init.zeros_(module.bias)
    treated, x = copy.deepcopy(plain), torch.randn(4, 3, 16, 16)
    sg.apply(treated, sg.Derive(), min_bytes=64)
    for _ in range(3):
        for model in (plain, treated):
            model.zero_grad()
            model(x).square().mean().backward()
            torch.optim.SGD(model.parameters(), lr=0.02).step()
        for one, two in zip(plain.parameters(), treated.parameters(), strict=True):
            assert torch.equal(one.grad, two.grad)


class Written(nn.Module):
    """A forward written down, with what it uses."""

    def __init__(self, written: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self.written = written
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def assert_equal_while_trained(
    plain: nn.Module,
    what: Any,
    batches: Sequence[Tensor],
    change: Callable[[nn.Module, int], None] = lambda model, step: None,
) -> sg.Run:
    """Trained step by step with and without, after a change to the model if there is one."""
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, what, min_bytes=0)
    for step, batch in enumerate(batches):
        for model in (plain, treated):
            change(model, step)
            model.zero_grad()
            torch.manual_seed(step)
            model(batch).float().square().mean().backward()
        for one, two in zip(plain.parameters(), treated.parameters(), strict=True):
            assert one.grad is None or torch.equal(one.grad, two.grad), step
        for model in (plain, treated):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    return run


BOTH = pytest.mark.parametrize("what", [sg.Derive(), sg.Derive(products=True)], ids=repr)


@BOTH
def test_a_gated_unit_over_the_last_dimension_is_derived(what: sg.Derive, x: Tensor) -> None:
    run = assert_equal_while_trained(nn.Sequential(nn.Linear(64, 64), nn.GLU(), nn.Linear(32, 8)), what, [x] * 3)
    assert sites_of(run, what)


@BOTH
@pytest.mark.parametrize("width", [8, 10], ids=["as wide as channels", "wider"])
def test_an_addend_that_is_viewed_is_added_as_it_is_seen(what: sg.Derive, width: int) -> None:
    """It is zero at first, so that the first forward would not tell."""
    model = Written(
        lambda m, x: m.last(torch.addcmul(m.shift.view(1, 8, 1, 1), m.first(x), m.scale.view(1, 8, 1, 1))),
        first=nn.Conv2d(3, 8, 3, padding=1),
        last=nn.Conv2d(8, 8, 3),
        shift=nn.Parameter(torch.zeros(8)),
        scale=nn.Parameter(torch.ones(8)),
    )
    run = assert_equal_while_trained(model, what, [torch.randn(2, 3, width, width)] * 3)
    assert "last:ConvolutionBackward0.input" in sites_of(run, what)


@BOTH
def test_what_is_added_to_a_parameter_is_made_again_with_it(what: sg.Derive, x: Tensor) -> None:
    model = Written(
        lambda m, x: m.last(F.gelu(m.first(x)) + m.place),
        first=nn.Linear(64, 64),
        last=nn.Linear(64, 8),
        place=nn.Parameter(torch.randn(64)),
    )
    run = assert_equal_while_trained(model, what, [x] * 3)
    assert "last:AddmmBackward0.mat1" in sites_of(run, what)
    run = sg.apply(model, what, min_bytes=0)
    trained(model, x)
    loss = model(x).square().mean()
    with torch.no_grad():
        model.place.add_(1)
    with pytest.raises(sg.SavedTensorModifiedError, match="a parameter of shape"):
        loss.backward()


@BOTH
def test_a_matrix_that_is_added_turned_round_is_added_so_again(what: sg.Derive) -> None:
    model = Written(
        lambda m, x: m.last(torch.addmm(m.bias.t(), x, m.weight) * m.scale),
        weight=nn.Parameter(torch.randn(16, 32)),
        bias=nn.Parameter(torch.zeros(32, 32)),
        scale=nn.Parameter(torch.ones(32)),
        last=nn.Linear(32, 8),
    )
    assert_equal_while_trained(model, what, [torch.randn(32, 16)] * 3)


@BOTH
@pytest.mark.parametrize("between", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_what_was_rounded_on_its_way_is_rounded_again(what: sg.Derive, between: torch.dtype, x: Tensor) -> None:
    """Zeros, as behind a scale that begins with them, are the same without."""
    model = Written(
        lambda m, x: m.last(F.gelu(m.first(x) * m.scale).to(between).float()),
        first=nn.Linear(64, 64),
        last=nn.Linear(64, 8),
        scale=nn.Parameter(torch.zeros(64)),
    )
    run = assert_equal_while_trained(model, what, [x] * 3)
    assert "last:AddmmBackward0.mat1" in sites_of(run, what)


@BOTH
def test_a_sum_in_place_is_made_again_in_the_dtype_of_its_tensor(what: sg.Derive, x: Tensor) -> None:
    """What is added is zero at first, and takes no rounding."""

    def written(m: Any, x: Tensor) -> Tensor:
        sum_of = F.gelu(m.first(x)).bfloat16().add_(m.norm(m.second(x)))
        return m.last((sum_of + F.silu(m.third(x)).bfloat16()).float())

    linears = {name: nn.Linear(64, 64) for name in ("first", "second", "third", "last")}
    model = Written(written, norm=nn.LayerNorm(64), **linears)
    nn.init.zeros_(model.norm.weight)
    run = assert_equal_while_trained(model, what, [x] * 3)
    assert "last:AddmmBackward0.mat1" in sites_of(run, what)


@BOTH
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16], ids=str)
def test_elements_that_a_cast_puts_in_another_order_are_put_there_again(what: sg.Derive, to: torch.dtype) -> None:
    """Zeros are in any order at first."""
    model = Written(
        lambda m, x: m.last((m.first(x).sigmoid() * m.scale).to(to, memory_format=torch.channels_last).float()),
        first=nn.Conv2d(3, 8, 3),
        last=nn.Conv2d(8, 8, 3),
        scale=nn.Parameter(torch.zeros(8, 1, 1)),
    )
    run = assert_equal_while_trained(model, what, [torch.randn(2, 3, 10, 10)] * 3)
    assert "last:ConvolutionBackward0.input" in sites_of(run, what)


@BOTH
def test_copies_of_one_tensor_in_several_dtypes_are_told_apart(what: sg.Derive, x: Tensor) -> None:
    def written(m: Any, x: Tensor) -> Tensor:
        x = F.gelu(m.first(x))
        return sum((x.to(dtype) @ m.weight.to(dtype)).float() for dtype in (torch.bfloat16, torch.half, torch.double))

    model = Written(written, first=nn.Linear(64, 64), weight=nn.Parameter(torch.randn(64, 8)))
    assert_equal_while_trained(model, what, [x] * 3)


class FewBit(torch.autograd.Function):
    """Somebody else's, with the name of ours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


@BOTH
def test_functions_of_others_are_not_taken_for_ours(what: sg.Derive, x: Tensor) -> None:
    model = Written(
        lambda m, x: m.last(F.gelu(FewBit.apply(F.silu(m.first(x))))), first=nn.Linear(64, 64), last=nn.Linear(64, 8)
    )
    run = assert_equal_while_trained(model, what, [x] * 3)
    assert sites_of(run, what) == ["last:AddmmBackward0.mat1"]


def flag(model: nn.Module, step: int) -> None:
    model.flag = step >= 2  # type: ignore[assignment]


@BOTH
@pytest.mark.parametrize("given", ["weight", "bias"])
def test_a_norm_that_is_given_more_than_was_learnt_is_noticed(what: sg.Derive, given: str, x: Tensor) -> None:
    def written(m: Any, x: Tensor) -> Tensor:
        affine = {"weight": m.scale, "bias": m.scale, given: m.scale if m.flag else None}
        return m.last(F.layer_norm(m.first(x), (64,), **affine, eps=m.eps))

    parts = {"first": nn.Linear(64, 64), "last": nn.Linear(64, 8), "scale": nn.Parameter(torch.randn(64))}
    model = Written(written, **parts, eps=1e-5, flag=False)
    with pytest.warns(sg.SlimgradWarning, match="another path"):
        assert_equal_while_trained(model, what, [x] * 5, flag)


class Conditioned(nn.BatchNorm2d):
    """Computes its bias when it is told to."""

    flag = False

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias * 2 if self.flag else self.bias
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, bias, training=True)


@BOTH
def test_a_norm_whose_bias_is_computed_from_some_step_on_is_noticed(what: sg.Derive) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), Conditioned(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
    nn.init.normal_(model[1].bias)
    with pytest.warns(sg.SlimgradWarning, match="another path"):
        assert_equal_while_trained(model, what, [torch.randn(2, 3, 10, 10)] * 5, lambda m, step: flag(m[1], step))


@BOTH
def test_another_function_than_the_one_learnt_is_noticed(what: sg.Derive, x: Tensor) -> None:
    def written(m: Any, x: Tensor) -> Tensor:
        x = m.first(x)
        return m.last((F.gelu(x) if m.flag else torch.sigmoid(x)) + m.place)

    parts = {"first": nn.Linear(64, 64), "last": nn.Linear(64, 8), "place": nn.Parameter(torch.randn(64))}
    model = Written(written, **parts, flag=False)
    with pytest.warns(sg.SlimgradWarning, match="another path"):
        assert_equal_while_trained(model, what, [x] * 5, flag)


@BOTH
@pytest.mark.parametrize("around", [False, True], ids=["itself", "what is around it"])
def test_a_norm_put_in_the_place_of_another_is_noticed(what: sg.Derive, around: bool, x: Tensor) -> None:
    def change(model: nn.Module, step: int) -> None:
        if step == 2:
            other = copy.deepcopy(model[0] if around else model[0][1])
            (other[1] if around else other).eps = 0.5
            if around:
                model[0] = other
            else:
                model[0][1] = other

    inner = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    assert_equal_while_trained(nn.Sequential(inner, nn.Linear(64, 8)), what, [x] * 4, change)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_tensors_are_kept_as_they_are(dtype: torch.dtype) -> None:
    model = Written(
        lambda m, x: ((x @ m.weight).conj() * m.scale @ m.weight).abs(),
        weight=nn.Parameter(torch.randn(64, 64, dtype=dtype)),
        scale=nn.Parameter(torch.randn(64, dtype=dtype)),
    )
    run = assert_equal_while_trained(model, sg.Derive(), [torch.randn(32, 64, dtype=dtype)] * 3)
    assert not sites_of(run, sg.Derive())


def test_statistics_that_moved_between_forward_and_backward_are_an_error() -> None:
    """Kernels leave their versions as they are."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    run = sg.apply(model, sg.Derive(), min_bytes=0)
    x = torch.randn(4, 3, 16, 16)
    trained(model, x)
    assert sites_of(run, sg.Derive())
    loss = model(x).square().mean()
    model.train()
    loss = loss + model(x + 1).square().mean()
    with pytest.raises(sg.SavedTensorModifiedError, match="the running statistics of a norm"):
        loss.backward()


def test_a_source_changed_in_place_in_the_first_forward_is_no_concern_of_that_forward(x: Tensor) -> None:
    def written(m: Any, x: Tensor) -> Tensor:
        x = x * m.scale
        out = m.last(m.norm(x))
        x.detach().zero_()
        return out

    parts = {"norm": nn.LayerNorm(64), "last": nn.Linear(64, 8), "scale": nn.Parameter(torch.ones(64))}
    model = Written(written, **parts)
    sg.apply(model, sg.Derive(), min_bytes=0)
    loss = model(x).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


TURNED = {
    "a matrix": lambda m, x: m.last(m.norm(m.first(x).t())),
    "one image": lambda m, x: m.last(m.norm(m.first(x[None]).transpose(1, 2))),
}


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("turned", TURNED)
def test_a_norm_of_packed_elements_in_another_order_is_made_in_its_own(turned: str, affine: bool) -> None:
    """As norms over the channels of one image have them: no statistics are found by the order of memory there."""
    torch.manual_seed(0)
    parts = {
        "first": nn.Linear(64, 64),
        "norm": nn.LayerNorm(128, elementwise_affine=affine),
        "last": nn.Linear(128, 8),
    }
    plain, x = Written(TURNED[turned], **parts), torch.randn(128, 64)
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, "derive(); quant(bits=8); lossless()", min_bytes=0)
    assert relative(trained(plain, x), trained(treated, x)) < 0.02  # eight bits are off by less than a hundredth each
    assert sites_of(run, sg.Derive())


def relative(one: list[Tensor], other: list[Tensor]) -> float:
    both = [torch.cat([tensor.flatten() for tensor in tensors]) for tensors in (one, other)]
    return float((both[0] - both[1]).norm() / both[0].norm())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64], ids=str)
def test_operands_that_no_kernel_takes_are_left_to_the_ops(dtype: torch.dtype, x: Tensor) -> None:
    factors = (torch.rand(64) > 0.5).to(dtype)
    plain = Written(
        lambda m, x: m.last((F.gelu(m.first(x)) * factors).to(m.last.weight.dtype)),
        first=nn.Linear(64, 64),
        last=nn.Linear(64, 8).to(torch.promote_types(dtype, torch.float32)),
    )
    treated = copy.deepcopy(plain)
    run = sg.apply(treated, "derive(); quant(bits=8); lossless()", min_bytes=0)
    assert relative(trained(plain, x), trained(treated, x)) < 0.02
    assert sites_of(run, sg.Derive())
