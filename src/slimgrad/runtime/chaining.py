"""Chaining: what is made again of a tensor that is kept in groups of a few bits, by one kernel that reads those bits.

Otherwise the tensor is unpacked, read by a norm, written, read by a cast and written once more: for the input of a
linear layer behind a layer norm under autocast, seven times the bytes. Only lossy sources are treated so: what is made
of exact ones must have the very bits of the first time, which the op itself gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from slimgrad import kernels
from slimgrad.codecs import Quant
from slimgrad.kernels import Chain, Layout, Step, is_dense_layout
from slimgrad.kernels.chains import MOST_ELEMENTS, MOST_STEPS, PACKED, SAME, SPREAD
from slimgrad.kernels.groups import DTYPES, Groups
from slimgrad.runtime.reruns import added
from slimgrad.runtime.tickets import Sealed, peeked
from slimgrad.runtime.views import RESHAPING, VIEWS, lies_as
from slimgrad.runtime.ways import Leaf, Made, Taken, Way, What, asked, part_value

IN_ORDER = VIEWS | RESHAPING
"""Views and casts that may leave elements in the order of memory."""


class Source(Protocol):
    """How a tensor is made again; derivations.py has it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the views and casts behind what its maker made."""

    def maker(self, handle: Any) -> tuple[list[Node], Node, What]:
        """The views and casts, the node that made what is behind them, and how that is made again."""


@dataclass
class Strand:
    """A packed tensor, how it lies in memory, and what is done to it so far."""

    packed: Tensor
    how: Groups
    shape: torch.Size
    stride: tuple[int, ...]
    steps: list[Step]
    operands: list[Tensor]

    @property
    def is_contiguous(self) -> bool:
        """Whether it lies in the order of its dimensions; there are no gaps."""
        steps = [step for size, step in zip(self.shape, self.stride, strict=True) if size != 1]
        return steps == sorted(steps, reverse=True)

    def then(self, op: str, operand: Operand | None) -> Strand | None:
        """One step more; None if no kernel does that."""
        if isinstance(operand, Sealed):
            return self._with_packed(op, operand)
        if operand is None or operand.device != self.packed.device or not operand.is_floating_point():
            return None
        step = _placed(op, operand, self.shape, self.stride)
        return None if step is None else self._with(step, operand.detach())

    def through(self, function: str) -> Strand:
        self.steps.append(Step(function))
        return self

    def _with_packed(self, op: str, operand: Sealed) -> Strand | None:
        other = _groups_of(operand)
        alike = other is not None and (other.how, other.shape, other.stride) == (self.how, self.shape, self.stride)
        if other is None or other.steps or not alike:
            return self.then(op, operand.tensor())
        return self._with(Step(op, PACKED), other.packed)

    def _with(self, step: Step, operand: Tensor) -> Strand:
        self.steps.append(step)
        self.operands.append(operand)
        return self

    def made(self, layout: Layout) -> Tensor | None:
        """What comes of it; None if no kernel does that."""
        if len(self.steps) > MOST_STEPS or self.shape.numel() > MOST_ELEMENTS:
            return None
        dtypes = tuple(operand.dtype for operand in self.operands)
        return kernels.chainer(layout, Chain(self.how, tuple(self.steps)), dtypes).unpack(self.packed, self.operands)


Operand = Tensor | Sealed


def unpacked_through(source: Source, handle: Any, layout: Layout) -> Tensor | None:
    """What is made again, if that begins with a tensor in groups and is done to each element by itself."""
    if layout.dtype not in DTYPES:
        return None
    found = _seen(source, handle, layout.shape, layout.stride)
    return None if found is None else found.made(layout)


def may_chain(names: Sequence[str], way: Way, dtype: torch.dtype) -> bool:
    """Whether that could be so, as far as is known before it is done."""
    return dtype in DTYPES and IN_ORDER.issuperset(names) and all(name in CHAINED for name, _ in way.runs)


def _seen(source: Source, handle: Any, shape: torch.Size, stride: tuple[int, ...]) -> Strand | None:
    """What is made again with these strides, if views and casts left its elements where the maker had put them."""
    if not IN_ORDER.issuperset(source.names):
        return None
    nodes, node, what = source.maker(handle)
    found = _strand(node, what)
    if found is None or not lies_as(found.shape, found.stride, nodes, shape, stride):
        return None
    return replace(found, shape=shape, stride=stride)


def _strand(node: Node, what: What) -> Strand | None:
    if isinstance(what, Taken):
        found = peeked(node, what.slot)
        return _groups_of(found) if isinstance(found, Sealed) else None
    rule = CHAINED.get(what.name) if isinstance(what, Made) else None
    return None if rule is None or isinstance(what, (Taken, Leaf)) else rule(node, what)


def _groups_of(found: Sealed) -> Strand | None:
    """What was packed, whole and without gaps; or what it is derived from, and how."""
    packed, order = found.packed, found.order
    layout = packed.layout
    shape, stride, offset = found.view or (layout.shape, layout.stride, 0)
    if offset or shape.numel() != layout.shape.numel() or not is_dense_layout(shape, stride):
        return None
    if order.derives:
        source: Any = packed.demand.derivation
        strand = _seen(source, packed.extra, layout.shape, layout.stride)
        return None if strand is None else replace(strand, shape=shape, stride=stride)
    if not isinstance(order.codec, Quant):
        return None
    return Strand(packed.payload[0], order.codec.groups(packed.demand), shape, stride, [], [])


def _placed(op: str, operand: Tensor, shape: torch.Size, stride: tuple[int, ...]) -> Step | None:
    """A step with an operand that is broadcast to this shape: which of its numbers stands for which elements."""
    if operand.shape == shape:
        return Step(op, SAME) if operand.stride() == stride else None
    sizes = (*(1,) * (len(shape) - operand.dim()), *operand.shape)
    is_spread = len(sizes) == len(shape) and all(size in (1, whole) for size, whole in zip(sizes, shape, strict=True))
    if not is_spread or not operand.is_contiguous():
        return None
    order = sorted((place for place in range(len(shape)) if shape[place] != 1), key=lambda place: -stride[place])
    varying = [number for number, place in enumerate(order) if sizes[place] != 1]
    if not varying:
        return Step(op, SPREAD, shape.numel())
    places = [order[number] for number in varying]
    if varying != list(range(varying[0], varying[-1] + 1)) or places != sorted(places):
        return None  # not side by side in memory, or not in the operand's own order
    return Step(op, SPREAD, stride[places[-1]], 0 if varying[0] == 0 else operand.numel())


# --- which ops, and how -----------------------------------------------------------------------------------------------


def _part(node: Node, what: Made, place: int) -> Strand | None:
    part = what.parts[place]
    if part is None or (part[0] is not None and asked(node, part[0]) is not node.next_functions[part[0]][0]):
        return None  # what was reshaped or cast on its way is not one of the forms that are known here
    return _strand(asked(node, part[0]), part[1])


def _operand(node: Node, what: Made, place: int) -> Operand | None:
    part = what.parts[place]
    if part is None:
        return None
    edge, how = part
    return peeked(node, how.slot) if edge is None and isinstance(how, Taken) else part_value(node, part)


def _layer_norm(node: Any, what: Made) -> Strand | None:
    found = _part(node, what, 0)
    if found is None or not found.is_contiguous:  # what it makes is
        return None
    for op, operand in (("sub", node._saved_result1), ("mul", node._saved_result2)):
        found = found and found.then(op, operand)
    for op, place in (("mul", 1), ("add", 2)):
        if found is not None and what.parts[place] is not None:
            found = found.then(op, _operand(node, what, place))
    return found


def _of_two(op: str) -> Rule:
    """An operation that may begin with either of its tensors."""

    def rule(node: Any, what: Made) -> Strand | None:
        if getattr(node, "_saved_alpha", 1) != 1:
            return None
        for one, other in ((0, 1), (1, 0)) if op in ("add", "mul") else ((0, 1),):
            found = _part(node, what, one)
            if found is not None:
                return found.then(op, _operand(node, what, other))
        return None

    return rule


def _addcmul(node: Any, what: Made) -> Strand | None:
    if node._saved_value != 1:
        return None
    for one, other in ((1, 0), (0, 1)):
        found = _part(node, what, one)
        if found is not None:
            found = found.then("mul", _operand(node, what, other))
            return found and found.then("add", added(node, what.module))
    return None


def _grouped(node: Any, what: Made) -> Strand:
    """The function is the op's own."""
    (packed,), chain, layout = node.saved_tensors, node.fusion.chain, node.layout
    return Strand(packed, chain.how, layout.shape, layout.stride, list(chain.steps), [])


def _function(name: str | Callable[[Any], str]) -> Rule:
    def rule(node: Any, what: Made) -> Strand | None:
        found = _part(node, what, 0)
        return found and found.through(name if isinstance(name, str) else name(node))

    return rule


Rule = Callable[[Any, Made], Strand | None]

CHAINED: dict[str, Rule] = {
    "NativeLayerNormBackward0": _layer_norm,
    "MulBackward0": _of_two("mul"),
    "DivBackward0": _of_two("div"),
    "AddBackward0": _of_two("add"),
    "SubBackward0": _of_two("sub"),
    "AddcmulBackward0": _addcmul,
    "GeluBackward0": _function(lambda node: "gelu_tanh" if node._saved_approximate == "tanh" else "gelu"),
    "SiluBackward0": _function("silu"),
    "SigmoidBackward0": _function("sigmoid"),
    "ReluBackward0": _function("relu"),
    "GroupedBackward": _grouped,
}
"""By their backward nodes."""
