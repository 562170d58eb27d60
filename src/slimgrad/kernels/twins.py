"""Which twin of a kernel serves a tensor: the plain-torch reference or Triton."""

from __future__ import annotations

import importlib
import importlib.util
import os
from functools import cache
from types import ModuleType
from typing import Literal

import torch

from slimgrad.errors import SpecError
from slimgrad.kernels import (
    reference,
    reference_blocks,
    reference_bounds,
    reference_chains,
    reference_codes,
    reference_gated,
    reference_groups,
    reference_picks,
)

Backend = Literal["triton", "torch"]

HAS_TRITON = importlib.util.find_spec("triton") is not None  # looks for the files, imports nothing


def backend(device: torch.device | str, force: Backend | None = None) -> Backend:
    """Which twin serves tensors on `device`."""
    on_gpu = torch.device(device).type == "cuda"
    if force == "triton" and not (HAS_TRITON and (on_gpu or os.environ.get("TRITON_INTERPRET") == "1")):
        raise SpecError(
            f"Triton was asked for on {device}, which needs triton installed (found: {HAS_TRITON}) and a CUDA device, "
            "or TRITON_INTERPRET=1 set before triton is imported"
        )
    if force is not None:
        return force
    return "triton" if on_gpu and HAS_TRITON else "torch"


REFERENCES = {
    "bits": reference,
    "pooling": reference,
    "quant": reference_groups,
    "chaining": reference_chains,
    "buckets": reference_codes,
    "pointwise": reference_codes,
    "gated": reference_gated,
    "picking": reference_picks,
    "blocking": reference_blocks,
    "bounding": reference_bounds,
}
"""By the name of the Triton module, the reference beside it."""


def twin(name: str, device: torch.device, force: Backend | None) -> ModuleType:
    """The module whose functions serve tensors on `device`."""
    return _module(name) if backend(device, force) == "triton" else REFERENCES[name]


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"slimgrad.kernels.{name}")
