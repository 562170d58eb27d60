"""A nonlinearity that keeps what it is given in groups of a few bits: forward packs x while it reads it for f(x), and
backward makes f'(x) * dY from the bits. They tell f(x) once more too, so that nobody else needs to keep that.
"""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from slimgrad import kernels
from slimgrad.codecs.base import per_layout
from slimgrad.kernels import Groups, Layout
from slimgrad.kernels.chains import DERIVATIVES, MOST_ELEMENTS
from slimgrad.kernels.groups import DTYPES
from slimgrad.ops.fewbit import FewBit, pretended

_treatment = per_layout(kernels.grouped_fusion)


class GroupedFunction:
    """f as a callable on tensors; f by its name in `kernels.chains`."""

    def __init__(self, function: str, how: Groups) -> None:
        self.function = function
        self.how = how

    def takes(self, x: Tensor) -> bool:
        return x.dtype in DTYPES and x.numel() <= MOST_ELEMENTS

    def __call__(self, x: Tensor, *, inplace: bool = False) -> Tensor:
        """f(x); with `inplace` written over x, which must then be dense and nobody else's for backward."""
        if isinstance(x, FakeTensor):  # the same nodes must be learnt from them that real ones have
            fusion = pretended(self.how.nbytes(x.numel()))
            return Grouped.apply(x, Layout.of(x), fusion, inplace)  # type: ignore[no-any-return, no-untyped-call]
        found = _treatment(x, self.how, self.function)
        return Grouped.apply(x, found.layout, found.packer, inplace)  # type: ignore[no-any-return, no-untyped-call]


class Grouped(FewBit):
    """Its node, by the name of this class, is known to runtime/reruns.py."""


def groupable(name: str | None, parameters: dict[str, object]) -> str | None:
    """What kernels call a function that has a derivative there; None if it has none."""
    if name == "gelu" and parameters.get("approximate") == "tanh":
        return "gelu_tanh"
    return name if name in DERIVATIVES else None
