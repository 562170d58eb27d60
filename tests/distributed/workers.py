"""Two processes that train together: how they are started, and what they train.

NOTE [One start for all tests]
A process that imports torch takes seconds to start, so two of them are started once and run every selected case of all
tests marked `on_two_ranks`; the tests then report what happened there. With several pytest workers the first one that
needs the outcomes starts the processes, the others read what it got.

Each case has a process group of its own: one that fails on one rank stops the other rank's collectives, not the next
case. All cases run on the CPU.
"""

from __future__ import annotations

import gc
import importlib
import json
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from itertools import product, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

RANKS = 2
COLLECTIVE = timedelta(seconds=30)
"""How long a rank waits for the other one."""
ALL_CASES = 150.0
"""Seconds after which the processes are stopped, whatever they do."""

Outcomes = dict[str, list[str | None]]
"""Case -> for each rank, what went wrong."""

CASES: dict[str, Callable[[], None]] = {}


def on_two_ranks(**choices: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test in both processes, once for each combination of the choices."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        names = []
        for values in product(*choices.values()):
            names.append("-".join([function.__name__, *map(str, values)]))
            CASES[names[-1]] = partial(function, **dict(zip(choices, values, strict=True)))

        @pytest.mark.parametrize("case", names, ids=[n.removeprefix(function.__name__).strip("-") for n in names])
        def test(case: str, outcomes: Outcomes) -> None:
            for rank, trouble in enumerate(outcomes[case]):
                assert trouble is None, f"on rank {rank}:\n{trouble}"

        test.__name__, test.__doc__ = function.__name__, function.__doc__
        return test

    return decorate


# --- the processes ---------------------------------------------------------------------------------------------------


def outcomes_of(cases: Sequence[str], module: str, folder: Path) -> Outcomes:
    """Run the cases that `module` defines, unless another pytest worker does it already in this folder."""
    done = folder / "done"
    try:
        folder.mkdir()
    except FileExistsError:
        deadline = time.monotonic() + 1.5 * ALL_CASES
        while not done.exists() and time.monotonic() < deadline:
            time.sleep(0.2)
    else:
        run_ranks(cases, module, folder)
        done.touch()
    found = [_read(folder / f"rank{rank}") for rank in range(RANKS)]
    return {case: [troubles.get(case, "stopped before the end of this case") for troubles in found] for case in cases}


def run_ranks(cases: Sequence[str], module: str, folder: Path) -> None:
    start = multiprocessing.get_context("spawn").Process
    ranks = [start(target=work, args=(rank, cases, module, folder), daemon=True) for rank in range(RANKS)]
    deadline = time.monotonic() + ALL_CASES
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        process.kill()


def work(rank: int, cases: Sequence[str], module: str, folder: Path) -> None:
    """One rank: every case in turn, one line about each."""
    torch.set_num_threads(1)
    importlib.import_module(module)
    with (folder / f"rank{rank}").open("w", buffering=1) as lines:
        for number, case in enumerate(cases):
            trouble = attempt(CASES[case], rank, folder / f"store{number}")
            lines.write(json.dumps([case, trouble]) + "\n")


def attempt(case: Callable[[], None], rank: int, store: Path) -> str | None:
    """What went wrong, or None."""
    trouble = None
    try:
        distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS, timeout=COLLECTIVE
        )
        case()
    except Exception:
        trouble = traceback.format_exc()
    if distributed.is_initialized():
        distributed.destroy_process_group()
    if trouble is not None:
        gc.collect()  # closes the connections for which the other rank may be waiting
    return trouble


def _read(lines: Path) -> dict[str, str | None]:
    return dict(json.loads(line) for line in lines.read_text().splitlines()) if lines.exists() else {}


# --- what they train -------------------------------------------------------------------------------------------------

WIDTH = 32
ROWS = (128, 96)
"""Of each rank's batch; not the same, so that each rank has a report of its own."""


class Block(nn.Module):
    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.act = nn.ReLU()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.branch, x, use_reentrant=False) if self.checkpointed else self.branch(x))

    def branch(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.act(self.up(self.norm(x)))))


class Net(nn.Module):
    """Residual blocks: norms, linear layers, ReLU and dropout masks."""

    def __init__(self, *, checkpointed: bool = False, frozen: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointed=checkpointed) for _ in range(2))
        self.head = nn.Linear(WIDTH, 8)
        self.short: Iterator[bool] = repeat(False)
        """For each forward to come, whether it leaves out the last block."""
        if frozen is not None:
            self.blocks[frozen].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks[:-1] if next(self.short) else self.blocks:
            x = block(x)
        return self.head(x)


def sharded(net: Net, *, reshard: bool | None = True, bf16: bool = False) -> Net:
    """FSDP2 on each block and on the rest."""
    mesh = distributed.init_device_mesh("cpu", (RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    for module in (*net.blocks, net):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return net


def batch(rank: int, step: int = 0, part: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * part + rank)
    return torch.randn(ROWS[rank], WIDTH, generator=generator)


def loss_of(model: nn.Module, x: Tensor, *, autocast: bool = False) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        return model(x).float().square().sum() / 1024


Sync = Callable[[nn.Module, bool], AbstractContextManager[Any]]
"""Given the model and whether this is the last part of a step: what to run that part under."""


def always(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """The ranks average in every backward."""
    return nullcontext()


Gradients = list[list[Tensor | None]]
"""Of every parameter, in every step."""


def gradients_of(parameters: Sequence[Tensor]) -> list[Tensor | None]:
    """Copies of the gradients, of sharded parameters the piece that is here."""
    found = [parameter.grad for parameter in parameters]
    local = [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in found]
    return [None if gradient is None else gradient.clone() for gradient in local]


def pieces(gradients: Gradients) -> Gradients:
    """Of whole gradients the pieces that FSDP2 leaves on this rank."""
    rank = distributed.get_rank()
    return [[None if gradient is None else gradient.chunk(RANKS)[rank] for gradient in step] for step in gradients]


def backward(model: nn.Module, rank: int, step: int, *, parts: int = 1, sync: Sync = always, **how: Any) -> None:
    """One step's gradients of one rank's batches, whose random draws depend on rank and step alone."""
    torch.manual_seed(1000 * step + rank)
    for part in range(parts):
        with sync(model, part == parts - 1):
            loss_of(model, batch(rank, step, part), **how).backward()


def trained(model: nn.Module, *, steps: int = 3, **how: Any) -> Gradients:
    """The gradients of every step, as this rank sees them when the ranks have averaged; each step moves the weights."""
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, distributed.get_rank(), step, **how)
        found.append(gradients_of(parameters))
        optimizer.step()
    return found


def mean_of_shards(model: nn.Module, *, steps: int = 3, **how: Any) -> Gradients:
    """The same in one process: the mean of what each rank's batches give by themselves.

    Two ranks must find these very bits, whatever the codec: each rank's gradient depends on its own batch alone, and
    halving and adding two numbers rounds once, in whichever order.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    found = []
    for step in range(steps):
        shards = []
        for rank in range(RANKS):
            model.zero_grad()
            backward(model, rank, step, **how)
            shards.append(gradients_of(parameters))
        for parameter, left, right in zip(parameters, *shards, strict=True):
            parameter.grad = None if left is None else (left + right) / 2
        found.append(gradients_of(parameters))
        optimizer.step()
    return found


def equal(left: Gradients, right: Gradients) -> bool:
    """Whether all gradients of all steps are the same bits, and missing in the same places."""
    pairs = [pair for both in zip(left, right, strict=True) for pair in zip(*both, strict=True)]
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)
