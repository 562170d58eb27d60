"""One training from its seed to its figures."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import slimgrad as sg
from slimgrad.rules.wording import called
from tasks import TASKS
from tasks.base import Batch, Data, Places, Recipe, Source

UNTOUCHED = "untouched"
PLAN = "plan("
"""How the configurations begin that are planned."""
MIN_BYTES = 65536
"""By default slimgrad leaves storages under 2 MiB alone on a GPU. These models are small: here it must not."""

LOOK_EVERY = 100
"""Steps between two looks at the loss. Each makes the host wait for the device."""

ALLOCATOR_NOTE = "the CUDA allocator held"
"""Begins the report's note that every run on a GPU has; the others tell that something did not go as usual."""

MOMENTUM = 0.9
BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class Job:
    """One training to be done."""

    task: str
    source: str
    config: str
    seed: int
    recipe: Recipe
    device: str
    machine: str
    places: Places

    @property
    def name(self) -> str:
        return f"{self.task} {self.config} seed {self.seed}"

    @property
    def identity(self) -> dict[str, Any]:
        """All that the figures depend on, as it stands in the JSON file."""
        shown = {name: getattr(self, name) for name in ("task", "source", "config", "seed", "machine")}
        return {**shown, "recipe": asdict(self.recipe), "min_bytes": MIN_BYTES}


@dataclass(frozen=True)
class Entry:
    """One training done: its identity, and what came of it."""

    identity: dict[str, Any]
    training_losses: tuple[float, ...]
    """Means over LOOK_EVERY steps each; the last may be over fewer."""
    diverged_by: int | None
    """The step by which the loss was no number any more."""
    seconds: float
    """How long it took; trainings share the machine, so that this is no measurement."""
    accuracy: float | None
    """Share of right predictions on the test set; None where training diverged, as the loss is."""
    loss: float | None
    """Mean cross-entropy on the test set."""
    kept_before: int | None = None
    """Bytes autograd would keep of the model's forward, by slimgrad's report; None for an untouched model."""
    kept_after: int | None = None
    """Bytes really kept."""
    packed_sites: int = 0
    notes: tuple[str, ...] = ()
    """What slimgrad's report remarks: where it stood aside, what it did not recognise."""


def trained(job: Job) -> Entry:
    """Do it. The seed alone decides weights, batches and dropout, whatever the configuration."""
    began = time.perf_counter()
    device = torch.device(job.device)
    task = TASKS[job.task]
    source = task.source(job.places)
    assert source is not None, "the job was planned where the data was there"
    data = loaded(source, job.places, device)
    torch.manual_seed(job.seed)
    model = task.build(job.places).to(device, memory_format=torch.channels_last)
    optimizer = optimizer_for(model, job.recipe, device)
    what = job.config if not job.config.startswith(PLAN) else plan_for(job, model, data, device)
    run = None if job.config == UNTOUCHED else sg.apply(model, what, optimizer=optimizer, min_bytes=MIN_BYTES)
    losses, diverged_by = fitted(model, data, job.recipe, job.seed, device, optimizer, run)
    kept = {} if run is None else kept_under(run)
    figures = evaluated(model, islice(data.tests(2 * job.recipe.batch), job.recipe.test_batches), device)
    if diverged_by is None and not math.isfinite(figures["loss"]):
        diverged_by = job.recipe.steps  # the last update was one too many
    if diverged_by is not None:
        figures = dict.fromkeys(figures)
    return Entry(
        identity=job.identity,
        training_losses=tuple(losses),
        diverged_by=diverged_by,
        seconds=round(time.perf_counter() - began, 2),
        **figures,
        **kept,
    )


def plan_for(job: Job, model: nn.Module, data: Data, device: torch.device) -> sg.Plan:
    """As in "plan(budget='8x')": for a batch of this training."""
    _, settings = called(job.config)
    inputs, targets = next(iter(data.batches(job.seed, 1, job.recipe.batch)))
    with precision(device):
        profile = sg.profile(model.train(), tuple(inputs), lambda output: cross_entropy(output, targets), fake=True)
    return sg.plan(profile, settings.pop("budget"), min_bytes=MIN_BYTES, **settings)


def kept_under(run: sg.Run) -> dict[str, Any]:
    """What slimgrad's report says, and the end of its work on the model."""
    report = run.report()
    run.remove()
    return {
        "kept_before": report.kept_before,
        "kept_after": report.kept_after,
        "packed_sites": len(report.sites),
        "notes": tuple(note for note in report.notes if not note.startswith(ALLOCATOR_NOTE)),
    }


@cache
def loaded(source: Source, places: Places, device: torch.device) -> Data:
    """The data on the device, once per process."""
    return source.load(places, device)


def fitted(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    seed: int,
    device: torch.device,
    optimizer: Optimizer,
    run: sg.Run | None = None,
) -> tuple[list[float], int | None]:
    """Train. Mean losses along the way, and the step by which the loss was no number any more."""
    epoch = max(1, data.examples // recipe.batch)
    total, losses, looked = torch.zeros((), device=device), [], 0
    for step, loss in enumerate(stepped(model, data, recipe, seed, device, optimizer)):
        total += loss
        if run is not None and (step + 1) % epoch == 0:
            run.epoch()
        if (step + 1) % LOOK_EVERY == 0 or step + 1 == recipe.steps:
            losses.append(float(total) / (step + 1 - looked))
            looked = step + 1
            total.zero_()
            if not math.isfinite(losses[-1]):
                return losses[:-1], looked
    return losses, None


def stepped(
    model: nn.Module,
    data: Data,
    recipe: Recipe,
    seed: int,
    device: torch.device,
    optimizer: Optimizer | None = None,
) -> Iterator[Tensor]:
    """Train step by step, by the recipe's optimizer or a given one; the loss of each, on the device."""
    model.train()
    optimizer = optimizer or optimizer_for(model, recipe, device)
    for step, (inputs, targets) in enumerate(data.batches(seed, recipe.steps, recipe.batch)):
        # Anew in each step, so that a codec that draws numbers cannot shift the dropout of all later steps.
        torch.manual_seed((seed << 20) + step + 1)
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * schedule(step, recipe)
        with precision(device):
            loss = cross_entropy(model(*inputs), targets)
        loss.backward()
        if recipe.clip is not None:
            # What the optimizer trains may be parts of the model's weights, as under trady.
            trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(trained, recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.detach()


@torch.no_grad()
def evaluated(model: nn.Module, tests: Iterator[Batch], device: torch.device) -> dict[str, Any]:
    """Mean cross-entropy and share of right predictions."""
    model.eval()
    loss, right, count = torch.zeros((), device=device), torch.zeros((), device=device, dtype=torch.long), 0
    for inputs, targets in tests:
        with precision(device):
            logits = model(*inputs)
        loss += cross_entropy(logits, targets) * targets.numel()
        right += (logits.argmax(-1) == targets).sum()
        count += targets.numel()
    return {"loss": float(loss) / count, "accuracy": int(right) / count}


def precision(device: torch.device) -> AbstractContextManager[Any]:
    """bf16 autocast on a GPU, single precision on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())


def optimizer_for(model: nn.Module, recipe: Recipe, device: torch.device) -> Optimizer:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = device.type == "cuda"
    if recipe.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=recipe.lr, momentum=MOMENTUM, nesterov=True, fused=fused)
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=BETAS, fused=fused)


def schedule(step: int, recipe: Recipe) -> float:
    """The share of the peak rate: a linear warm-up, then a cosine to zero."""
    rising = max(1, round(recipe.warmup * recipe.steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, recipe.steps - rising)))
