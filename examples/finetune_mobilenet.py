"""Fine-tune a pretrained network under a strict memory budget, and see what other ways cost: one table, in minutes.

    python examples/finetune_mobilenet.py --data DIR --task flowers102
    python examples/finetune_mobilenet.py --data DIR --task pets --network mobilenet_v2 --epochs 20
    python examples/finetune_mobilenet.py --data DIR --task flowers102 --budget 66592 --methods classifier trady
    python examples/finetune_mobilenet.py --task shapes --epochs 1            # without files: bytes and FLOPs alone

With --data, the folder that has flowers102_sq128.npz, pets_sq128.npz or cifar10_webp90.npz, and the network's file
(mbv2-w0.35.npz, proxyless-w0.3.npz or mobilenet_v2_imagenet.pth). The budget is in elements of inputs and weights for
one picture, as TraDy's paper counts; by default its smallest one, or for other networks the same share of all elements.

`kept` is what the forward keeps for backward, measured; `dW FLOPs` are those of the gradients of convolutions' weights
in one step, counted from the shapes that are really multiplied; `peak` is the CUDA allocator's, above model and
optimizer.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mobilenets
import torch
import torch.nn.functional as F
import transfer
import transfer_data
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import slimgrad as sg
from slimgrad.report.human import human_bytes

SHARE = 27_946 / 1_252_320
"""The paper's smallest budget, of all elements of its MobileNetV2."""
RANK_STEPS = 40

METHODS: dict[str, Callable[[int, sg.Ranking], sg.Trady | None]] = {
    "full": lambda budget, ranking: None,
    "classifier": lambda budget, ranking: sg.trady(0),
    "static": lambda budget, ranking: sg.trady(budget, ranking, mode="static"),
    "full_random": lambda budget, ranking: sg.trady(budget, mode="full_random"),
    "deterministic": lambda budget, ranking: sg.trady(budget, ranking, mode="deterministic"),
    "trady": lambda budget, ranking: sg.trady(budget, ranking),
    "trady, weighted": lambda budget, ranking: sg.trady(budget, ranking, mode="weighted"),
}
"""All of them train the classifier; `full` trains everything else as well."""


@dataclass(frozen=True)
class Row:
    """One way to fine-tune."""

    method: str
    accuracy: float
    kept: int
    peak: int | None
    flops: int
    step_seconds: float


@dataclass(frozen=True)
class Task:
    """What is fine-tuned on what, and how."""

    build: Callable[[], mobilenets.Classifier]
    data: transfer_data.Pictures
    epochs: int
    lr: float
    """Of the new head."""
    body_lr: float
    """Of all else under a budget."""
    full_lr: float
    """Of all else where everything is trained, which bears less."""
    clip: float | None
    batch: int
    device: torch.device

    def model(self, seed: int) -> mobilenets.Classifier:
        torch.manual_seed(seed)
        return self.build().to(self.device)


def fine_tuned(task: Task, method: str, what: sg.Trady | None, seed: int) -> Row:
    """Train, and look at one more step."""
    model = task.model(seed)
    body_lr = task.full_lr if what is None else task.body_lr
    optimizer = torch.optim.SGD(transfer.two_rates(model, model.classifier, task.lr, body_lr))
    run = None if what is None else sg.apply(model, what, optimizer=optimizer)

    def each_epoch(epoch: int) -> None:
        if run is None:
            transfer.freeze_norms(model)
        elif epoch:
            run.epoch()

    how = {"clip": task.clip, "each_epoch": each_epoch}
    fitted = transfer.fit(model, task.data, optimizer, task.epochs, task.batch, seed, **how)
    images, labels = next(task.data.batches(seed, task.epochs, task.batch))
    images, labels = images.to(task.device), labels.to(task.device)
    model.train()
    if run is None:
        transfer.freeze_norms(model)
        kept = sg.profile(model, (images, labels), F.cross_entropy).kept_bytes
    flops, peak = looked(model, optimizer, images, labels)
    if run is not None:
        kept = run.report().kept_after
        run.remove()
    return Row(method, fitted.accuracy, kept, peak, flops, fitted.step_seconds)


def looked(
    model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor
) -> tuple[int, int | None]:
    """FLOPs of the weights' gradients in one step, and its peak."""
    on_gpu = images.device.type == "cuda"
    transfer.step(model, optimizer, images, labels)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.convolution_backward: dw_flops}) as counter:
        transfer.step(model, optimizer, images, labels)
    counted = counter.get_flop_counts().get("Global", {}).get(torch.ops.aten.convolution_backward, 0)
    return counted, torch.cuda.max_memory_allocated() - before if on_gpu else None


def dw_flops(dy: Sequence[int], x: Sequence[int], weight: Sequence[int], *others: Any, out_shape: Any) -> int:
    """Of a convolution's weight: torch's own formula counts dX too, and takes groups for one."""
    *_, groups, wanted = others
    if not wanted[1]:
        return 0
    kernels = x[1] * (dy[1] // groups) * math.prod(weight[2:])
    return 2 * kernels * dy[0] * math.prod(dy[2:])


def ranking_of(task: Task) -> sg.Ranking:
    """Of the network, on this task. It is the architecture's more than the task's, so one from another would do."""
    model = task.model(0)
    head = torch.optim.SGD(model.classifier.parameters(), lr=0.05)
    loader = [tuple(t.to(task.device) for t in batch) for batch in task.data.batches(0, 0, task.batch)][:RANK_STEPS]
    return sg.trady_rank(model, loader, F.cross_entropy, RANK_STEPS, optimizer=head)


def shown(rows: Sequence[Row], title: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for header in ("", "accuracy", "kept", "peak", "dW FLOPs", "step"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    full = next((row for row in rows if row.method == "full"), None)
    for row in rows:
        kept, flops, step = human_bytes(row.kept), f"{row.flops / 1e6:,.0f} M", f"{1e3 * row.step_seconds:.0f} ms"
        if full is not None and row is not full:
            kept += f", 1/{full.kept / row.kept:.0f}"
            flops += f", -{100 * (1 - row.flops / full.flops):.1f} %"
            step += f", {row.step_seconds / full.step_seconds:.2f}x"
        peak = "" if row.peak is None else human_bytes(row.peak)
        table.add_row(row.method, f"{100 * row.accuracy:.1f} %", kept, peak, flops, step)
    return table


NETWORKS: dict[str, Callable[[Path, int], mobilenets.Classifier]] = {
    "mbv2-w0.35": lambda folder, classes: mobilenets.on_device(folder / "mbv2-w0.35.npz", classes, last_conv=True),
    "proxyless-w0.3": lambda folder, classes: mobilenets.on_device(
        folder / "proxyless-w0.3.npz", classes, last_conv=True
    ),
    "mobilenet_v2": lambda folder, classes: mobilenets.mobilenet_v2(folder / "mobilenet_v2_imagenet.pth", classes),
}


TASKS: dict[str, Callable[..., transfer_data.Pictures]] = {
    "flowers102": transfer_data.flowers102,
    "pets": transfer_data.pets,
    "cifar10": transfer_data.cifar10,
}


def task_of(network: str, name: str, args: argparse.Namespace) -> Task:
    """By names; `shapes` need no files, and a network that was never trained."""
    how = args.epochs, args.lr, args.body_lr, args.full_lr, args.clip, args.batch, args.device
    if name == "shapes":
        data = transfer_data.shapes(mobilenets.IMAGENET)
        random = mobilenets.MobileNetV2(data.classes, width=0.35, dropout=0.0)
        return Task(lambda: copy.deepcopy(random), data, *how)
    look = mobilenets.IMAGENET if network == "mobilenet_v2" else mobilenets.CENTRED
    data = TASKS[name](look, args.data)
    folder = args.data or transfer_data.data_folder()
    build = partial(NETWORKS[network], folder, data.classes)
    return Task(build, data, *how)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=[*TASKS, "shapes"], default="flowers102")
    parser.add_argument("--network", choices=list(NETWORKS), default="mbv2-w0.35")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD")
    parser.add_argument("--budget", type=int, help="elements per picture")
    parser.add_argument("--data", type=Path, default=os.environ.get("SLIMGRAD_DATA"), help="folder of the files")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.2, help="of the head, at the peak; SGD without momentum")
    parser.add_argument("--body-lr", type=float, default=0.05, help="of all else under a budget")
    parser.add_argument("--full-lr", type=float, default=0.01, help="of all else where everything is trained")
    parser.add_argument("--clip", type=float, default=4.0, help="longest gradient")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    try:
        task = task_of(args.network, args.task, args)
    except FileNotFoundError as error:
        raise SystemExit(f"{error}; here: --data DIR, or --task shapes") from None
    everything = mobilenets.elements(task.model(0).cpu(), task.data.side)
    budget = round(SHARE * everything.total) if args.budget is None else args.budget
    ranking = ranking_of(task)
    console = Console(width=None if sys.stdout.isatty() else 110)
    rows = [
        fine_tuned(task, method, METHODS[method](budget, ranking), args.seed)
        for method in track(args.methods, console=console, transient=True)
    ]
    title = f"{task.data.name}, {args.epochs} epochs, {budget:,} of {everything.total:,} elements"
    console.print(shown(rows, title))


if __name__ == "__main__":
    main()
