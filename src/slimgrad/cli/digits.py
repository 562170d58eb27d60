"""The demo's data, network and training loop: small enough for a laptop, real enough to mean something."""

from __future__ import annotations

import importlib
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.errors import SlimgradError

BATCH = 64
SIDE = 32
TEST_IMAGES = 360
WARM_UP = 3

State = dict[str, Tensor]


@dataclass(frozen=True)
class Data:
    """Images and labels, for training and for testing."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @property
    def steps(self) -> int:
        """Full batches in one epoch."""
        return len(self.images) // BATCH

    def batches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of full batches in an order that only the seed decides."""
        order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(seed))
        for chosen in order[: self.steps * BATCH].view(self.steps, BATCH):
            yield self.images[chosen], self.labels[chosen]

    def negatives(self) -> Data:
        """The same digits, dark on light."""
        return Data(1 - self.images, self.labels, 1 - self.test_images, self.test_labels)


@dataclass(frozen=True)
class Outcome:
    """What one training gave."""

    state: State
    kept_bytes: int
    """Bytes kept for backward at the end of the last step's forward."""
    accuracy: float
    step_ms: float
    """Median time of a step."""


def load_digits() -> Data:
    """Scikit-learn's 1797 handwritten digits, enlarged so that activations weigh something."""
    try:
        datasets = importlib.import_module("sklearn.datasets")
    except ModuleNotFoundError as error:
        raise SlimgradError(
            "the demo trains on scikit-learn's digits, and scikit-learn is not installed: pip install scikit-learn"
        ) from error
    bunch = datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, size=(SIDE, SIDE), mode="bilinear", align_corners=False)
    labels = torch.tensor(bunch.target, dtype=torch.long)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return Data(images[train], labels[train], images[test], labels[test])


def block(inputs: int, outputs: int, act: nn.Module) -> nn.Sequential:
    layers = {
        "conv": nn.Conv2d(inputs, outputs, 3, padding=1),
        "norm": nn.BatchNorm2d(outputs),
        "act": act,
        "pool": nn.MaxPool2d(2),
    }
    return nn.Sequential(OrderedDict(layers))


def network() -> nn.Sequential:
    """Three blocks of convolution, batch norm, ReLU or GELU and max-pool, and a head: about 100,000 parameters."""
    features = 96 * (SIDE // 8) ** 2
    head = nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 10))
    body = nn.Sequential(block(24, 48, nn.GELU()), nn.Dropout(0.1), block(48, 96, nn.GELU()))
    return nn.Sequential(OrderedDict(stem=block(1, 24, nn.ReLU()), body=body, head=head))


def example() -> tuple[nn.Module, tuple[Tensor, Tensor], Callable[..., Tensor]]:
    """The network, a batch for it and the loss, as `profile` takes them."""
    batch = torch.zeros(BATCH, 1, SIDE, SIDE), torch.zeros(BATCH, dtype=torch.long)
    return network().train(), batch, F.cross_entropy


@dataclass(frozen=True)
class Start:
    """What a training begins with."""

    state: State | None
    """Weights; None for random ones."""
    frozen: bool
    """Whether only the first convolution and the head are trained."""
    seed: int


def prepared(start: Start) -> nn.Sequential:
    """A network to be trained."""
    torch.manual_seed(start.seed)
    model = network().train()
    if start.state is not None:
        model.load_state_dict(start.state)
    if start.frozen:
        model.requires_grad_(False).eval()
        for part in (model.get_submodule("stem.conv"), model.get_submodule("head")):
            part.requires_grad_(True).train()
    return model


def trained(
    data: Data, start: Start, *, whats: Sequence[Any], epochs: int, tick: Callable[[], object]
) -> list[Outcome]:
    """Train one network per entry of `whats` (None is untouched), step by step in turn.

    The seed alone decides weights, order and dropout, so that exact configurations must end with the same weights; and
    a machine that slows down slows down for all of them alike.
    """
    trainings = [Training(prepared(start), what) for what in whats]
    number = start.seed << 20
    for epoch in range(epochs):
        for training in trainings:
            training.begin(epoch)
        for images, labels in data.batches(start.seed + epoch):
            number += 1
            for training in trainings:
                training.step(images, labels, number)
                tick()
    return [training.outcome(data) for training in trainings]


class Training:
    """One network on its way, under `what` or untouched."""

    def __init__(self, model: nn.Module, what: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
        self.run = None if what is None else sg.apply(model, what, optimizer=self.optimizer)
        self.seconds: list[float] = []

    def begin(self, epoch: int) -> None:
        if epoch and self.run is not None:
            self.run.epoch()

    def step(self, images: Tensor, labels: Tensor, seed: int) -> None:
        torch.manual_seed(seed)
        began = time.perf_counter()
        loss = F.cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.seconds.append(time.perf_counter() - began)

    def outcome(self, data: Data) -> Outcome:
        state = {name: value.clone() for name, value in self.model.state_dict().items()}
        if self.run is None:
            kept = sg.profile(self.model, data.images[:BATCH]).kept_bytes
        else:
            kept = self.run.report().kept_after
            self.run.remove()
        step = 1000 * statistics.median(self.seconds[WARM_UP:] or self.seconds)
        return Outcome(state, kept, accuracy(self.model, data), step)


@contextmanager
def one_thread() -> Iterator[None]:
    """The same sums on every machine, and step times that a busy machine distorts least."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """The share of test images told right."""
    model.eval()
    return float((model(data.test_images).argmax(1) == data.test_labels).float().mean())


def same_state(one: State, other: State) -> bool:
    """Whether two states agree bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
