"""Operators as text: what a step runs, so that each kind of it can be run once more by itself, and timed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SMALL = 16
"""Integers that a tensor may hold so that its values do not matter: seeds, offsets, counters."""

NAMED: dict[type, str] = {torch.dtype: "dtype", torch.memory_format: "memory_format", torch.layout: "layout"}


class UntoldError(Exception):
    """An operator that no text stands for."""


def told(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """An operator with its arguments, tensors by shape, strides and dtype alone; "" where that would not tell enough.

    Real integers decide what is read and how often, and a wrong one may lead a kernel out of its memory: an operator
    that is given many is not told.
    """
    try:
        given = [_encoded(list(args)), {name: _encoded(value) for name, value in kwargs.items()}]
        return json.dumps([str(func), *given], separators=(",", ":"))
    except UntoldError:
        return ""


def _encoded(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, (list, tuple)):
        return [_encoded(item) for item in value]
    if isinstance(value, torch.device):
        return {"device": value.type}
    if type(value) in NAMED:
        return {NAMED[type(value)]: str(value).removeprefix("torch.")}
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise UntoldError
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UntoldError


def _tensor(value: Tensor) -> Any:
    is_number = value.is_floating_point() or value.dtype in (torch.bool, torch.uint8)
    if value.layout is not torch.strided or value.is_complex() or (not is_number and value.numel() > SMALL):
        raise UntoldError
    return {
        "shape": list(value.shape),
        "stride": list(value.stride()),
        "dtype": str(value.dtype).removeprefix("torch."),
        "device": value.device.type,
    }


def runner(text: str, device: torch.device) -> Callable[[], Any]:
    """The operator of a text, with arguments made up for it on `device`; normal values, zeros of other kinds."""
    name, args, kwargs = json.loads(text)
    space, packet, overload = name.split(".")
    func = getattr(getattr(getattr(torch.ops, space), packet), overload)
    given = [_decoded(value, device) for value in args]
    named = {key: _decoded(value, device) for key, value in kwargs.items()}
    return lambda: func(*given, **named)


def _decoded(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decoded(item, device) for item in value]
    if not isinstance(value, dict):
        return value
    if "shape" in value:
        return _made(value, device)
    if "device" in value:
        return device if value["device"] != "cpu" else torch.device("cpu")
    ((_, name),) = value.items()
    return getattr(torch, name)


def _made(value: Mapping[str, Any], device: torch.device) -> Tensor:
    """Not zeros: some kernels are faster on them."""
    shape, stride, dtype = value["shape"], value["stride"], getattr(torch, value["dtype"])
    place = device if value["device"] != "cpu" else torch.device("cpu")
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
    memory = torch.empty(extent, dtype=dtype, device=place)
    return (memory.normal_() if dtype.is_floating_point else memory.zero_()).as_strided(shape, stride)
