"""Packing and unpacking tensors of one layout, with all that follows from the layout found out beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor


class Packer(Protocol):
    """Packs and unpacks dense tensors of one layout. It checks nothing."""

    def pack(self, x: Tensor, /) -> Tensor: ...

    def unpack(self, packed: Tensor, /) -> Tensor: ...


class ByFunctions(NamedTuple):
    """A packer of two functions."""

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]
