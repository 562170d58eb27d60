"""Derivations: what backward reads, made again from what other nodes keep, by running an op once more.

NOTE [What a derivation holds]
Eager autograd keeps both sides of every norm and activation: the norm's input for its own backward, and its output for
the product behind it. The output can be made again from the input whenever backward asks for it. Nothing is held for
that but the output's own node, which the graph holds anyway; the input is read from that node's saved slot, through
whatever codec packed it. A node is never held by a tensor that it saves itself: the two would keep each other alive.

NOTE [Exact]
The same kernel runs on the same input, so that the bits are the same. It is not taken on trust: the first forward on
real tensors compares, and what comes out differently is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.autograd.graph import Node

from slimgrad.codecs import Demand, Packed
from slimgrad.errors import SavedTensorModifiedError
from slimgrad.kernels import Layout, is_dense
from slimgrad.runtime.chaining import unpacked_through
from slimgrad.runtime.reruns import OPS
from slimgrad.runtime.views import LEAF, redone, same_strides
from slimgrad.runtime.ways import Leaf, Made, Taken, Way, What, asked, behind, value

NOTHING_AROUND = nullcontext()


@dataclass(frozen=True, eq=False)
class Handle:
    """What is held instead of the tensor."""

    node: Node
    outside: tuple[tuple[Tensor, int], ...]
    """Parameters read besides, and what changes with running statistics; with their versions."""


@dataclass(frozen=True, eq=False)
class Derivation:
    """How a site's tensor is made again: the views and casts behind it, and the ways known."""

    names: tuple[str, ...]
    ways: tuple[Way, ...]
    way: Way | None = None
    """The one that was decided for."""
    exact: bool = True
    """Whether what it is made of is kept exactly."""
    node: Node | None = None
    """The tensor's node, where the tensor has lost it."""
    refuted: dict[Way, None] = field(default_factory=dict)
    """Ways that came out differently; shared by all that were made of this."""

    def open_ways(self, *, products: bool) -> tuple[Way, ...]:
        return tuple(way for way in self.ways if way not in self.refuted and (products or not way.products))

    def refute(self) -> None:
        """What came out differently is not tried again."""
        assert self.way is not None
        self.refuted[self.way] = None

    def by(self, way: Way, *, exact: bool) -> Derivation:
        return replace(self, way=way, exact=exact)

    def of(self, node: Node) -> Derivation:
        """For a tensor that was detached from this node."""
        return replace(self, node=node)

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor came about as the one that was learnt."""
        found = behind(self.node or tensor.grad_fn, self.names) if tensor.output_nr == 0 else None
        return found is not None and self.way is not None and _agrees(found[1], self.way.what) and is_dense(tensor)

    def comes_out(self, tensor: Tensor) -> bool:
        """Whether making it again gives the same bits, if its ops do that; a way that does not is refuted."""
        assert self.way is not None
        if self.fits(tensor) and (self.way.is_lossy or self._comes_out(tensor)):
            return True
        self.refute()
        return False

    def _comes_out(self, tensor: Tensor) -> bool:
        layout = Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        try:
            with torch.no_grad():
                made = self.again(Packed(layout, Demand(), (), self.handle(tensor)))
        except SavedTensorModifiedError:
            return False  # what it is made of is not there any more; if backward needs that too, it says so
        return _same_bits(made, tensor)

    def handle(self, tensor: Tensor) -> Handle:
        node = self.node or tensor.grad_fn
        found = behind(node, self.names)
        assert node is not None
        assert found is not None
        assert self.way is not None
        return Handle(node, tuple((outside, outside._version) for outside in _outside(found[1], self.way.what)))

    def again(self, packed: Packed) -> Tensor:
        """The tensor, made again; by one kernel, where what it is made of is kept in groups of a few bits."""
        handle, layout = packed.extra, packed.layout
        kind = layout.device.type
        around = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else NOTHING_AROUND
        with around:  # what was cast is in its slot as it was
            chained = None if self.exact else unpacked_through(self, handle, layout)
            if chained is not None:
                return chained
            nodes, node, what = self.maker(handle)
            made = redone(value(node, what), nodes)
        return _laid_out(made, layout)

    def maker(self, handle: Handle) -> tuple[list[Node], Node, What]:
        """The views and casts, the node that made what is behind them, and how that is made again."""
        for tensor, version in handle.outside:
            if tensor._version != version:
                kind = "a parameter" if tensor.is_floating_point() else "the running statistics of a norm, counted by"
                raise SavedTensorModifiedError(
                    f"{kind} of shape {tuple(tensor.shape)} was changed in place between forward and backward "
                    f"(version {version} then, {tensor._version} now), so what was made with it cannot be made "
                    "again. Call backward before optimizer.step(), or exempt the module with Rule(path, Keep())."
                )
        found = behind(handle.node, self.names)
        assert found is not None
        assert self.way is not None
        return *found, self.way.what


def _same_bits(one: Tensor, other: Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().view(integers), other.detach().view(integers))


def _laid_out(made: Tensor, layout: Layout) -> Tensor:
    if made.stride() == layout.stride:
        return made
    if same_strides(layout.shape, layout.stride, made.stride()):
        return made.as_strided(layout.shape, layout.stride)
    return layout.empty().copy_(made)


def _agrees(node: Node, what: What) -> bool:
    """Whether the node came about in the same way, from what is made of the same things."""
    if node.name() != (LEAF if isinstance(what, Leaf) else what.name):
        return False
    return not isinstance(what, Made) or (_knows(node, what) and all(_agree(node, what)))


def _knows(node: Node, what: Made) -> bool:
    knows = OPS[what.name].knows
    return knows is None or knows(node)


def _agree(node: Node, what: Made) -> Iterator[bool]:
    """For each tensor that the op reads."""
    for (slot, _), part in zip(OPS[what.name].reads, what.parts, strict=True):
        if part is None:
            yield slot is None or getattr(node, f"_saved_{slot.rstrip('?')}") is None
            continue
        edge, piece = part
        if edge is not None:
            source, number = node.next_functions[edge]
            yield source is not None and number == 0 and _agrees(asked(node, edge), piece)


def _outside(node: Node, what: What) -> Iterator[Tensor]:
    """Parameters that are read by no slot, and what changes with running statistics."""
    if isinstance(what, Taken):
        return
    if isinstance(what, Leaf):
        yield value(node, what)
        return
    op = OPS[what.name]
    for reads in (op.outside, op.witness):
        tensor = None if reads is None else reads(node, what.module)
        if tensor is not None:
            yield tensor
    for edge, piece in (part for part in what.parts if part is not None):
        if edge is not None:
            yield from _outside(asked(node, edge), piece)
