"""Pictures for transfer learning: Flowers-102, Oxford-IIIT Pets, CIFAR-10, and drawn shapes where no files are at hand.

    data = transfer_data.flowers102(model.look)          # files below the folder named by SLIMGRAD_DATA, else data/
    data = transfer_data.shapes(model.look)              # no files
    for images, labels in data.batches(seed=0, epoch=0, size=16): ...

Pictures stay on their device as bytes; batches are cut, mirrored and normalized there. What is drawn for them follows
from seed and epoch alone and comes from the CPU, so that it is the same on every device.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from mobilenets import SIDE, Look
from torch import Tensor

FLOWERS102_FILE = "flowers102_sq128.npz"
PETS_FILE = "pets_sq128.npz"
CIFAR10_FILE = "cifar10_webp90.npz"
TRAIN, VALIDATION, TEST = 0, 1, 2

SMALLEST_CROP = 0.5
"""Share of the picture's area that a training batch shows at least."""
LONGEST_SIDE = 4 / 3
"""A crop's largest ratio of width to height, and of height to width."""

Batch = tuple[Tensor, Tensor]
"""Normalized pictures, and their classes."""


@dataclass(frozen=True, eq=False)
class Pictures:
    """A data set: training and test pictures as bytes in the order picture, channel, row, column."""

    name: str
    classes: int
    look: Look
    train: Tensor
    train_labels: Tensor
    test: Tensor
    test_labels: Tensor
    enlarged: int | None = None
    """Pixels of a side as they are shown, if those are more than there are."""

    @property
    def side(self) -> int:
        return self.enlarged or self.train.shape[-1]

    def to(self, device: torch.device | str) -> Pictures:
        tensors = (self.train, self.train_labels, self.test, self.test_labels)
        return Pictures(self.name, self.classes, self.look, *(t.to(device) for t in tensors), self.enlarged)

    def held_out(self) -> Pictures:
        """Every fifth training picture, in a random order, in place of the test set: to choose rates by."""
        order = torch.randperm(len(self.train), generator=torch.Generator().manual_seed(0)).to(self.train.device)
        held, rest = order[::5], torch.cat([order[place::5] for place in range(1, 5)])
        parts = (self.train[rest], self.train_labels[rest], self.train[held], self.train_labels[held])
        return Pictures(f"{self.name}, held out", self.classes, self.look, *parts, self.enlarged)

    def steps(self, size: int) -> int:
        """Batches in an epoch."""
        return len(self.train) // size

    def batches(self, seed: int, epoch: int, size: int) -> Iterator[Batch]:
        """One pass over the training pictures in full batches; what is left over is not shown in this epoch."""
        generator = torch.Generator().manual_seed((seed << 20) + epoch)
        order = torch.randperm(len(self.train), generator=generator).to(self.train.device)
        for chosen in order.split(size)[: self.steps(size)]:
            windows = _windows(size, generator).to(self.train.device)
            yield _cut(self._normalized(self.train[chosen]), windows, self.side), self.train_labels[chosen]

    def tests(self, size: int) -> Iterator[Batch]:
        """The test set, once, as it is."""
        for images, labels in zip(self.test.split(size), self.test_labels.split(size), strict=True):
            yield _whole(self._normalized(images), self.side), labels

    def _normalized(self, images: Tensor) -> Tensor:
        mean, std = (torch.tensor(row, device=images.device).view(3, 1, 1) for row in (self.look.mean, self.look.std))
        return (images / 255 - mean) / std


def _windows(count: int, generator: torch.Generator) -> Tensor:
    """What of each picture is shown, as affine maps from the batch's coordinates (-1 to 1) to the picture's.

    Windows differ in area, shape and place, all inside the picture; every second one is mirrored.
    """
    area, shape, x, y, mirrored = torch.rand(5, count, generator=generator)
    ratio = LONGEST_SIDE ** (shape - 0.5)  # the square root of width over height
    side = (SMALLEST_CROP + (1 - SMALLEST_CROP) * area).sqrt()
    width, height = (side * ratio).clamp(max=1), (side / ratio).clamp(max=1)
    maps = torch.zeros(count, 2, 3)
    maps[:, 0, 0] = torch.where(mirrored < 0.5, -width, width)
    maps[:, 1, 1] = height
    maps[:, 0, 2] = (2 * x - 1) * (1 - width)
    maps[:, 1, 2] = (2 * y - 1) * (1 - height)
    return maps


def _cut(images: Tensor, windows: Tensor, side: int) -> Tensor:
    """The windows, enlarged."""
    grid = F.affine_grid(windows, [*images.shape[:2], side, side], align_corners=False)
    return F.grid_sample(images, grid, padding_mode="border", align_corners=False)


def _whole(images: Tensor, side: int) -> Tensor:
    if images.shape[-1] == side:
        return images
    return F.interpolate(images, size=(side, side), mode="bilinear", align_corners=False)


# --- real pictures ----------------------------------------------------------------------------------------------------


def data_folder() -> Path:
    return Path(os.environ.get("SLIMGRAD_DATA", "data"))


def flowers102(look: Look, folder: Path | None = None, *, validation: bool = False) -> Pictures:
    """102 kinds of flowers: 1020 pictures to train on, as many for validation that can be added, 2487 to test on."""
    splits = (TRAIN, VALIDATION) if validation else (TRAIN,)
    return _pack("Flowers-102", _found(folder, FLOWERS102_FILE), look, splits)


def pets(look: Look, folder: Path | None = None) -> Pictures:
    """37 breeds of cats and dogs: 3680 pictures to train on, 1480 to test on."""
    return _pack("Pets", _found(folder, PETS_FILE), look, (TRAIN,))


def cifar10(look: Look, folder: Path | None = None, train: int = 10_000) -> Pictures:
    """10 kinds of things, 32 pixels shown as 128: the first 10,000 pictures to train on, and 10,000 to test on."""
    file = _found(folder, CIFAR10_FILE)
    images, labels, split = _decoded(file, 32)
    first, test = (split == TRAIN).nonzero().flatten()[:train], split == 1
    return Pictures("CIFAR-10", 10, look, images[first], labels[first], images[test], labels[test], SIDE)


def _found(folder: Path | None, name: str) -> Path:
    folder = data_folder() if folder is None else folder
    if not (folder / name).is_file():
        what = f"the folder {folder} has no {name}" if folder.is_dir() else f"there is no folder {folder}"
        raise FileNotFoundError(
            f"{what}: name the folder that has {name} by the variable SLIMGRAD_DATA, or train on drawn shapes, which "
            "need no files (transfer_data.shapes)"
        )
    return folder / name


def _pack(name: str, file: Path, look: Look, splits: tuple[int, ...]) -> Pictures:
    images, labels, split = _decoded(file, SIDE)
    train, test = torch.isin(split, torch.tensor(splits)), split == TEST
    return Pictures(name, int(labels.max()) + 1, look, images[train], labels[train], images[test], labels[test])


@cache
def _decoded(file: Path, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Pictures, labels and splits of a pack: seconds, once per process."""
    arrays = dict(np.load(file))
    offsets = arrays["offsets"]
    images = np.empty((len(offsets) - 1, 3, side, side), dtype=np.uint8)
    for number in range(len(images)):
        images[number] = _one_decoded(arrays["data"][offsets[number] : offsets[number + 1]].tobytes())
    return torch.from_numpy(images), torch.from_numpy(arrays["labels"]).long(), torch.from_numpy(arrays["split"])


def _one_decoded(encoded: bytes) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


# --- drawn shapes -----------------------------------------------------------------------------------------------------

SHAPES = ("disc", "square", "ring", "cross")


def shapes(look: Look, train: int = 256, test: int = 256, side: int = 64, seed: int = 0) -> Pictures:
    """Discs, squares, rings and crosses of any colour, size and place on a noisy ground of any colour."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SHAPES), (train + test,), generator=generator)
    images = _drawn(labels, side, generator)
    return Pictures("shapes", len(SHAPES), look, images[:train], labels[:train], images[train:], labels[train:])


def _drawn(labels: Tensor, side: int, generator: torch.Generator) -> Tensor:
    count = len(labels)
    sizes = 0.25 + 0.2 * torch.rand(count, 1, 1, generator=generator)  # from the middle to the edge
    places = (1 - sizes) * (2 * torch.rand(2, count, 1, 1, generator=generator) - 1)
    axis = torch.linspace(-1, 1, side)
    x, y = (axis - places[0]).abs() / sizes, (axis[:, None] - places[1]).abs() / sizes
    far, near, round_ = torch.maximum(x, y), torch.minimum(x, y), x.hypot(y)
    masks = torch.stack([round_ < 1, far < 0.9, (round_ < 1) & (round_ > 0.6), (far < 1) & (near < 0.3)])
    inside = masks[labels, torch.arange(count)][:, None]
    colours = torch.rand(2, count, 3, 1, 1, generator=generator)
    colours[1] = (colours[0] + 0.3 + 0.4 * colours[1]) % 1  # never the colour of the ground
    noise = 0.05 * torch.randn(count, 3, side, side, generator=generator)
    return ((torch.where(inside, colours[1], colours[0]) + noise).clamp(0, 1) * 255).round().to(torch.uint8)
