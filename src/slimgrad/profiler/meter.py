"""measured_step: the memory a real step takes at its highest moment, by the allocator's own account."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

MEMORY = "[memory]"
"""What torch's profiler calls an allocation (bytes above 0) or a release (below 0)."""


@dataclass(frozen=True)
class Measured:
    """Bytes of one step, above those that were held before it."""

    peak: int
    """At the highest moment."""
    kept: int
    """When the step has returned and its result is let go of: the gradients, as a rule."""


def measured_step(step: Callable[[], Any], device: torch.device | str) -> Measured:
    """Run `step` once on `device` and say what it took.

    On CUDA the caching allocator counts, in its blocks of 512 bytes; cuBLAS and cuDNN take workspaces in the first step
    of a process, so run one before. On a CPU torch's profiler hears of every allocation through torch's allocator, to
    the byte: not of what oneDNN takes for itself, nor of the release of what was there before the step.
    """
    gc.collect()  # what is released in the step and was there before makes the step look smaller
    target = torch.device(device)
    return _on_cuda(step, target) if target.type == "cuda" else _on_cpu(step)


def _on_cuda(step: Callable[[], Any], device: torch.device) -> Measured:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    step()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return Measured(peak=peak, kept=torch.cuda.memory_allocated(device) - before)


def _on_cpu(step: Callable[[], Any]) -> Measured:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler greets on stderr each time
    with torch.autograd.profiler.profile(profile_memory=True) as seen:
        step()
    events = seen.kineto_results.events()
    changes = sorted((event.start_ns(), place, event.nbytes()) for place, event in enumerate(events) if _is_ours(event))
    held = list(accumulate(change for _, _, change in changes))
    return Measured(peak=max(held, default=0), kept=held[-1] if held else 0)


def _is_ours(event: Any) -> bool:
    return bool(event.name() == MEMORY and event.device_type().name == "CPU")
