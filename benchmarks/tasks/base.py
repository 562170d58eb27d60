"""What a task is: where its data comes from, the model it trains, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

Batch = tuple[tuple[Tensor, ...], Tensor]
"""What the model is called with, and the class of each prediction."""


@dataclass(frozen=True)
class Places:
    """Folders: the data as described in the docstring of accuracy.py, and what is decoded from it."""

    data: Path
    cache: Path


class Data(Protocol):
    """A data set on one device. Every draw follows from the seed alone and is made on the CPU, before training."""

    @property
    def examples(self) -> int:
        """To train on; as many make an epoch."""

    def batches(self, seed: int, steps: int, size: int) -> Iterator[Batch]:
        """Training batches, all of them full."""

    def tests(self, size: int) -> Iterator[Batch]:
        """The test set, once."""


@dataclass(frozen=True)
class Source:
    """A data set by name, with the files it is read from."""

    name: str
    files: tuple[str, ...]
    """Below the data folder."""
    load: Callable[[Places, torch.device], Data]
    remark: str = ""
    """What a reader of the results must know about the data."""

    def missing(self, places: Places) -> list[str]:
        return [name for name in self.files if not (places.data / name).is_file()]


@dataclass(frozen=True)
class Recipe:
    """How a model is trained. A finished training counts for a table only if its recipe is the table's."""

    steps: int
    batch: int
    optimizer: str
    lr: float
    """At the peak: the rate rises linearly during warm-up and falls to zero along a cosine."""
    weight_decay: float
    """For weights of two and more dimensions."""
    warmup: float
    """Share of the steps."""
    clip: float | None = None
    """Largest norm of the gradient."""
    test_batches: int | None = None
    """Batches of the test set that are looked at; None is all."""


@dataclass(frozen=True)
class Metric:
    """The figure in the table."""

    name: str
    field: str
    """Of an Entry."""
    scale: float
    digits: int
    higher_is_better: bool

    def shown(self, value: float, sign: str = "") -> str:
        return f"{value * self.scale:{sign}.{self.digits}f}"


ACCURACY = Metric("accuracy, %", "accuracy", scale=100, digits=2, higher_is_better=True)
NATS_PER_CHARACTER = Metric("loss, nats per character", "loss", scale=1, digits=4, higher_is_better=False)


@dataclass(frozen=True)
class Task:
    """One model on one kind of data."""

    model: str
    sources: tuple[Source, ...]
    """The first whose files are all there is used."""
    build: Callable[[Places], nn.Module]
    recipe: Recipe
    metric: Metric = ACCURACY

    def source(self, places: Places) -> Source | None:
        return next((source for source in self.sources if not source.missing(places)), None)


def epochs_of(count: int, generator: torch.Generator, steps: int, size: int) -> Tensor:
    """One row of indices per step: as many shuffled passes over `count` examples as are needed."""
    passes = -(-steps * size // count)
    order = torch.cat([torch.randperm(count, generator=generator) for _ in range(passes)])
    return order[: steps * size].view(steps, size)
