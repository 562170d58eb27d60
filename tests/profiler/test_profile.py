"""What a profile says about a model, and that taking one changes nothing."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import slimgrad as sg
from tests.models import cnn, hook_count, images
from tests.zoo import ZOO, Entry, fresh

OPAQUE = {"lstm"}
"""Entries whose recurrent kernels take a workspace of a size that only the kernel knows."""


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("entry", [e for e in ZOO if e.name not in OPAQUE], ids=str)
def test_a_fake_profile_predicts_kept_bytes_within_two_percent(
    entry: Entry, autocast: bool, device: torch.device
) -> None:
    model, batch = fresh(entry, device), entry.batch(device)
    with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
        real = sg.profile(model, batch, entry.loss)
        fake = sg.profile(model, batch, entry.loss, fake=True)
    assert abs(fake.kept_bytes - real.kept_bytes) <= 0.02 * real.kept_bytes
    if device.type == "cpu":
        assert [site.name for site in fake.sites] == [site.name for site in real.sites]


@pytest.mark.parametrize("entry", ZOO, ids=str)
def test_every_saved_tensor_of_the_zoo_is_traced_to_its_node_and_slot(entry: Entry) -> None:
    profile = sg.profile(fresh(entry, "cpu"), entry.batch("cpu"), entry.loss)
    assert [site.name for site in profile.sites if site.node == "(not found)"] == []


@pytest.mark.parametrize("entry", ZOO, ids=str)
def test_profiling_changes_neither_buffers_nor_gradients_nor_random_state(entry: Entry) -> None:
    model = fresh(entry, "cpu")
    state, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    sg.profile(model, entry.batch("cpu"), entry.loss)
    sg.profile(model, entry.batch("cpu"), entry.loss, fake=True)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert torch.equal(rng, torch.get_rng_state()) and hook_count(model) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_storage_saved_twice_is_counted_once_with_both_savers() -> None:
    profile = sg.profile(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), images())
    shared = next(s for s in profile.storages if len(s.savers) == 2 and s.counted)
    assert [profile.sites[i].name for i in shared.savers] == ["1:ReluBackward0.result", "2:ConvolutionBackward0.input"]
    assert profile.kept_bytes == shared.bytes == 4 * 8 * 14 * 14 * 4


def test_parameters_buffers_and_inputs_are_seen_but_not_counted() -> None:
    profile = sg.profile(nn.Linear(64, 64), torch.randn(8, 64, requires_grad=True))
    assert {storage.kind for storage in profile.storages} == {"parameter", "input"}
    assert profile.kept_bytes == 0
    weight = next(site for site in profile.sites if site.slot == "mat2")
    assert weight.need is sg.Need.WEIGHT and weight.parameter == "weight"


def test_autocast_copies_of_weights_are_counted_and_named() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    with torch.autocast("cpu", torch.bfloat16):
        profile = sg.profile(model, torch.randn(8, 64))
    copies = [s for s in profile.storages if s.kind == "weight copy"]
    assert [profile.sites[s.savers[0]].parameter for s in copies] == ["1.weight"]  # the first needs no input gradient
    assert copies[0].bytes == 64 * 32 * 2


def test_the_loss_is_profiled_too() -> None:
    profile = sg.profile(nn.Linear(16, 500), (torch.randn(64, 16), torch.zeros(64).long()), nn.CrossEntropyLoss())
    outside = [site for site in profile.sites if site.path == "<outside>"]
    assert any(site.node == "LogSoftmaxBackward0" and site.bytes == 64 * 500 * 4 for site in outside)


class Mixed(nn.Module):
    def forward(self, a: Tensor, b: Tensor | None = None) -> dict[str, Tensor]:
        return {"loss": F.gelu(a * (1 if b is None else b)).sum()}


@pytest.mark.parametrize(
    ("batch", "loss_fn"),
    [
        (torch.ones(64, 64, requires_grad=True), None),
        ((torch.ones(64, 64, requires_grad=True), torch.ones(64, 64)), None),
        ({"a": torch.ones(64, 64, requires_grad=True), "b": torch.ones(64, 64)}, None),
        ((torch.ones(64, 64, requires_grad=True), torch.zeros(())), lambda out, target: out["loss"] - target),
        ({"a": torch.ones(64, 64, requires_grad=True)}, lambda out, batch: out["loss"] * len(batch)),
    ],
    ids=["tensor", "tuple", "dict", "inputs and target", "dict and loss_fn"],
)
def test_batches_come_as_tensors_tuples_dicts_and_pairs(batch: object, loss_fn: object) -> None:
    profile = sg.profile(Mixed(), batch, loss_fn)
    assert any(site.node == "GeluBackward0" for site in profile.sites)


def test_a_batch_the_model_does_not_take_is_an_error_that_says_how_it_was_given() -> None:
    with pytest.raises(sg.BatchError, match=r"1 positional.*A dict is given as keywords"):
        sg.profile(nn.Bilinear(2, 2, 2), torch.ones(3, 2))


def test_a_model_on_the_meta_device_can_be_profiled_with_fake_tensors() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 16384), nn.ReLU(), nn.Linear(16384, 4096))
    profile = sg.profile(model, torch.empty(8192, 4096, device="meta"), fake=True)
    assert profile.kept_bytes == 8192 * 16384 * 4


def test_a_model_that_asks_for_values_cannot_be_profiled_with_fake_tensors() -> None:
    class Choosy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x) if x.sum() > 0 else F.gelu(x)

    with pytest.raises(sg.UnsupportedModelError, match=r"Choosy cannot run on fake tensors.*fake=False"):
        sg.profile(Choosy(), torch.ones(4, requires_grad=True), fake=True)


class Skipping(nn.Module):
    """As BART, Whisper and OPT do: a number is drawn for each layer."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand([]) < self.share or torch.rand(1).item() < self.share:
                continue
            x = layer(x)
        return x


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_models_that_draw_numbers_to_skip_layers_can_be_profiled_with_fake_tensors(share: float) -> None:
    model, x, state = Skipping(share), torch.randn(64, 64), torch.get_rng_state()
    fake, real = (sg.profile(model, x, torch.sum, fake=fake) for fake in (True, False))
    assert fake.kept_bytes == real.kept_bytes and (fake.kept_bytes > 0) is (share == 0.0)
    assert fake.timeline is not None and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("kind", [RuntimeError, NotImplementedError])
def test_what_fails_on_fake_tensors_is_told_with_its_own_words(kind: type[Exception]) -> None:
    class Particular(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if isinstance(x, FakeTensor):
                raise kind("grouped_mm is only supported on CUDA")
            return F.relu(x)

    x = torch.ones(4, requires_grad=True)
    with pytest.raises(
        sg.UnsupportedModelError, match=r"Particular failed on fake tensors \(grouped_mm .*fake=False"
    ) as found:
        sg.profile(Particular(), x, fake=True)
    assert isinstance(found.value.__cause__, kind)
    assert sg.profile(Particular(), x).kept_bytes


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_pretending_to_be_on_a_gpu_without_one_is_refused() -> None:
    with pytest.raises(sg.UnsupportedModelError, match="need a CUDA build of torch"):
        sg.profile(nn.Linear(2, 2), torch.ones(2, 2), fake=True, device="cuda")


def test_a_device_without_fake_is_refused() -> None:
    with pytest.raises(sg.UnsupportedModelError, match="device= is for fake=True"):
        sg.profile(nn.Linear(2, 2), torch.ones(2, 2), device="cpu")


def test_a_profile_under_no_grad_is_still_a_training_profile() -> None:
    with torch.no_grad():
        assert sg.profile(cnn(), images()).kept_bytes > 0


def test_profiles_round_trip_through_json() -> None:
    profile = sg.profile(cnn(), images())
    assert sg.Profile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "this is not JSON"),
        ("[]", "expected a JSON object"),
        ('{"type": "Rule"}', "expected JSON of type 'Profile'"),
    ],
)
def test_text_that_is_no_profile_is_refused(text: str, message: str) -> None:
    with pytest.raises(sg.SpecError, match=message):
        sg.Profile.from_json(text)


def test_totals_by_need_and_by_module_add_up_to_all_kept_bytes() -> None:
    profile = sg.profile(cnn(), images())
    assert sum(profile.by_need().values()) == sum(profile.by_module().values()) == profile.kept_bytes


def test_a_parameter_that_the_model_does_not_list_is_still_no_activation() -> None:
    """Sharded training saves gathered parameters that `model.parameters()` never shows."""
    hidden = nn.Parameter(torch.randn(64, 64))

    class Gathered(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ hidden

    x = torch.randn(32, 64, requires_grad=True)
    assert {storage.kind for storage in sg.profile(Gathered(), x).storages} == {"parameter", "input"}
    model = Gathered()
    run = sg.apply(model, sg.Lossless())
    model(x).sum().backward()
    assert run.report().kept_before == 0
    run.remove()
    with torch.autocast("cpu", torch.bfloat16):
        profile = sg.profile(Gathered(), x)
    assert [s.kind for s in profile.storages if profile.lead(s).need is sg.Need.WEIGHT] == ["weight copy"]
