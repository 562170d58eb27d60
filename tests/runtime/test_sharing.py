"""One Packed for all that one Packed can serve: exact numbers of packs, and the bounds that follow from the codec."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import slimgrad as sg
from slimgrad.codecs import Demand, Packed
from slimgrad.kernels import Groups
from slimgrad.runtime.tickets import Latest, Shared
from tests.models import Projections, gradients, same


class Counts:
    """How often tensors were packed and unpacked, and which formats were asked for."""

    def __init__(self) -> None:
        self.packed: list[tuple[int, Groups]] = []
        self.unpacked = 0

    def clear(self) -> None:
        self.packed.clear()
        self.unpacked = 0


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    seen = Counts()
    pack, unpack = sg.Quant.pack, sg.Quant.unpack

    def packing(codec: sg.Quant, tensor: Tensor, demand: Demand) -> Packed:
        seen.packed.append((tensor.numel(), codec.groups(demand)))
        return pack(codec, tensor, demand)

    def unpacking(codec: sg.Quant, packed: Packed) -> Tensor:
        seen.unpacked += 1
        return unpack(codec, packed)

    monkeypatch.setattr(sg.Quant, "pack", packing)
    monkeypatch.setattr(sg.Quant, "unpack", unpacking)
    return seen


def trained_once(model: nn.Module, forward: Callable[[nn.Module], Tensor], counts: Counts) -> sg.Report:
    """Apply Quant, step twice, and count the second step, in which tensors are packed as they are saved."""
    run = sg.apply(model, sg.Quant(bits=4), min_bytes=256)
    forward(model).sum().backward()
    counts.clear()
    forward(model).sum().backward()
    return run.report()


def test_the_gradient_that_flows_on_is_exact_and_the_weights_is_within_half_a_step() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Hardtanh(-9, 9), nn.Linear(64, 48)), torch.randn(256, 64)
    treated = copy.deepcopy(model)
    sg.apply(treated, sg.Quant(bits=4), min_bytes=256)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    upstream = torch.randn(256, 48)
    for m, i in zip((model, treated), inputs, strict=True):
        m(i).backward(upstream)
    assert torch.equal(inputs[0].grad, inputs[1].grad) and torch.equal(model[1].bias.grad, treated[1].bias.grad)
    error = (model[1].weight.grad - treated[1].weight.grad).abs()
    step = (x.max() - x.min()) / 15 * 1.02  # no group's range is larger than the tensor's
    assert error.any() and (error <= upstream.abs().sum(0)[:, None] * step / 2).all()


class Rectified(nn.Module):
    def __init__(self, *, inplace: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.relu(self.first(x)))


@pytest.mark.parametrize("inplace", [False, True])
def test_a_relus_mask_is_read_off_the_quantized_operand_of_the_next_convolution(inplace: bool, counts: Counts) -> None:
    torch.manual_seed(0)
    plain, x = Rectified(inplace=inplace), torch.randn(4, 3, 16, 16)
    treated = copy.deepcopy(plain)
    report = trained_once(treated, lambda m: m(x), counts)
    assert [(n, how.zeros) for n, how in counts.packed] == [(4 * 8 * 16 * 16, True)]
    assert report.kept_after == Groups(4, 128).nbytes(4 * 8 * 16 * 16)
    assert {s.codec.split("(")[0] for s in report.sites} == {"Quant"} and len(report.sites) == 2
    treated.zero_grad()
    expected, found = (dict(zip("wbWB", gradients(m, lambda m: m(x)), strict=True)) for m in (plain, treated))
    # The mask is exact, so all but the second convolution's weight has the gradient of stock autograd.
    assert all(torch.equal(expected[name], found[name]) for name in "wbB")
    assert not torch.equal(expected["W"], found["W"])


def test_a_relu_that_keeps_its_output_alone_takes_one_bit() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    plain[2].weight.requires_grad_(False)
    treated, x = copy.deepcopy(plain), torch.randn(128, 64)
    run = sg.apply(treated, sg.Quant(bits=4), min_bytes=256)
    assert same(gradients(plain, lambda m: m(x)), gradients(treated, lambda m: m(x)))
    assert run.report().kept_after == 128 * 64 // 8


class Fused(nn.Module):
    """q, k and v as three views with gaps of one product, as timm has them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v)
        return self.out(attended.transpose(1, 2).reshape(batch, length, width))


def test_views_that_fill_one_storage_together_are_packed_and_unpacked_once(counts: Counts) -> None:
    torch.manual_seed(0)
    plain, x = Fused(), torch.randn(4, 16, 32)
    treated = copy.deepcopy(plain)
    report = trained_once(treated, lambda m: m(x), counts)
    product, attended = 4 * 16 * 96, 4 * 16 * 32
    # The output of attention and the operand of the last layer are one memory too, where attention lays it out so.
    assert sorted(n for n, _ in counts.packed) in ([attended, product], [attended, attended, product])
    assert counts.unpacked == len(counts.packed)
    assert report.kept_after == report.promised
    errors = relative_errors(plain, treated, lambda m: m(x))
    assert max(errors) < 0.15


@pytest.mark.parametrize("autocast", [False, True])
def test_an_operand_of_three_products_is_packed_once_even_in_the_copies_of_autocast(
    autocast: bool, counts: Counts
) -> None:
    torch.manual_seed(0)
    model, x = Projections(), torch.randn(8, 16, 64)

    def forward(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return m(x).float()

    report = trained_once(model, forward, counts)
    assert len(counts.packed) == 1 and counts.unpacked == 1
    assert sum(site.after > 0 for site in report.sites) == 1 and len(report.sites) >= 3


def shared_tensors(count: int) -> tuple[list[Shared], sg.Quant]:
    codec, latest = sg.Quant(bits=8), Latest(Latest.UNPACKED)
    return [Shared(codec.pack(torch.randn(64, 64)), latest) for _ in range(count)], codec


def test_what_is_shared_is_held_until_its_last_reader_and_no_longer() -> None:
    (shared,), codec = shared_tensors(1)
    shared.readers = 3
    first = shared.open(codec, None)
    memory, values = StorageWeakRef(first.untyped_storage()), first.clone()
    del first
    assert not memory.expired()
    assert torch.equal(shared.open(codec, (torch.Size([64, 64]), (1, 64), 0)), values.t())
    assert torch.equal(shared.open(codec, None), values)
    assert memory.expired()
    assert torch.equal(shared.open(codec, None), values), "a second backward unpacks anew"


def test_readers_who_never_come_cost_no_more_than_two_tensors() -> None:
    tensors, codec = shared_tensors(4)
    memories = []
    for shared in tensors:
        shared.readers = 2
        memories.append(StorageWeakRef(shared.open(codec, None).untyped_storage()))
    assert [memory.expired() for memory in memories] == [True, True, False, False]


def test_a_copy_of_what_was_changed_in_place_is_packed_anew(counts: Counts) -> None:
    class Changing(Projections):
        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(x)
            q = self.q(x)
            x = x.mul_(2)
            return q + self.k(x)

    torch.manual_seed(0)
    plain, x = Changing(), torch.randn(8, 16, 64)
    treated = copy.deepcopy(plain)

    def forward(m: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return m(x).float()

    trained_once(treated, forward, counts)
    assert len(counts.packed) == 2
    treated.zero_grad()
    assert max(relative_errors(plain, treated, forward)) < 0.15


def relative_errors(plain: nn.Module, treated: nn.Module, forward: Callable[[nn.Module], Tensor]) -> list[float]:
    pairs = zip(gradients(plain, forward), gradients(treated, forward), strict=True)
    return [float((a - b).norm() / (a.norm() + 1e-12)) for a, b in pairs]


def test_a_second_backward_through_a_quantized_tensor_is_refused() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    sg.apply(model, sg.Quant(), min_bytes=256)
    x = torch.randn(64, 64, requires_grad=True)
    torch.autograd.grad(model(x).sum(), x)
    with pytest.raises(sg.DoubleBackwardError, match="Quant"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_bare_lossy_codec_leaves_the_rest_to_lossless() -> None:
    model = nn.Linear(4, 4)
    assert sg.apply(model, sg.Quant(bits=2)).rules == (
        sg.Rule("*", sg.Quant(bits=2)),
        sg.Rule("*", sg.Lossless()),
    )


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.one(x) * self.other(y)


def test_copies_of_two_inputs_that_want_gradients_are_told_apart() -> None:
    plain = Both()
    treated = copy.deepcopy(plain)
    sg.apply(treated, sg.Quant(bits=8), min_bytes=0)
    x, y = (torch.randn(64, 64, requires_grad=True) for _ in range(2))
    for _ in range(3):
        for model in (plain, treated):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(x, y)
            out.float().square().mean().backward()
        for one, two in zip(plain.parameters(), treated.parameters(), strict=True):
            error = (one.grad - two.grad).norm() / one.grad.norm()
            assert error < 0.02  # eight bits are off by less than a hundredth
