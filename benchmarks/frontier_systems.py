"""What a worker of frontier.py does: one system on one workload, beside the untouched model in the same process.

The untouched model is timed before and after the system, on the same weights and the same batch. Hosts and clocks drift
over minutes, but hardly over these seconds: the ratio holds where the milliseconds of two processes do not.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from frontier_rows import UNTOUCHED
from torch import Tensor, nn
from torch._functorch import config as partitioner
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint
from workloads import Built, Workload

import slimgrad as sg

WARM_UP = 3
"""Steps before a phase is timed: compilers, autotuners, slimgrad's first look, the allocator's cache."""

FEW, ENOUGH_MS = 4, 4000.0
"""Timed steps end after as many milliseconds, but not before there are a few: offloading takes a second each."""


class SkippedError(Exception):
    """The system cannot be measured here, and why."""


@dataclass(frozen=True)
class Bench:
    """A model with its batch and optimizer on a device."""

    built: Built
    optimizer: torch.optim.Optimizer
    device: str
    bf16: bool

    def autocast(self) -> AbstractContextManager[None]:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.bf16)

    def forward(self, call: Callable[..., Any]) -> Tensor:
        """The loss; the model's outputs are dropped and autocast's copies of weights with it."""
        with self.autocast():
            return self.built.loss(call(**self.built.batch))

    def step(self, call: Callable[..., Any]) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.forward(call).backward()
        self.optimizer.step()

    def timed(self, call: Callable[..., Any], rounds: int) -> list[float]:
        """Milliseconds of each of the rounds that follow a warm-up."""
        for _ in range(WARM_UP):
            self.step(call)
        times: list[float] = []
        while len(times) < rounds and (len(times) < FEW or sum(times) < ENOUGH_MS):
            self.wait()
            start = time.perf_counter()
            self.step(call)
            self.wait()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def rest(self) -> None:
        """Give back to the device what other workers may need."""
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def memory(self, call: Callable[..., Any]) -> tuple[int, int]:
        """(kept, peak) of one step, from the allocator; both above what is held when the step begins.

        That is parameters, buffers, optimizer state, the batch and the libraries' workspaces, but no gradients.
        """
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        self.wait()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = self.forward(call)
        kept = torch.cuda.memory_allocated() - before
        loss.backward()
        self.optimizer.step()
        self.wait()
        return kept, torch.cuda.max_memory_allocated() - before

    def profiled(self) -> int:
        """Kept bytes as slimgrad counts them."""
        with self.autocast():
            return sg.profile(self.built.model, self.built.batch, self.built.loss).kept_bytes


@dataclass(frozen=True)
class Treated:
    """A model under a system: what to call, and its kept bytes where there is no allocator to ask."""

    call: Callable[..., Any]
    counted: Callable[[], int] | None = None


Treatment = Callable[[Bench], AbstractContextManager[Treated]]
"""Entered, it applies the system; left, the model is untouched again."""


def untouched(bench: Bench) -> AbstractContextManager[Treated]:
    return nullcontext(Treated(bench.built.model, bench.profiled))


@contextmanager
def checkpointed(bench: Bench) -> Iterator[Treated]:
    blocks = bench.built.blocks()
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    yield Treated(bench.built.model, bench.profiled)
    for block in blocks:
        del block.forward


@contextmanager
def offloaded(bench: Bench) -> Iterator[Treated]:
    with save_on_cpu(pin_memory=True):
        yield Treated(bench.built.model)


@contextmanager
def naively_packed(bench: Bench) -> Iterator[Treated]:
    """What one writes first: 8 bits and a step per row for whatever is saved and is no weight, by torch's own ops."""
    with torch.autograd.graph.saved_tensors_hooks(_in_int8, _from_int8):
        yield Treated(bench.built.model)


def _in_int8(tensor: Tensor) -> Any:
    is_weight = isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
    if is_weight or not tensor.is_floating_point() or not tensor.dim():
        return tensor
    step = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
    return (tensor / step).round().to(torch.int8), step, tensor.dtype


def _from_int8(kept: Any) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    codes, step, dtype = kept
    return (codes * step).to(dtype)


@contextmanager
def compiled(bench: Bench, budget: float = 1.0) -> Iterator[Treated]:
    """The partitioner reads the budget when the first forward is traced; 1 is its default."""
    with partitioner.patch(activation_memory_budget=budget):
        yield Treated(torch.compile(bench.built.model))


@contextmanager
def slimmed(bench: Bench, text: str) -> Iterator[Treated]:
    run = sg.apply(bench.built.model, text)
    yield Treated(bench.built.model, lambda: run.report().kept_after)
    run.remove()


TREATMENTS: dict[str, Treatment] = {
    UNTOUCHED: untouched,
    "checkpoint": checkpointed,
    "save_on_cpu": offloaded,
    "naive_int8": naively_packed,
    "compile": compiled,
    "compile(budget=0.5)": partial(compiled, budget=0.5),
}

COMPILED = ("compile", "compile(budget=0.5)")
"""They take a step beside each other, in which they compile; steps of all systems would not fit on the device."""

NEED_CUDA = {
    "save_on_cpu": "it moves bytes from a GPU to the host",
    "naive_int8": "what its hooks keep only the CUDA allocator knows",
    "compile": "what compiled code keeps only the CUDA allocator knows",
    "compile(budget=0.5)": "what compiled code keeps only the CUDA allocator knows",
}


def measured(
    workload: Workload, system: str, ready: Callable[[], None], *, small: bool, device: str, rounds: int
) -> dict[str, Any]:
    """The figures of a row. Models are built and compiled before `ready` is called."""
    if device != "cuda" and system in NEED_CUDA:
        raise SkippedError(f"Needs CUDA: {NEED_CUDA[system]}.")
    bench = prepared(workload, small, device)
    treat = TREATMENTS.get(system) or partial(slimmed, text=system)
    model, half = bench.built.model, (rounds + 1) // 2
    if system in COMPILED:
        with treat(bench) as treated:
            bench.step(treated.call)
        bench.rest()
    ready()
    beside = [] if system == UNTOUCHED else [bench.timed(model, half)]
    with treat(bench) as treated:
        times = bench.timed(treated.call, rounds)
        kept, peak = bench.memory(treated.call) if device == "cuda" else (treated.counted(), None)
    beside += [times] if system == UNTOUCHED else [bench.timed(model, half)]
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    before_after = [statistics.median(phase) for phase in beside]
    return {
        "kept": kept,
        "peak": peak,
        "ms": statistics.median(times),
        "p10": deciles[0],
        "p90": deciles[-1],
        "untouched_ms": before_after,
        "time_ratio": statistics.median(times) / statistics.mean(before_after),
        "rounds": len(times),
        "machine": torch.cuda.get_device_name() if device == "cuda" else f"CPU (threads: {torch.get_num_threads()})",
        "torch": torch.__version__,
    }


def prepared(workload: Workload, small: bool, device: str) -> Bench:
    """Weights are drawn on the device: a billion of them take a CPU longer than the whole measurement."""
    torch.manual_seed(0)
    with torch.device(device):
        built = workload.build(small)
    built.model.to(device).train()
    optimizer = torch.optim.SGD(built.model.parameters(), lr=1e-3, momentum=0.9)
    return Bench(built, optimizer, device, workload.bf16)
