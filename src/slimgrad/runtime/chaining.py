"""Chaining: what is made again of a tensor that is kept in groups of a few bits, by one kernel that reads those bits.

Otherwise the tensor is unpacked, read by a norm, written, read by a cast and written once more: for the input of a
linear layer behind a layer norm under autocast, seven times the bytes. Only lossy sources are treated so: what is made
of exact ones must have the very bits of the first time, which the op itself gives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from slimgrad import kernels
from slimgrad.codecs import Quant
from slimgrad.kernels import Chain, Layout, Step
from slimgrad.kernels.chains import COLUMN, MOST_STEPS, PACKED, ROW, SAME
from slimgrad.kernels.geometry import LANES
from slimgrad.kernels.groups import Groups
from slimgrad.runtime.reruns import OPS
from slimgrad.runtime.tickets import CAST, RESHAPING, Sealed, peeked
from slimgrad.runtime.ways import Made, Taken, Way, asked, value

STRAIGHT = RESHAPING | {CAST}
"""Views that leave elements in their order."""


class Source(Protocol):
    """How a tensor is made again; derivations.py has it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the views and casts behind what its maker made."""

    def maker(self, handle: Any) -> tuple[Node, Made | Taken]:
        """The node that made it, and how that is made again."""


@dataclass
class Strand:
    """A packed tensor, and what is done to it so far."""

    packed: Tensor
    how: Groups
    shape: torch.Size
    steps: list[Step]
    operands: list[Tensor]
    inner: int | None = None
    """Elements of a row, once an operand tells."""

    def then(self, op: str, operand: Operand | None) -> Strand | None:
        """One step more; None if no kernel does that."""
        if operand is None:
            return None
        if isinstance(operand, Sealed):
            return self._with_packed(op, operand)
        found = _placed(operand, self.shape)
        if found is None or (found[1] is not None and self.inner not in (None, found[1])):
            return None
        self.inner = self.inner or found[1]
        return self._with(Step(op, found[0]), operand.detach().contiguous())

    def through(self, function: str) -> Strand:
        self.steps.append(Step(function))
        return self

    def _with_packed(self, op: str, operand: Sealed) -> Strand | None:
        packed = _groups_of(operand)
        if packed is None or (packed.how, packed.shape) != (self.how, self.shape):
            return self.then(op, operand.tensor())
        return self._with(Step(op, PACKED), packed.packed)

    def _with(self, step: Step, operand: Tensor) -> Strand:
        self.steps.append(step)
        self.operands.append(operand)
        return self

    def made(self, layout: Layout) -> Tensor | None:
        """What comes of it; None if no kernel does that."""
        inner = self.inner or LANES
        if len(self.steps) > MOST_STEPS or inner % LANES or self.shape.numel() % inner:
            return None
        chain = Chain(self.how, tuple(self.steps), inner)
        dtypes = tuple(operand.dtype for operand in self.operands)
        return kernels.chainer(layout, chain, dtypes).unpack(self.packed, self.operands)


Operand = Tensor | Sealed


def unpacked_through(source: Source, handle: Any, layout: Layout) -> Tensor | None:
    """What is made again, if that begins with a tensor in groups and is done to each element by itself."""
    if not _is_straight(source, handle) or not _is_contiguous(layout) or not layout.dtype.is_floating_point:
        return None
    found = _strand(*source.maker(handle))
    if found is None or found.shape.numel() != layout.shape.numel():
        return None
    return found.made(layout)


def may_chain(names: Sequence[str], way: Way, layout: Layout) -> bool:
    """Whether that could be so, as far as is known before it is done."""
    is_known = all(name in CHAINED for name, _ in way.runs)
    return is_known and STRAIGHT.issuperset(names) and _is_contiguous(layout) and layout.dtype.is_floating_point


def _is_straight(source: Source, handle: Any) -> bool:
    return STRAIGHT.issuperset(source.names) and not handle.offset


def _is_contiguous(layout: Layout) -> bool:
    expected = 1
    for size, step in zip(reversed(layout.shape), reversed(layout.stride), strict=True):
        if size != 1 and step != expected:
            return False
        expected *= size
    return True


def _strand(node: Node, what: Made | Taken) -> Strand | None:
    if isinstance(what, Taken):
        found = peeked(node, what.slot)
        return _groups_of(found) if isinstance(found, Sealed) else None
    rule = CHAINED.get(what.name)
    return None if rule is None else rule(node, what)


def _groups_of(found: Sealed) -> Strand | None:
    """What was packed, whole and in the order of its elements; or what it is derived from, and how."""
    packed, order = found.packed, found.order
    if order.derives:
        source: Any = order.demand.derivation
        return _strand(*source.maker(packed.extra)) if _is_straight(source, packed.extra) else None
    if not isinstance(order.codec, Quant) or not _is_contiguous(packed.layout) or not _is_whole(found):
        return None
    return Strand(packed.payload[0], order.codec.groups(packed.demand), _shape(found), [], [])


def _is_whole(found: Sealed) -> bool:
    if found.view is None:
        return True
    shape, stride, offset = found.view
    layout = found.packed.layout
    return (
        offset == 0
        and shape.numel() == layout.shape.numel()
        and _is_contiguous(layout._replace(shape=shape, stride=stride))
    )


def _shape(found: Sealed) -> torch.Size:
    return found.packed.layout.shape if found.view is None else found.view[0]


def _placed(operand: Tensor, shape: torch.Size) -> tuple[str, int | None] | None:
    """Of what an operand that is broadcast to a shape has one number, and the elements of a row if it tells."""
    if operand.shape == shape or operand.numel() == shape.numel():
        return SAME, None
    sizes = (1,) * (len(shape) - operand.dim()) + tuple(operand.shape)
    if len(sizes) != len(shape):
        return None
    repeated = [size == 1 and whole != 1 for size, whole in zip(sizes, shape, strict=True)]
    first = next((place for place, repeats in enumerate(repeated) if repeats), len(shape))
    if all(repeats or whole == 1 for repeats, whole in zip(repeated[first:], shape[first:], strict=True)):
        return ROW, shape[first:].numel()
    last = max(place for place, repeats in enumerate(repeated) if repeats) + 1
    if all(repeats or whole == 1 for repeats, whole in zip(repeated[:last], shape[:last], strict=True)):
        return COLUMN, shape[last:].numel()
    return None


# --- which ops, and how -----------------------------------------------------------------------------------------------


def _part(node: Node, what: Made, place: int) -> Strand | None:
    part = what.parts[place]
    return None if part is None else _strand(asked(node, part[0]), part[1])


def _operand(node: Node, what: Made, place: int) -> Operand | None:
    part = what.parts[place]
    if part is None:
        return None
    there = asked(node, part[0])
    return peeked(there, part[1].slot) if isinstance(part[1], Taken) else value(there, part[1])


def _layer_norm(node: Any, what: Made) -> Strand | None:
    found = _part(node, what, 0)
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
            outside = OPS[what.name].outside
            found = found.then("mul", _operand(node, what, other))
            return found and found.then("add", outside and outside(node, what.module))
    return None


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
}
"""By their backward nodes."""
