"""How a training goes step by step when gradients see less, and what that does to the noise of gradients.

    python benchmarks/convergence.py                                   # the small ViT and ResNet-18 of accuracy.py
    python benchmarks/convergence.py --tasks vit --configs "dropit(keep=0.5)" --seeds 0 1 --plot out/convergence.png
    python benchmarks/convergence.py --render one.json other.json --plot out/convergence.png     # trains nothing
    python benchmarks/convergence.py --quick                           # a few steps: does it run?

All configurations of a seed begin with the same weights and see the same batches and dropout draws.

Noise: at some steps the untouched training halts, and two copies of the model take the gradients of the same further
batches, one untouched (g), one under the configuration (h). All figures are squared norms over that of the mean g:
`noise` is the variance of g over batches, `noise under` that of h, and `bias` what the mean of h is off; `cosine` is
between the two means, `by weight` the mean of such cosines for single weights. The paper behind DropIT says that
dropping lowers the noise; a bias is what it would cost.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from accuracy import QUICK, check_configs
from bandwidth import written
from rich.console import Console
from rich.progress import track
from tasks import TASKS
from tasks.base import Batch, Data, Places, Recipe
from tasks.training import MIN_BYTES, UNTOUCHED, cross_entropy, loaded, precision, stepped
from torch import Tensor, nn

import slimgrad as sg

CONFIGS = ("dropit(keep=0.5)", "dropit(keep=0.1)")
SEEDS = (0, 1, 2)
PROBES = (0.02, 0.2, 0.6)
"""When noise is measured, by the share of steps done."""
PROBED_BATCHES = 32
FAR = 10_000
"""Added to the step, to be the seed of the batches that are probed: no training has it."""


@dataclass(frozen=True)
class Noise:
    """Of one configuration at one step."""

    config: str
    step: int
    noise: float
    noise_under: float
    bias: float
    cosine: float
    """Between the two mean gradients."""
    by_weight: float = math.nan
    """The mean of the cosines of single weights: what an optimizer sees that scales each one for itself."""


@dataclass(frozen=True)
class Course:
    """One training."""

    task: str
    config: str
    seed: int
    losses: tuple[float, ...]
    """Of every step."""
    noises: tuple[Noise, ...] = ()
    """Measured on the way of an untouched training."""


@dataclass(frozen=True)
class Setting:
    """What all trainings of a task share."""

    task: str
    recipe: Recipe
    places: Places
    device: torch.device
    probed: tuple[str, ...]
    """Configurations whose noise is measured on the way of an untouched training,"""
    batches: int
    """over so many batches."""

    def data(self) -> Data:
        source = TASKS[self.task].source(self.places)
        if source is None:
            raise SystemExit(f"{self.task}: its files are not in {self.places.data}; see accuracy.py --help")
        return loaded(source, self.places, self.device)

    def halts(self) -> set[int]:
        return {max(1, round(share * self.recipe.steps)) for share in PROBES}


def course(at: Setting, config: str, seed: int) -> Course:
    """Train once; an untouched training is probed for noise."""
    data = at.data()
    torch.manual_seed(seed)
    model = TASKS[at.task].build(at.places).to(at.device, memory_format=torch.channels_last)
    run = None if config == UNTOUCHED else sg.apply(model, config, min_bytes=MIN_BYTES)
    halts = at.halts() if run is None else set()
    losses, noises = [], []
    for step, loss in enumerate(stepped(model, data, at.recipe, seed, at.device), 1):
        losses.append(loss)
        if step in halts:
            noises += [noise(model, at, each, step) for each in at.probed]
    if run is not None:
        run.remove()
    return Course(at.task, config, seed, tuple(torch.stack(losses).tolist()), tuple(noises))


def noise(model: nn.Module, at: Setting, config: str, step: int) -> Noise:
    """What the configuration does to gradients at this point of the training."""
    plain, treated = Sums(copy.deepcopy(model), at.device), Sums(copy.deepcopy(model), at.device)
    run = sg.apply(treated.model, config, min_bytes=MIN_BYTES)
    for number, batch in enumerate(at.data().batches(FAR + step, at.batches, at.recipe.batch)):
        plain.add(batch, number)
        treated.add(batch, number)
    run.remove()
    g, h = plain.mean, treated.mean
    scale, cosine = float(g.square().sum()), float(torch.nn.functional.cosine_similarity(g, h, dim=0))
    off = float((h - g).square().sum())
    sizes = [parameter.numel() for parameter in model.parameters()]
    pairs = zip(g.split(sizes), h.split(sizes), model.parameters(), strict=True)
    each = [float(torch.nn.functional.cosine_similarity(a, b, dim=0)) for a, b, weight in pairs if weight.dim() > 1]
    noises = (plain.variance / scale, treated.variance / scale)
    return Noise(config, step, *noises, off / scale, cosine, statistics.fmean(each))


class Sums:
    """Of a model's gradients over batches."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model = model.train()
        self.device = device
        self.count = 0
        self.square = 0.0
        self.total = torch.zeros(sum(p.numel() for p in model.parameters()), device=device, dtype=torch.float64)

    def add(self, batch: Batch, seed: int) -> None:
        torch.manual_seed(seed)  # the same dropout for both models
        inputs, targets = batch
        with precision(self.device):
            loss = cross_entropy(self.model(*inputs), targets)
        loss.backward()
        found = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                           for p in self.model.parameters()]).double()  # fmt: skip
        self.model.zero_grad()
        self.count += 1
        self.total += found
        self.square += float(found.square().sum())

    @property
    def mean(self) -> Tensor:
        return self.total / self.count

    @property
    def variance(self) -> float:
        """The squared distance of a gradient from the mean, on average; without bias."""
        return (self.square / self.count - float(self.mean.square().sum())) * self.count / max(1, self.count - 1)


def table(courses: Sequence[Course]) -> str:
    """The last losses and the noise, as Markdown."""
    lines = ["| task | configuration | training loss, last tenth | minus untouched |", "|---|---|---|---|"]
    for task in dict.fromkeys(each.task for each in courses):
        ends = {}
        for config in dict.fromkeys(each.config for each in courses if each.task == task):
            found = [each for each in courses if (each.task, each.config) == (task, config)]
            ends[config] = {
                each.seed: statistics.mean(each.losses[-max(1, len(each.losses) // 10) :]) for each in found
            }
            differences = [end - ends[UNTOUCHED][seed] for seed, end in ends[config].items()]
            beside = "" if config == UNTOUCHED else f"{statistics.mean(differences):+.4f}"
            lines.append(f"| {task} | `{config}` | {statistics.mean(ends[config].values()):.4f} | {beside} |")
    lines += [
        "",
        "| task | configuration | step | noise | noise under | bias | cosine | by weight |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (task, config, step), group in grouped(courses).items():
        fields = ("noise", "noise_under", "bias", "cosine", "by_weight")
        means = [statistics.mean(getattr(each, name) for each in group) for name in fields]
        lines.append(f"| {task} | `{config}` | {step} | " + " | ".join(f"{mean:.3f}" for mean in means) + " |")
    return "\n".join(lines)


def grouped(courses: Sequence[Course]) -> dict[tuple[str, str, int], list[Noise]]:
    """The noises by task, configuration and step, over the seeds."""
    found: dict[tuple[str, str, int], list[Noise]] = {}
    for each in courses:
        for one in each.noises:
            found.setdefault((each.task, one.config, one.step), []).append(one)
    return dict(sorted(found.items()))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SLIMGRAD_DATA", "data")))
    parser.add_argument("--cache", type=Path, default=Path("out/cache"), help="where decoded images are kept")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["vit", "resnet18"], metavar="TASK")
    parser.add_argument("--configs", nargs="+", default=list(CONFIGS), metavar="CONFIG")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(SEEDS))
    parser.add_argument("--steps", type=int, help="instead of the task's own")
    parser.add_argument("--quick", action="store_true", help="a few small steps: a smoke test and not a result")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write losses and noise here")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--render", type=Path, nargs="+", metavar="JSON", help="tell and draw these, train nothing")
    return parser.parse_args(words)


def main() -> None:
    args = arguments()
    check_configs(args.configs)
    courses = [one for path in args.render for one in read(path)] if args.render else trained(args)
    print(table(courses))
    if args.plot:
        from convergence_plot import plotted

        plotted({(c.task, c.config, c.seed): c.losses for c in courses}, args.plot)


def read(path: Path) -> list[Course]:
    entries = json.loads(path.read_text())
    return [Course(**{**one, "noises": tuple(Noise(**noise) for noise in one["noises"])}) for one in entries]


def trained(args: argparse.Namespace) -> list[Course]:
    """All that is asked for; written down after each, so that a run that is cut short leaves what it has."""
    places, device = Places(args.data, args.cache), torch.device(args.device)
    jobs = [(task, config, seed) for task in args.tasks for seed in args.seeds for config in (UNTOUCHED, *args.configs)]
    courses: list[Course] = []
    for task, config, seed in track(jobs, "trainings", console=Console(stderr=True)):
        recipe = replace(TASKS[task].recipe, **QUICK) if args.quick else TASKS[task].recipe
        recipe = replace(recipe, steps=args.steps or recipe.steps)
        at = Setting(task, recipe, places, device, tuple(args.configs), 2 if args.quick else PROBED_BATCHES)
        courses.append(course(at, config, seed))
        written([asdict(each) for each in courses], args.json)
    return courses


if __name__ == "__main__":
    main()
