"""Batches are drawn from the seed and stay inside their pictures; a short training reaches what it should."""

from __future__ import annotations

import dataclasses
import io
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))  # a script sees the modules beside it

import transfer
import transfer_data
from mobilenets import CENTRED, IMAGENET, SIDE, MobileNetV2
from transfer_data import Pictures, cifar10, flowers102, pets, shapes


def small(classes: int = 4) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 16, 5, stride=2), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 5, stride=2), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(32, classes))


def sgd(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.1)


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batches_follow_from_seed_and_epoch_alone() -> None:
    data = shapes(CENTRED, train=32, test=4)
    first, again, later, other = (
        list(data.batches(seed, epoch, 8)) for seed, epoch in [(0, 0), (0, 0), (0, 1), (1, 0)]
    )
    assert all(torch.equal(a, b) and torch.equal(x, y) for (a, x), (b, y) in zip(first, again, strict=True))
    assert not torch.equal(first[0][0], later[0][0]) and not torch.equal(first[0][0], other[0][0])


def test_an_epoch_shows_each_picture_once_in_full_batches() -> None:
    data = dataclasses.replace(shapes(CENTRED, train=21, test=4), train_labels=torch.arange(21))
    batches = list(data.batches(0, 0, 4))
    assert len(batches) == data.steps(4) == 5
    shown = torch.cat([labels for _, labels in batches])
    assert len(shown) == len(shown.unique()) == 20
    assert {tuple(images.shape) for images, _ in batches} == {(4, 3, 64, 64)}


def test_windows_lie_inside_the_picture_and_half_of_them_are_mirrored() -> None:
    windows = transfer_data._windows(4000, torch.Generator().manual_seed(0))
    sizes, middles = windows[:, [0, 1], [0, 1]].abs(), windows[:, :, 2].abs()
    assert (sizes + middles).max() <= 1 + 1e-6
    assert windows[:, 0, 1].eq(0).all() and windows[:, 1, 0].eq(0).all()
    areas = sizes.prod(1)
    assert (
        areas.min() > 0.9 * transfer_data.SMALLEST_CROP and areas.max() < 1
    )  # a side that is cut at 1 takes area away
    assert 0.46 < (windows[:, 0, 0] < 0).float().mean() < 0.54  # five standard deviations


def test_a_window_of_the_whole_picture_is_the_picture() -> None:
    images = torch.randn(2, 3, 16, 16)
    whole = torch.eye(2, 3).expand(2, 2, 3).clone()
    torch.testing.assert_close(transfer_data._cut(images, whole, 16), images)
    whole[:, 0, 0] = -1
    torch.testing.assert_close(transfer_data._cut(images, whole, 16), images.flip(3))


def test_tests_are_normalized_as_the_model_wants_them() -> None:
    black, white = torch.zeros(1, 3, 8, 8, dtype=torch.uint8), torch.full((1, 3, 8, 8), 255, dtype=torch.uint8)
    labels = torch.tensor([0, 1])
    data = Pictures("two", 2, CENTRED, black, labels[:1], torch.cat([black, white]), labels)
    ((images, found),) = data.tests(2)
    assert torch.equal(found, labels)
    assert images[0].eq(-1).all() and images[1].eq(1).all()
    ((images, _),) = dataclasses.replace(data, look=IMAGENET).tests(2)
    torch.testing.assert_close(images[1, :, 0, 0], (1 - torch.tensor(IMAGENET.mean)) / torch.tensor(IMAGENET.std))


# --- files ------------------------------------------------------------------------------------------------------------


def write_pack(file: Path, labels: list[int], split: list[int], side: int = SIDE) -> None:
    """Pictures of one grey each, as bright as they come late."""
    from PIL import Image

    encoded = []
    for number in range(len(labels)):
        buffer = io.BytesIO()
        Image.new("RGB", (side, side), (10 * number,) * 3).save(buffer, format="png")
        encoded.append(np.frombuffer(buffer.getvalue(), np.uint8))
    offsets = np.cumsum([0, *map(len, encoded)])
    kinds = {"labels": np.array(labels, np.int16), "split": np.array(split, np.int8)}
    np.savez(file, data=np.concatenate(encoded), offsets=offsets, **kinds)


def test_a_pack_is_decoded_and_divided_by_its_splits(tmp_path: Path) -> None:
    write_pack(tmp_path / transfer_data.FLOWERS102_FILE, labels=[3, 0, 1, 2, 3], split=[0, 2, 1, 0, 2])
    data = flowers102(CENTRED, tmp_path)
    assert data.classes == 4 and data.train.shape == (2, 3, SIDE, SIDE) and data.train.dtype == torch.uint8
    assert data.train[:, 0, 0, 0].tolist() == [0, 30] and data.train_labels.tolist() == [3, 2]
    assert data.test[:, 2, 9, 9].tolist() == [10, 40] and data.test_labels.tolist() == [0, 3]
    assert flowers102(CENTRED, tmp_path, validation=True).train_labels.tolist() == [3, 1, 2]


def test_small_pictures_are_shown_enlarged(tmp_path: Path) -> None:
    write_pack(tmp_path / transfer_data.CIFAR10_FILE, labels=[3, 0, 1, 2, 9], split=[0, 1, 0, 0, 1], side=32)
    data = cifar10(CENTRED, tmp_path, train=2)
    assert data.train.shape == (2, 3, 32, 32) and data.side == SIDE and data.train_labels.tolist() == [3, 1]
    ((shown, _),) = data.batches(0, 0, 2)
    ((tested, labels),) = data.to("cpu").tests(2)
    assert shown.shape == tested.shape == (2, 3, SIDE, SIDE) and labels.tolist() == [0, 9]
    torch.testing.assert_close(tested[1], torch.full((3, SIDE, SIDE), (40 / 255 - 0.5) / 0.5))


def test_who_has_no_files_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"has no flowers102_sq128.npz: .* SLIMGRAD_DATA, .*transfer_data.shapes"
    ):
        flowers102(CENTRED, tmp_path)
    monkeypatch.setenv("SLIMGRAD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*nowhere: .* SLIMGRAD_DATA"):
        pets(CENTRED)


@pytest.mark.parametrize(
    ("load", "name", "sizes"),
    [
        (flowers102, transfer_data.FLOWERS102_FILE, (102, 1020, 2487)),
        (pets, transfer_data.PETS_FILE, (37, 3680, 1480)),
    ],
)
def test_real_packs_have_the_official_sizes(load, name: str, sizes: tuple[int, int, int]) -> None:
    folder = Path(os.environ.get("SLIMGRAD_DATA", "data"))
    if not (folder / name).is_file():
        pytest.skip(f"needs {name} in the folder that the variable SLIMGRAD_DATA names")
    data = load(IMAGENET)
    assert (data.classes, len(data.train), len(data.test)) == sizes
    assert len(data.train_labels.unique()) == len(data.test_labels.unique()) == data.classes


def test_drawn_shapes_are_the_same_for_a_seed_and_of_all_classes() -> None:
    data, again, other = shapes(CENTRED), shapes(CENTRED), shapes(CENTRED, seed=1)
    assert torch.equal(data.train, again.train) and not torch.equal(data.train, other.train)
    assert data.train.shape == (256, 3, 64, 64) and data.classes == len(data.train_labels.unique()) == 4


# --- training ---------------------------------------------------------------------------------------------------------


def test_the_rate_rises_for_a_tenth_and_falls_to_nothing() -> None:
    shares = [transfer.schedule(number, steps=10, epochs=20) for number in range(200)]
    assert shares[0] == 1 / 20 and shares[19] == shares[20] == 1
    assert shares[20:] == sorted(shares[20:], reverse=True) and shares[-1] < 1e-3
    assert transfer.schedule(499, steps=10, epochs=100) < 1 == transfer.schedule(50, steps=10, epochs=100)
    assert transfer.schedule(0, steps=4, epochs=1) == 1  # so short that nothing is left of a warm-up


def test_training_learns_shapes_and_tells_of_it() -> None:
    model = small()
    fitted = transfer.fit(model, shapes(CENTRED), sgd(model), epochs=8, batch=16, seed=0)
    assert fitted.accuracy > 0.5  # four classes
    assert len(fitted.losses) == 8 and fitted.losses[-1] < fitted.losses[0]
    assert 0 < fitted.step_seconds < 10


def test_the_same_seed_trains_the_same_weights() -> None:
    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = MobileNetV2(4, width=0.35)
        data = shapes(CENTRED, train=16, test=8, side=32)
        transfer.fit(model, data, sgd(model), epochs=1, batch=8, seed=seed)
        return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])

    assert torch.equal(weights(1), weights(1)) and not torch.equal(weights(1), weights(2))


def test_each_epoch_begins_in_training_mode_with_a_call() -> None:
    model, seen = small(), []

    def each_epoch(epoch: int) -> None:
        seen.append((epoch, all(module.training for module in model.modules())))
        transfer.freeze_norms(model)

    data = shapes(CENTRED, train=32, test=8)
    before = model[1].running_mean.clone()
    transfer.fit(model, data, sgd(model), epochs=3, batch=16, seed=0, each_epoch=each_epoch)
    assert seen == [(0, True), (1, True), (2, True)]
    assert torch.equal(model[1].running_mean, before)
    transfer.fit(model, data, sgd(model), epochs=1, batch=16, seed=0)
    assert not torch.equal(model[1].running_mean, before)


def test_testing_leaves_modes_and_statistics_as_they_are() -> None:
    model = small()
    model[1].eval()
    modes, before = [module.training for module in model.modules()], model[1].running_mean.clone()
    transfer.accuracy(model, shapes(CENTRED, train=8, test=8))
    assert [module.training for module in model.modules()] == modes and torch.equal(model[1].running_mean, before)


def test_only_what_is_asked_for_trains() -> None:
    model = small()
    model.requires_grad_(False)[-1].requires_grad_(True)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    transfer.fit(model, shapes(CENTRED, train=32, test=8), sgd(model), epochs=1, batch=16, seed=0)
    same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert same == [True] * (len(before) - 2) + [False, False]


def test_a_head_has_a_rate_of_its_own_and_long_gradients_are_shortened() -> None:
    model = small()
    optimizer = SGD(transfer.two_rates(model, model[-1], lr=0.5, body_lr=0.05))
    parts = [[parameter.detach().clone() for parameter in group["params"]] for group in optimizer.param_groups]
    assert sum(map(len, parts)) == len(list(model.parameters())) and len(parts[0]) == 2
    data = shapes(CENTRED, train=16, test=8)
    transfer.fit(model, data, optimizer, epochs=1, batch=16, seed=0, clip=1e-3)
    moved = [
        torch.cat([(a - b).flatten() for a, b in zip(group["params"], before, strict=True)]).norm().item()
        for group, before in zip(optimizer.param_groups, parts, strict=True)
    ]
    assert math.hypot(moved[0] / 0.5, moved[1] / 0.05) == pytest.approx(1e-3, rel=0.01)


def test_held_out_pictures_are_a_fifth_and_not_trained_on() -> None:
    data = dataclasses.replace(shapes(CENTRED, train=21, test=4), train_labels=torch.arange(21))
    held_out = data.held_out()
    assert len(held_out.test) == len(held_out.test_labels) == 5
    assert torch.equal(torch.cat([held_out.train_labels, held_out.test_labels]).sort().values, torch.arange(21))
    assert torch.equal(held_out.test, data.train[held_out.test_labels])
    assert torch.equal(held_out.test_labels, data.held_out().test_labels)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    model = small()
    with pytest.raises(ValueError, match="a batch of 16 is more than there is to train on"):
        transfer.fit(model, shapes(CENTRED, train=8, test=8), sgd(model), epochs=1, batch=16, seed=0)
