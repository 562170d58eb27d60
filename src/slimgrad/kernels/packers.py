"""What is done with tensors of one layout, with all that follows from the layout found out beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor

from slimgrad.kernels.blocks import Grid
from slimgrad.kernels.chains import Chain


class Packer(Protocol):
    """Packs and unpacks dense tensors of one layout. It checks nothing."""

    def pack(self, x: Tensor, /) -> Tensor: ...

    def unpack(self, packed: Tensor, /) -> Tensor: ...


class ByFunctions(NamedTuple):
    """A packer of two functions."""

    pack: Callable[[Tensor], Tensor]
    unpack: Callable[[Tensor], Tensor]


class Chainer(Protocol):
    """Unpacks groups through elementwise steps, into tensors of one layout. It checks no step."""

    def unpack(self, packed: Tensor, operands: Sequence[Tensor], /) -> Tensor: ...


class Fusion(Protocol):
    """f(x) together with its codes, and level * dY, of dense tensors of one layout. It checks nothing."""

    def forward(self, x: Tensor, out: Tensor | None, /) -> tuple[Tensor, Tensor]: ...

    def backward(self, codes: Tensor, dy: Tensor, /) -> Tensor: ...


class FusionByFunctions(NamedTuple):
    """A fusion of two functions."""

    forward: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    backward: Callable[[Tensor, Tensor], Tensor]


class FusionByGroups(NamedTuple):
    """f(x) together with x in groups of a few bits, which tell f(x) once more, and its slope."""

    together: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    chain: Chain
    """By which `values` makes f(x)."""
    values: Chainer
    slopes: Chainer

    def forward(self, x: Tensor, out: Tensor | None) -> tuple[Tensor, Tensor]:
        return self.together(x, out)

    def backward(self, packed: Tensor, dy: Tensor) -> Tensor:
        return self.slopes.unpack(packed, (dy,))

    def value(self, packed: Tensor) -> Tensor:
        return self.values.unpack(packed, ())


class Picker(Protocol):
    """Picks the largest elements of dense tensors of one layout, and puts them back. It checks nothing.

    Values, places and, if the picks are signed, signs.
    """

    def pick(self, x: Tensor, /) -> tuple[Tensor, ...]: ...

    def put_back(self, values: Tensor, places: Tensor, signs: Tensor | None = None, /) -> Tensor: ...


class PickerByFunctions(NamedTuple):
    """A picker of two functions."""

    pick: Callable[[Tensor], tuple[Tensor, ...]]
    put_back: Callable[..., Tensor]


class Blocker(Protocol):
    """Keeps the strongest blocks of dense tensors of one layout, and multiplies with them. It checks no index."""

    @property
    def grid(self) -> Grid: ...

    def keep(self, x: Tensor, /) -> tuple[Tensor, ...]: ...

    def put_back(self, values: Tensor, index: Tensor, means: Tensor | None = None, /) -> Tensor: ...

    def product(self, held: Sequence[Tensor], dy: Tensor, turned: bool, /) -> Tensor: ...


class BlockerByFunctions(NamedTuple):
    """A blocker of three functions."""

    grid: Grid
    keep: Callable[[Tensor], tuple[Tensor, ...]]
    put_back: Callable[..., Tensor]
    product: Callable[[Sequence[Tensor], Tensor, bool], Tensor]
