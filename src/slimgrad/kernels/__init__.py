"""Pure functions tensor -> tensor, each a plain-torch reference and a Triton twin with the same bits.

CUDA tensors go to Triton where it is installed, all others to the reference. Triton is imported when the first CUDA
tensor arrives, never before. `force="torch"` or `force="triton"` picks a twin by hand, for tests and benchmarks.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels import reference
from slimgrad.kernels.geometry import Windows, is_dense, is_dense_layout
from slimgrad.kernels.groups import Groups
from slimgrad.kernels.predicate import Interval
from slimgrad.kernels.reference import narrow_dtype, narrow_int, widen_int

__all__ = [
    "Backend",
    "Groups",
    "Interval",
    "Windows",
    "backend",
    "is_dense",
    "is_dense_layout",
    "narrow_dtype",
    "narrow_int",
    "pack_bits",
    "pack_groups",
    "pack_window",
    "unpack_bits",
    "unpack_groups",
    "unpack_window",
    "widen_int",
]

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


def _twin(name: str, tensor: Tensor, force: Backend | None) -> ModuleType:
    """The module whose functions serve the tensor. Cheap, because the hot path asks for every tensor."""
    if force is None and not (tensor.is_cuda and HAS_TRITON):
        return reference
    return _module(name) if force is None or backend(tensor.device, force) == "triton" else reference


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"slimgrad.kernels.{name}")


def pack_bits(x: Tensor, rule: Interval, *, force: Backend | None = None) -> Tensor:
    """One bit per element of a flat contiguous tensor: element 8j+k is bit k of byte j; the last byte's tail is 0."""
    return _twin("bits", x, force).pack_bits(x, rule)  # type: ignore[no-any-return]


def unpack_bits(
    packed: Tensor, n: int, on: float, off: float, dtype: torch.dtype, *, force: Backend | None = None
) -> Tensor:
    """The n bits of `pack_bits` as values `on` and `off` of `dtype`."""
    return _twin("bits", packed, force).unpack_bits(packed, n, on, off, dtype)  # type: ignore[no-any-return]


def pack_groups(x: Tensor, how: Groups, *, force: Backend | None = None) -> Tensor:
    """A dense tensor, in memory order, as few-bit codes with an offset and a step per group: see groups.py."""
    return _twin("quant", x, force).pack_groups(x, how)  # type: ignore[no-any-return]


def unpack_groups(
    packed: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    how: Groups,
    dtype: torch.dtype,
    *,
    force: Backend | None = None,
) -> Tensor:
    """What was packed, as a tensor of that dense layout; each element within half a step, a whole one if stochastic."""
    return _twin("quant", packed, force).unpack_groups(packed, shape, stride, how, dtype)  # type: ignore[no-any-return]


def pack_window(indices: Tensor, pool: Windows, *, force: Backend | None = None) -> Tensor:
    """Max-pool indices (int64, flat in the input plane) as positions inside their windows (uint8), row-major.

    Contiguous and channels_last layouts are kept. `Windows.fits` says beforehand whether a geometry can be packed.
    """
    return _twin("pooling", indices, force).pack_window(indices, pool)  # type: ignore[no-any-return]


def unpack_window(codes: Tensor, pool: Windows, *, force: Backend | None = None) -> Tensor:
    """The exact inverse of `pack_window`."""
    return _twin("pooling", codes, force).unpack_window(codes, pool)  # type: ignore[no-any-return]
