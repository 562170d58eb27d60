"""Offload: gradients stay the same bit for bit, whoever is slow, and nobody touches memory that others may have."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.codecs import offload
from slimgrad.kernels.transfer import AHEAD, Lane, Parcel
from slimgrad.runtime.frame import MOST_PENDING
from tests.planner.models import made
from tests.simulated import Link, SimulatedCuda

CPU = torch.device("cpu")


@pytest.fixture(params=["slow", "fast"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    """A CPU that is taken for a device with a link to its host."""
    link: Link = request.param
    simulated = SimulatedCuda(link)
    lane = Lane(CPU, simulated)
    monkeypatch.setattr(offload, "lane_of", lambda device: lane)
    monkeypatch.setattr(sg.Offload, "device_wanted", "cpu")
    return simulated


def gradients(model: nn.Module, batch: dict[str, Tensor]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    model(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_equal(one: list[Tensor], two: list[Tensor]) -> None:
    assert len(one) == len(two) and all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "llama", "resnet"])
def test_gradients_stay_the_same_bit_for_bit_and_the_device_keeps_next_to_nothing(
    name: str, cuda: SimulatedCuda
) -> None:
    model, batch = made(name)
    plain = copy.deepcopy(model)
    run = sg.apply(model, sg.Offload())
    for _ in range(3):
        assert_equal(gradients(model, batch), gradients(plain, batch))
    report = run.report()
    assert report.kept_after < 0.1 * report.kept_before
    run.remove()


def test_with_other_codecs_and_derive_too(cuda: SimulatedCuda) -> None:
    model, batch = made("gpt2")
    plain = copy.deepcopy(model)
    with sg.apply(model, "transformer.h.0.*: derive(); transformer.h.*: offload(); lossless()"):
        for _ in range(3):
            assert_equal(gradients(model, batch), gradients(plain, batch))


def test_each_tensor_leaves_once_and_all_but_the_last_come_back_once(cuda: SimulatedCuda) -> None:
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))
    x = torch.randn(256, 64, requires_grad=True)
    run = sg.apply(model, [sg.Rule("*", sg.Offload()), sg.Rule("*", sg.Lossless())])
    for _ in range(2):
        model(x).sum().backward()
    cuda.copied.clear()
    model(x).sum().backward()
    assert set(cuda.copied) == {x.nbytes}
    stayed = MOST_PENDING if cuda.link == "slow" else 0
    assert len(cuda.copied) == 8 + 8 - stayed, "a tanh's output is the next layer's input, and travels for both"
    run.remove()


def packed(lane: Lane, *values: float) -> list[Parcel]:
    return [lane.send(torch.full((100,), value)) for value in values]


def test_those_sent_before_come_back_while_one_is_read(cuda: SimulatedCuda) -> None:
    parcels = packed(Lane(CPU, cuda), 1.0, 2.0, 3.0, 4.0)
    for parcel in parcels:
        parcel.settled(())
    before = len(cuda.copied)
    assert parcels[3].open().eq(4).all()
    assert len(cuda.copied) - before == 1 + AHEAD
    assert parcels[2].open().eq(3).all() and parcels[1].open().eq(2).all() and parcels[0].open().eq(1).all()
    assert len(cuda.copied) - before == 4, "each came back once"
    assert parcels[1].open().eq(2).all(), "a second backward asks again"


def test_what_comes_back_for_nobody_is_waited_for_before_its_memory_goes(cuda: SimulatedCuda) -> None:
    parcels = packed(Lane(CPU, cuda), 1.0, 2.0)
    for parcel in parcels:
        parcel.settled(())
    parcels[1].open()
    del parcels, parcel
    gc.collect()
    for stream in cuda.streams:  # what was waiting runs now at the latest, and finds its memory
        stream.run_until(stream.record_event()._place)


def test_a_graph_that_is_dropped_leaves_nothing_behind(cuda: SimulatedCuda) -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.randn(64, 64)
    run = sg.apply(model, sg.Offload())
    for _ in range(3):
        model(x)
    model(x).sum().backward()
    gc.collect()
    assert not [found for found in gc.get_objects() if isinstance(found, Parcel)]
    run.remove()


def test_a_change_in_place_is_refused_as_autograd_would(cuda: SimulatedCuda) -> None:
    lane = Lane(CPU, cuda)
    x = torch.ones(64, 64)
    early, late = lane.send(x.view(-1)), lane.send(torch.ones(10))
    x.add_(1)
    with pytest.raises(sg.SavedTensorModifiedError, match="changed in place while it was copied to the host"):
        early.settled(())
    with pytest.raises(sg.SavedTensorModifiedError, match="exempt its module"):
        early.open()
    assert late.open().eq(1).all()


def test_a_mask_is_read_off_the_values(cuda: SimulatedCuda) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(inplace=True), nn.Flatten())
    plain, x = copy.deepcopy(model), torch.randn(4, 3, 32, 32)
    run = sg.apply(model, sg.Offload())
    for _ in range(3):
        for one in (model, plain):
            one.zero_grad()
            one(x).square().sum().backward()
        assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    run.remove()


def test_second_order_gradients_and_kept_graphs_are_right(cuda: SimulatedCuda) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    plain, x = copy.deepcopy(model), torch.randn(64, 64, requires_grad=True)
    run = sg.apply(model, sg.Offload())
    for _ in range(2):
        found = []
        for one in (model, plain):
            (slope,) = torch.autograd.grad(one(x).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(slope.square().sum(), list(one.parameters())[:1])[0])
        assert torch.equal(*found)
    loss = model(x).square().sum()
    first, again = (torch.autograd.grad(loss, x, retain_graph=keep)[0] for keep in (True, False))
    assert torch.equal(first, again)
    run.remove()


def test_on_a_cpu_nothing_moves_and_the_report_says_why() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    run = sg.apply(model, sg.Offload())
    model(torch.randn(256, 64)).sum().backward()
    report = run.report()
    assert report.kept_after == report.kept_before
    assert any("Offload() frees nothing on cpu: expected cuda" in reason for reason in report.reasons)
    run.remove()
    run = sg.apply(model, [sg.Rule(nn.Linear, sg.Offload())])
    with pytest.raises(sg.RuleError, match=r"Offload\(\) frees nothing on cpu"):
        model(torch.randn(256, 64))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "llama", "resnet"])
def test_on_a_gpu_gradients_stay_the_same_and_the_memory_is_free(name: str) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, batch = made(name)
    model, batch = model.cuda(), {key: value.cuda() for key, value in batch.items()}
    plain = copy.deepcopy(model)
    run = sg.apply(model, sg.Offload(), min_bytes=4096)
    for _ in range(5):
        assert_equal(gradients(model, batch), gradients(plain, batch))
    kept = []
    for one in (plain, model):
        one.zero_grad(set_to_none=True)
        before = torch.cuda.memory_allocated()
        loss = one(**batch).loss
        kept.append(torch.cuda.memory_allocated() - before)
        del loss
    assert kept[1] < 0.35 * kept[0], "but for the outputs and the last few"
    run.remove()
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
def test_on_a_gpu_nobody_overtakes_the_copies() -> None:
    """Products long enough that a copy which did not wait, or for which nobody waited, would be seen."""
    model = nn.Sequential(*(layer for _ in range(12) for layer in (nn.Linear(2048, 2048), nn.Tanh()))).cuda()
    plain, x = copy.deepcopy(model), torch.randn(4096, 2048, device="cuda")
    run = sg.apply(model, sg.Offload())
    for _ in range(5):
        for one in (model, plain):
            one.zero_grad(set_to_none=True)
            one(x).square().mean().backward()
        assert_equal([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x).square().mean().backward()
    assert torch.cuda.max_memory_allocated() - before < (2 * 12) * x.nbytes / 2
    run.remove()
