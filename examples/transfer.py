"""Training a network that knows one task on another: what examples and benchmarks of transfer learning share.

optimizer = SGD(transfer.two_rates(model, model.classifier, lr=0.2, body_lr=0.05))
fitted = transfer.fit(model, data, optimizer, epochs=10, batch=32, seed=0)
print(f"{fitted.accuracy:.1%} right, {1000 * fitted.step_seconds:.0f} ms per step")
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

WARMUP_EPOCHS = 5
"""As in TraDy's paper, which trains longer; never more than a tenth of all."""
LARGEST_WARMUP = 0.1


class Data(Protocol):
    """What `fit` asks of a data set; transfer_data.Pictures is one."""

    def steps(self, size: int) -> int:
        """Batches in an epoch."""

    def batches(self, seed: int, epoch: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch of inputs and their classes."""

    def tests(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The test set, once."""


@dataclass(frozen=True)
class Fitted:
    """One training done."""

    accuracy: float
    """Share of right predictions on the test set after the last epoch."""
    step_seconds: float
    """Median time of forward, backward and update; making the batch is not in it."""
    losses: tuple[float, ...]
    """Mean training loss of each epoch."""


def fit(
    model: nn.Module,
    data: Data,
    optimizer: Optimizer,
    epochs: int,
    batch: int,
    seed: int,
    *,
    clip: float | None = None,
    each_epoch: Callable[[int], object] | None = None,
) -> Fitted:
    """Train by cross-entropy on the device of the model, and test.

    The rates of the optimizer's groups rise to what they are during warm-up, and fall to zero along a cosine. A
    gradient longer than `clip` is shortened to it. `each_epoch(epoch)` is called before each epoch, after the model was
    put into training mode: what it puts into evaluation mode stays there for the epoch.
    """
    device = next(model.parameters()).device
    steps, times, losses = data.steps(batch), [], []
    if steps == 0:
        raise ValueError(f"a batch of {batch} is more than there is to train on")
    rates = LambdaLR(optimizer, lambda number: schedule(number, steps, epochs))
    for epoch in range(epochs):
        model.train()
        if each_epoch is not None:
            each_epoch(epoch)
        total = torch.zeros((), device=device)
        for number, (inputs, targets) in enumerate(data.batches(seed, epoch, batch), epoch * steps):
            # Anew in each step, so that a method that draws numbers cannot shift the dropout of later steps.
            torch.manual_seed((seed << 20) + number)
            began = _now(device)
            total += step(model, optimizer, inputs.to(device), targets.to(device), clip)
            times.append(_now(device) - began)
            rates.step()
        losses.append(float(total) / steps)
    return Fitted(accuracy(model, data, 2 * batch), statistics.median(times), tuple(losses))


def step_seconds(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, steps: int = 5) -> float:
    """Median time of a step, after two more."""
    times = []
    for _ in range(steps + 2):
        began = _now(inputs.device)
        step(model, optimizer, inputs, targets)
        times.append(_now(inputs.device) - began)
    return statistics.median(times[2:])


def step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, targets: Tensor, clip: float | None = None) -> Tensor:
    """Forward, backward and update; the loss."""
    loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    if clip is not None:
        # What the optimizer trains, which under a budget is not what the model has: a part of a weight, for one.
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(trained, clip)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@torch.no_grad()
def accuracy(model: nn.Module, data: Data, batch: int = 64) -> float:
    """The share of right predictions on the test set. The model is left in the modes it came in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    device = next(model.parameters()).device
    right = [model(inputs.to(device)).argmax(1) == targets.to(device) for inputs, targets in data.tests(batch)]
    for module, training in modes:
        module.training = training
    return float(torch.cat(right).float().mean())


def schedule(number: int, steps: int, epochs: int) -> float:
    """The share of the peak rate in a step: a linear warm-up, then a cosine to zero."""
    rising = round(steps * min(WARMUP_EPOCHS, LARGEST_WARMUP * epochs))
    if number < rising:
        return (number + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (number - rising) / max(1, steps * epochs - rising)))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


# --- what is trained --------------------------------------------------------------------------------------------------


def two_rates(model: nn.Module, head: nn.Module, lr: float, body_lr: float) -> list[dict[str, Any]]:
    """Groups for an optimizer: a new head must move far, and what was pretrained must not."""
    mine = {id(parameter) for parameter in head.parameters()}
    body = [parameter for parameter in model.parameters() if id(parameter) not in mine]
    return [{"params": list(head.parameters()), "lr": lr}, {"params": body, "lr": body_lr}]


def freeze_norms(model: nn.Module) -> None:
    """Have BatchNorm use the statistics it came with: to be called from `each_epoch`, as train() ends it."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
