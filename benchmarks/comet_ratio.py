"""How much smaller COMET makes what convolutions read, with the bounds that a real training leads it to.

    python benchmarks/comet_ratio.py                                  # ResNet-18 and VGG-16 at 1 %
    python benchmarks/comet_ratio.py --at 100 400 --configs "comet()" "comet(target=0.05)" --json out/comet_ratio.json
    python benchmarks/comet_ratio.py --tasks vgg16 --dtype bf16       # under autocast; ratios are then from bf16
    python benchmarks/comet_ratio.py --path out/bounds.png --tasks resnet20 --at 600 --batch 32 --configs "comet()"
    python benchmarks/comet_ratio.py --small                          # a few small steps: does it run?

A model is trained untouched on real images (--data, as in accuracy.py), by its recipe there with a rate as much lower
as the batch is smaller. After the steps of --at a few more are done under each configuration, from the same weights and
momenta and with the same batches; then they are undone. A table tells of the last of them, for each tensor that a
convolution reads: the bound, what part of the tensor's standard deviation that is, how much of it is not zero, and its
bytes before and after by the report. Beside the ratio stand what it is if the tensor is rounded to bfloat16 before, and
the limit: the entropy of its elements in steps of twice the bound, each told for itself. What several layers read is
counted once, with the ReLU that made it. The images, which the first convolution reads, are not kept for it alone, and
not counted.

With --path the first task is trained under the first configuration throughout, and where its bounds go is drawn.
"""

from __future__ import annotations

import argparse
import copy
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from bandwidth import describe, printed, written
from bounded import MASK, bits_within
from rich.progress import track
from tasks import ALL_TASKS
from tasks.base import Batch, Data, Places
from tasks.training import cross_entropy, evaluated, loaded, optimizer_for, stepped
from torch import Tensor, nn
from torch.optim import Optimizer

import slimgrad as sg
from slimgrad.recipes.comet import CometController

UNDER = 2
"""Steps under a configuration: in the first there are no bounds yet, and the second has those that follow from it."""
FAR = 10_000
"""Added to the step, to be the seed of the batches in them: no training has it."""
TESTS = 4
"""Batches of test images that say how far a training is."""
TOTAL = "all"
DTYPES = ("fp32", "bf16")
SMALL = {"at": [1], "batch": 8}


@dataclass(frozen=True)
class Row:
    """One tensor that convolutions read, or all of them."""

    model: str
    source: str
    config: str
    dtype: str
    step: int
    """So many were done before."""
    accuracy: float
    """Of the model by then, on some test images."""
    layer: str
    """The first that reads it."""
    shape: tuple[int, ...]
    bound: float | None
    of_std: float | None
    nonzero: float
    before: int
    after: int
    bf16: float
    """Times fewer bytes, if it is rounded to bfloat16 before."""
    limit: float
    """By the entropy."""

    @property
    def ratio(self) -> float:
        return self.before / self.after


@dataclass(frozen=True)
class Look:
    """At what a layer reads."""

    bound: float
    of_std: float
    nonzero: float
    bits: float
    """By the entropy."""
    bf16: float


class Cast(nn.Module):
    """A model in one precision, whatever surrounds it."""

    def __init__(self, model: nn.Module, dtype: str) -> None:
        super().__init__()
        self.model = model
        self.autocast = dtype == "bf16"

    def forward(self, *inputs: Tensor) -> Any:
        with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=self.autocast):
            return self.model(*inputs)


@dataclass(frozen=True)
class Bench:
    """A training under way."""

    task: str
    model: nn.Module
    cast: Cast
    data: Data
    optimizer: Optimizer
    args: argparse.Namespace

    @property
    def layers(self) -> list[str]:
        return [path for path, module in self.model.named_modules() if isinstance(module, nn.Conv2d)][1:]

    def step(self, batch: Batch) -> None:
        inputs, targets = batch
        cross_entropy(self.cast(*inputs), targets).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def accuracy(self) -> float:
        tests = islice(self.data.tests(2 * self.args.batch), TESTS)
        found = evaluated(self.cast, tests, torch.device(self.args.device))["accuracy"]
        self.cast.train()
        return float(found)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    for task in args.tasks:
        bench, training = begun(task, args)
        for done, _ in enumerate(training, 1):
            if done in args.at:
                accuracy = bench.accuracy()
                for config in args.configs:
                    yield from under(config, bench, done, accuracy)


def path_drawn(args: argparse.Namespace) -> Path:
    """Train under a configuration from the first step on."""
    bench, training = begun(args.tasks[0], args)
    run = sg.apply(bench.model, args.configs[0], optimizer=bench.optimizer, min_bytes=0)
    assert isinstance(run.controller, CometController), "configurations were checked"
    for _ in track(training, total=max(args.at), description=args.configs[0], transient=True):
        pass
    print(f"{bench.accuracy():.1%} right on some test images; refreshed at {[step for step, _ in run.controller.path]}")
    print(f"kept {run.report().kept_before / run.report().kept_after:.2f}x less in the last step that was counted")
    return run.controller.plot(args.path)


def begun(task: str, args: argparse.Namespace) -> tuple[Bench, Iterator[Tensor]]:
    places, device = Places(args.data, args.cache), torch.device(args.device)
    data = loaded(source_of(task, args), places, device)
    recipe = ALL_TASKS[task].recipe
    recipe = replace(recipe, steps=max(args.at), batch=args.batch, lr=recipe.lr * args.batch / recipe.batch)
    torch.manual_seed(0)
    model = ALL_TASKS[task].build(places).to(device)
    if args.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = optimizer_for(model, recipe, device)
    bench = Bench(task, model, Cast(model, args.dtype), data, optimizer, args)
    return bench, stepped(bench.cast, data, recipe, 0, device, optimizer)


def source_of(task: str, args: argparse.Namespace) -> Any:
    source = ALL_TASKS[task].source(Places(args.data, args.cache))
    if source is None:
        raise SystemExit(f"{task}: its files are not in {args.data}; see accuracy.py --help")
    return source


def under(config: str, bench: Bench, step: int, accuracy: float) -> Iterator[Row]:
    """A row for each tensor, then one for all."""
    states = [copy.deepcopy(each.state_dict()) for each in (bench.model, bench.optimizer)]
    report, looks = looked_at(config, bench, step)
    for each, state in zip((bench.model, bench.optimizer), states, strict=True):
        each.load_state_dict(state)
    what = (ALL_TASKS[bench.task].model, source_of(bench.task, bench.args).name, config, bench.args.dtype)
    found = [
        Row(*what, step, accuracy, path, shape, look.bound, look.of_std, look.nonzero, before, after,
            look.bf16, before * 8 / max(1.0, look.bits))
        for path, shape, before, after in inputs_in(report, bench.layers)
        for look in [looks[path]]
    ]  # fmt: skip
    yield from found
    yield total(found)


def looked_at(config: str, bench: Bench, step: int) -> tuple[sg.Report, dict[str, Look]]:
    """Go on under a configuration, and look at the last step."""
    run = sg.apply(bench.model, config, optimizer=bench.optimizer, min_bytes=0)
    assert isinstance(run.controller, CometController), "configurations were checked"
    *first, last = bench.data.batches(FAR + step, UNDER, bench.args.batch)
    for batch in first:
        bench.step(batch)
    looks: dict[str, Look] = {}
    modules = {path: bench.model.get_submodule(path) for path in bench.layers}
    handles = [m.register_forward_hook(looking(looks, path, run.controller)) for path, m in modules.items()]
    bench.step(last)
    for handle in handles:
        handle.remove()
    report = run.report()
    run.remove()
    return report, looks


def looking(looks: dict[str, Look], path: str, controller: CometController) -> Callable[..., None]:
    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        x, bound = inputs[0].detach().float(), controller.bounds[path]
        nonzero = int(x.count_nonzero()) / x.numel()
        half = x.bfloat16()
        packed = controller.recipe.codec(bound).pack(half, MASK)
        of_std = bound / max(1e-30, float(x.std()))
        looks[path] = Look(bound, of_std, nonzero, bits_within(x, bound), half.nbytes / packed.nbytes)

    return look


def inputs_in(report: sg.Report, layers: Collection[str]) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
    """Each tensor that some layer reads: the first of them, its shape, and bytes before and after."""
    first: dict[int, sg.Site] = {}
    for found in report.sites:
        if found.site.path in layers and found.site.need is sg.Need.OPERAND:
            first.setdefault(found.site.storage, found.site)
    for storage, site in first.items():
        after = sum(found.after for found in report.sites if found.site.storage == storage)
        yield site.path, site.shape, site.bytes, after


def total(found: Sequence[Row]) -> Row:
    before, after = sum(row.before for row in found), sum(row.after for row in found)
    nonzero = sum(row.nonzero * row.before for row in found) / before
    bf16, limit = (before / sum(row.before / getattr(row, name) for row in found) for name in ("bf16", "limit"))
    return replace(found[0], layer=TOTAL, shape=(), bound=None, of_std=None, nonzero=nonzero, before=before,
                   after=after, bf16=bf16, limit=limit)  # fmt: skip


HEAD = "{:>6} {:10} {:28} {:22} {:12} {:18} {:>8} {:>7} {:>8} {:>9} {:>9} {:>7} {:>10} {:>7}".format(
    "step", "model", "data", "configuration", "layer", "shape", "bound", "of std", "not zero", "before", "after",
    "ratio", "from bf16", "limit",
)  # fmt: skip


def shown(row: Row) -> str:
    bound, of_std = ("-" if each is None else f"{each:.3g}" for each in (row.bound, row.of_std))
    shape, sizes = "x".join(map(str, row.shape)), [f"{each / 2**20:.2f}M" for each in (row.before, row.after)]
    ratios = f"{row.ratio:6.2f}x {row.bf16:9.2f}x {row.limit:6.2f}x"
    line = (
        f"{row.step:6} {row.model:10} {row.source + ', ' + row.dtype:28} {row.config:22} {row.layer:12} {shape:18} "
        f"{bound:>8} {of_std:>7} {row.nonzero:>8.1%} {sizes[0]:>9} {sizes[1]:>9} {ratios}"
    )
    return line if row.layer != TOTAL else f"{line}  (accuracy {row.accuracy:.1%})\n"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--tasks", nargs="+", choices=ALL_TASKS, default=["resnet18", "vgg16"], metavar="TASK")
    parser.add_argument("--configs", nargs="+", default=["comet()"], metavar="CONFIG")
    parser.add_argument("--at", nargs="+", type=int, default=[485], help="steps of training to look after")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--channels-last", action="store_true", help="as accuracy.py has it; neighbours are channels")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SLIMGRAD_DATA", "data")))
    parser.add_argument("--cache", type=Path, default=Path("out/cache"))
    parser.add_argument("--path", type=Path, help="train under the first configuration, and draw its bounds there")
    parser.add_argument("--small", action="store_true", help="a smoke test and not a result")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args(words)
    if min(*args.at, args.batch) < 1:
        parser.error("--at and --batch must be at least 1")
    if args.small:
        vars(args).update(SMALL)
    return args


def check_configs(configs: Sequence[str]) -> None:
    """Before minutes are spent on training."""
    for config in configs:
        run = sg.apply(nn.Linear(1, 1), config)
        if not isinstance(run.controller, CometController):
            raise SystemExit(f"--configs: {config} is no comet(...)")
        run.remove()


def main() -> None:
    args = arguments()
    check_configs(args.configs)
    if args.path is not None:
        print(path_drawn(args))
        return
    print(describe(args.device), HEAD, sep="\n")
    written(printed(rows(args), shown), args.json)


if __name__ == "__main__":
    main()
