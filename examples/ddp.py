"""Data-parallel training under slimgrad: the same weights as without it, bit for bit, from less kept memory.

    torchrun --nproc-per-node 2 examples/ddp.py

Trains on GPUs over NCCL where there is one for each rank, otherwise on the CPU over gloo.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import slimgrad as sg


def network() -> nn.Module:
    torch.manual_seed(0)  # DDP sends the weights of rank 0 to all ranks anyway
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 10),
    )


def train(steps: int, *, slim: bool) -> tuple[list[Tensor], sg.Report | None]:
    """The weights after some steps, and what the last one kept."""
    on_gpu = distributed.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    model = network().to(device)
    run = sg.apply(model, sg.Lossless()) if slim else None  # the only new line; the wrapper comes after it
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    torch.manual_seed(1 + distributed.get_rank())  # each rank has its own images and its own dropout
    for _ in range(steps):
        images = torch.randn(32, 3, 32, 32, device=device)
        labels = images.mean((2, 3)).argmax(1)  # which colour is strongest
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(images), labels).backward()
        optimizer.step()
    return [weight.detach() for weight in model.parameters()], run.report() if run else None


def compare(steps: int = 10) -> sg.Report:
    """Train with and without slimgrad; the weights must be the same."""
    plain, _ = train(steps, slim=False)
    slim, report = train(steps, slim=True)
    assert report is not None
    if not all(torch.equal(a, b) for a, b in zip(plain, slim, strict=True)):
        raise SystemExit(f"rank {distributed.get_rank()}: the weights differ")
    return report


def main() -> None:
    on_gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.backends.cudnn.deterministic = True  # otherwise two untouched runs may differ already
    distributed.init_process_group("nccl" if on_gpu else "gloo")
    report = compare()
    if distributed.get_rank() == 0:
        print(report)
        print(f"\n{distributed.get_world_size()} ranks: the weights are those of the untouched run, bit for bit")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
