"""How large the inputs of layers are: what they are given in a forward, and what was seen of all forwards so far.

NOTE [Which forwards tell nothing new]
No layer's input is larger than in a forward that was seen, if there each tensor that the model is called with is at
least as large in every dimension, under the same autocast. To compare how much is given altogether would not do: where
one sequence goes to the encoder and another to the decoder, the decoder's can grow while their sum shrinks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from slimgrad.rules import Shapes


class Size(NamedTuple):
    """What a layer reads in one forward, or the most of several."""

    per_sample: int
    """Elements of one sample."""
    bytes: int
    """Of the whole batch."""


NOTHING = Size(0, 0)


class Look:
    """One forward."""

    def __init__(self, batch: int) -> None:
        self._batch = max(batch, 1)
        self._elements: dict[str, int] = {}
        self._bytes: dict[str, int] = {}

    def add(self, path: str, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A module is called."""
        x = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if x is None:
            return
        elements = _read_by(module, x)
        self._elements[path] = self._elements.get(path, 0) + elements
        self._bytes[path] = self._bytes.get(path, 0) + elements * _kept_as(module, x).itemsize

    @property
    def sizes(self) -> dict[str, Size]:
        return {path: Size(-(-n // self._batch), self._bytes[path]) for path, n in self._elements.items()}


def _read_by(module: nn.Module, x: Tensor) -> int:
    """Elements that the product reads: padding that is not of zeros is put around x before."""
    if not isinstance(module, nn.modules.conv._ConvNd) or module.padding_mode == "zeros":
        return x.numel()
    sides = module._reversed_padding_repeated_twice
    spatial = x.shape[x.dim() - len(module.kernel_size) :]
    padded = [n + a + b for n, a, b in zip(reversed(spatial), sides[::2], sides[1::2], strict=True)]
    return x.numel() // max(math.prod(spatial), 1) * math.prod(padded)


def _kept_as(module: nn.Module, x: Tensor) -> torch.dtype:
    """Autocast has products read a copy."""
    on = x.device.type
    casts = x.is_floating_point() and x.dtype != torch.float64 and torch.is_autocast_enabled(on)
    is_norm = isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm))
    return torch.get_autocast_dtype(on) if casts and not is_norm else x.dtype


class Seen(NamedTuple):
    """What was seen of all forwards so far. A value: whoever does not want the last one goes back to that before."""

    sizes: Mapping[str, Size]
    """Path -> the most that was read in a forward."""
    forwards: tuple[tuple[Any, Shapes], ...] = ()
    """Autocast and shapes; those that tell nothing beside others are left out."""

    def knows(self, autocast: Any, shapes: Shapes) -> bool:
        return any(_covers(before, (autocast, shapes)) for before in self.forwards)

    def with_more(self, autocast: Any, shapes: Shapes, sizes: Mapping[str, Size]) -> Seen:
        new = autocast, shapes
        others = tuple(before for before in self.forwards if not _covers(new, before))
        most = {path: _most(self.sizes.get(path, NOTHING), sizes.get(path, NOTHING)) for path in _all(self, sizes)}
        return Seen(most, (*others, new))


def _all(seen: Seen, sizes: Mapping[str, Size]) -> Iterable[str]:
    return dict.fromkeys((*seen.sizes, *sizes))


def _most(one: Size, other: Size) -> Size:
    return Size(max(one.per_sample, other.per_sample), max(one.bytes, other.bytes))


def _covers(large: tuple[Any, Shapes], small: tuple[Any, Shapes]) -> bool:
    return large[0] == small[0] and len(large[1]) == len(small[1]) and all(map(_is_within, small[1], large[1]))


def _is_within(small: Any, large: Any) -> bool:
    if "nested" in (small, large):
        return bool(small == large)
    return len(small) == len(large) and all(n <= m for n, m in zip(small, large, strict=True))


def autocast_on(device: str) -> Any:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
