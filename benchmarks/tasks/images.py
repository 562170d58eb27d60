"""CIFAR-10, or where it is absent scikit-learn's digits: on the device as bytes, cropped and mirrored there."""

from __future__ import annotations

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tasks.base import Batch, Places, Source, epochs_of

SIDE = 32
CLASSES = 10
PADDING = 4
CIFAR10_FILE = "cifar10_webp90.npz"
CHUNK = 1000
DIGITS_FOR_TEST = 360


@dataclass(frozen=True)
class Look:
    """How bytes become the model's input."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    mirror: bool
    """Whether a mirrored image is still one of its class."""


CIFAR10_LOOK = Look((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), mirror=True)
DIGITS_LOOK = Look((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), mirror=False)


class Images:
    """Images of 3x32x32 bytes. Training images have a black border from which crops are cut."""

    def __init__(
        self, train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], look: Look, device: torch.device
    ) -> None:
        self.device = device
        self.look = look
        self.images = F.pad(train[0].to(device), (PADDING,) * 4)
        self.labels = train[1].to(device)
        self.test_images = test[0].to(device)
        self.test_labels = test[1].to(device)
        self.mean = torch.tensor(look.mean, device=device).view(1, 3, 1, 1)
        self.std = torch.tensor(look.std, device=device).view(1, 3, 1, 1)
        self.side = torch.arange(SIDE, device=device)
        self.channels = torch.arange(3, device=device).view(1, 3, 1, 1)

    @property
    def examples(self) -> int:
        return len(self.images)

    def batches(self, seed: int, steps: int, size: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        order = epochs_of(len(self.images), generator, steps, size).to(self.device)
        corners = torch.randint(2 * PADDING + 1, (steps, 2, size), generator=generator).to(self.device)
        mirrored = (torch.rand(steps, size, generator=generator) < 0.5).to(self.device)
        for step in range(steps):
            images = self._cropped(order[step], *corners[step])
            if self.look.mirror:
                images = torch.where(mirrored[step].view(-1, 1, 1, 1), images.flip(3), images)
            yield (self._scaled(images),), self.labels[order[step]]

    def tests(self, size: int) -> Iterator[Batch]:
        for images, labels in zip(self.test_images.split(size), self.test_labels.split(size), strict=True):
            yield (self._scaled(images),), labels

    def _cropped(self, chosen: Tensor, top: Tensor, left: Tensor) -> Tensor:
        rows = (top[:, None] + self.side)[:, None, :, None]
        columns = (left[:, None] + self.side)[:, None, None, :]
        return self.images[chosen.view(-1, 1, 1, 1), self.channels, rows, columns]

    def _scaled(self, images: Tensor) -> Tensor:
        return (images.float() / 255 - self.mean) / self.std


# --- CIFAR-10 ---------------------------------------------------------------------------------------------------------


def load_cifar10(places: Places, device: torch.device) -> Images:
    packed = places.data / CIFAR10_FILE
    # The size stands in the name, so that another pack is not mistaken for this one.
    cached = places.cache / f"{packed.stem}.{packed.stat().st_size}.npz"
    if not cached.is_file():
        _write_decoded(packed, cached)
    arrays = {name: torch.from_numpy(array) for name, array in dict(np.load(cached)).items()}
    images, labels, train = arrays["images"], arrays["labels"].long(), arrays["split"] == 0
    return Images((images[train], labels[train]), (images[~train], labels[~train]), CIFAR10_LOOK, device)


def _write_decoded(packed: Path, cached: Path) -> None:
    arrays = dict(np.load(packed))
    images = decoded(arrays["data"], arrays["offsets"])
    cached.parent.mkdir(parents=True, exist_ok=True)
    unfinished = cached.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez(file, images=images, labels=arrays["labels"], split=arrays["split"])
    unfinished.replace(cached)


def decoded(data: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Every image of a pack, as bytes in the order channel, row, column."""
    count = len(offsets) - 1
    images = np.empty((count, 3, SIDE, SIDE), dtype=np.uint8)

    def decode(first: int) -> None:
        for number in range(first, min(first + CHUNK, count)):
            images[number] = _one_decoded(data[offsets[number] : offsets[number + 1]].tobytes())

    with ThreadPoolExecutor() as pool:
        list(pool.map(decode, range(0, count, CHUNK)))
    return images


def _one_decoded(encoded: bytes) -> np.ndarray:
    from PIL import Image

    with Image.open(io.BytesIO(encoded)) as image:
        return np.asarray(image.convert("RGB")).transpose(2, 0, 1)


# --- digits -----------------------------------------------------------------------------------------------------------


def load_digits(places: Places, device: torch.device) -> Images:
    """1797 handwritten digits, enlarged to the size of CIFAR-10's images."""
    from sklearn import datasets

    bunch = datasets.load_digits()
    small = torch.tensor(bunch.images, dtype=torch.float32)[:, None] * (255 / 16)
    large = F.interpolate(small, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    images = large.round().to(torch.uint8).expand(-1, 3, -1, -1)
    labels = torch.tensor(bunch.target, dtype=torch.long)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:DIGITS_FOR_TEST], order[DIGITS_FOR_TEST:]
    return Images((images[train], labels[train]), (images[test], labels[test]), DIGITS_LOOK, device)


CIFAR10 = Source(
    "CIFAR-10",
    (CIFAR10_FILE,),
    load_cifar10,
    remark="CIFAR-10 is stored as WebP of quality 90, which is lossy: compare rows, not with published accuracies",
)
DIGITS = Source(
    "digits (fallback)",
    (),
    load_digits,
    remark=f"{CIFAR10_FILE} is not in the data folder: scikit-learn's digits stand in for CIFAR-10",
)
