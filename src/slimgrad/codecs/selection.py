"""Which elements of a tensor are kept: how many, and which, in plain torch; and the checks of what is asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimgrad.errors import SpecError
from slimgrad.kernels.geometry import PATTERNS, feature_dim, part
from slimgrad.kernels.reference_picks import largest

SCOPES = ("tensor", "sample", "row")
SELECTIONS = ("largest", "random", "channels")

MULTIPLIERS = (0x9E3779B1, 0x846CA68B)


def check_part(codec: str, keep: object) -> None:
    if isinstance(keep, bool) or not isinstance(keep, (int, float)) or not 0 < keep <= 1:
        raise SpecError(f"{codec}: keep must be a number above 0 and at most 1, found {keep!r}")


def check_flag(codec: str, setting: str, found: object) -> None:
    if type(found) is not bool:
        raise SpecError(f"{codec}: {setting} must be True or False, found {found!r}")


def check_choice(codec: str, setting: str, found: object, choices: Sequence[object]) -> None:
    if isinstance(found, bool) or not isinstance(found, type(choices[0])) or found not in choices:
        raise SpecError(f"{codec}: {setting} must be one of {', '.join(map(str, choices))}; found {found!r}")


def count(shape: Sequence[int], keep: float, scope: str, select: str) -> int:
    """How many elements of such a tensor are kept."""
    n = math.prod(shape)
    if not n:
        return 0
    if select == "channels":
        channels = shape[feature_dim(len(shape))] if shape else 1
        return part(channels, keep) * (n // channels)
    return rows(shape, scope) * part(n // rows(shape, scope), keep)


def rows(shape: Sequence[int], scope: str) -> int:
    """How many rows compete within themselves."""
    if scope == "tensor" or not shape:
        return 1
    return shape[0] if scope == "sample" else math.prod(shape[:-1])


def picked(x: Tensor, keep: float, scope: str, select: str) -> Tensor:
    """Whether each element is kept."""
    if not x.numel():
        return torch.zeros_like(x, dtype=torch.bool)
    if select == "channels":
        return _channels(x, keep)
    lines = x.reshape(rows(x.shape, scope), -1)
    kept = part(lines.shape[1], keep)
    return largest(noise(lines) if select == "random" else lines, kept).view(x.shape)


def _channels(x: Tensor, keep: float) -> Tensor:
    """Whole channels, those with the largest sums of squares."""
    if not x.dim():
        return torch.ones_like(x, dtype=torch.bool)
    dim = feature_dim(x.dim())
    others = [d for d in range(x.dim()) if d != dim]
    energy = x.float().square().sum(others) if others else x.float().square()
    kept = largest(energy[None], part(len(energy), keep)).flatten()
    return kept.view([-1 if d == dim else 1 for d in range(x.dim())]).expand(x.shape)


def noise(x: Tensor) -> Tensor:
    """Random numbers that follow from the data, so that the same step draws the same again and the next one anew.

    They take nothing from torch's generators, whose state a training may be compared by.
    """
    salt = x.view(PATTERNS[x.dtype.itemsize]).sum(dtype=torch.int64)
    mixed = torch.arange(x.numel(), device=x.device) + salt
    for multiplier in MULTIPLIERS:
        mixed = (mixed * multiplier) & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 15)
    return mixed.to(torch.int32).view(x.shape).view(torch.float32)
