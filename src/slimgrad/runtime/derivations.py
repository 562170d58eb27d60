"""Derivations: what backward reads, made again from what other nodes keep, by running a cheap op once more.

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

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import Node

from slimgrad.codecs import Demand, Packed
from slimgrad.errors import SavedTensorModifiedError
from slimgrad.kernels import Layout, is_dense
from slimgrad.runtime.needs import VIEWS
from slimgrad.runtime.tickets import CAST, RESHAPING

MOST_RERUNS = 5
"""Ops that one derivation may run. A ResNet block's output takes four: two norms, their sum, the ReLU."""

BEFORE_CAST = RESHAPING | {CAST}
"""What may come before a cast: a view that turns elements round would be lost with the memory that it is a view of."""

NOTHING_AROUND = nullcontext()

MOST_WAYS = 4
"""Ways to make one tensor that are remembered, the cheapest first."""

Tensors = tuple[Any, ...]
Again = Callable[[Node, nn.Module | None, Tensors], Tensor]


@dataclass(frozen=True)
class Op:
    """How the op behind a node is run again."""

    reads: tuple[tuple[str | None, int | None], ...]
    """For each tensor it reads: the slot that may hold it, and the edge to what made it. A '?' ends the name of a slot
    that is empty where the op was given nothing."""
    again: Again
    result: str | None = None
    """The slot under which the node keeps what it made."""
    outside: Callable[[Node, nn.Module | None], Tensor | None] | None = None
    """A parameter that is read, but by no slot."""


def _pointwise(
    function: Callable[..., Tensor], *names: str, slot: str | None = "self", result: str | None = None
) -> Op:
    def again(node: Node, module: nn.Module | None, tensors: Tensors) -> Tensor:
        return function(tensors[0], *[getattr(node, f"_saved_{name}") for name in names])

    return Op(((slot, 0),), again, result)


def _of_two(function: Callable[[Tensor, Tensor], Tensor], *slots: str | None) -> Op:
    return Op(tuple(zip(slots, (0, 1), strict=True)), lambda node, module, tensors: function(*tensors))


def _layer_norm(node: Any, module: Any, tensors: Tensors) -> Tensor:
    x, weight, bias = tensors
    return torch.native_layer_norm(x, node._saved_normalized_shape, weight, bias, module.eps)[0]


def _group_norm(node: Any, module: Any, tensors: Tensors) -> Tensor:
    x, weight = tensors
    sizes = node._saved_N, node._saved_C, node._saved_HxW, node._saved_group
    return torch.native_group_norm(x, weight, norm_bias(node, module), *sizes, node._saved_eps)[0]


def _rms_norm(node: Any, module: Any, tensors: Tensors) -> Tensor:
    x, weight = tensors
    return torch.rms_norm(x, node._saved_normalized_shape, weight, module.eps)


def _batch_norm(function: Callable[..., Any], eps: str) -> Again:
    def again(node: Any, module: Any, tensors: Tensors) -> Tensor:
        x, weight, mean, var = tensors
        training = node._saved_training
        running = (None, None) if training else (mean, var)  # running statistics must not move twice
        bias = norm_bias(node, module)
        made = function(x, weight, bias, *running, training, 0.0, getattr(node, f"_saved_{eps}"))
        return made[0]  # type: ignore[no-any-return]

    return again


def norm_bias(node: Node, module: nn.Module | None) -> Tensor | None:
    """The bias of a norm that does not save it; a frozen one is known to the module alone."""
    edge = node.next_functions[2][0]
    if edge is not None:
        return getattr(edge, "variable", None)
    bias = getattr(module, "bias", None)
    return None if bias is None or bias.requires_grad else bias  # a trained one would have an edge, if it were read


def dropout_scale(p: float) -> float:
    """What is left of a tensor is multiplied with; nothing is left where p is 1."""
    return 1 / (1 - p) if p < 1 else 0.0


BATCH_NORM = (("input", 0), ("weight?", 1), ("running_mean?", None), ("running_var?", None))

OPS: dict[str, Op] = {
    "ReluBackward0": _pointwise(torch.relu, slot=None, result="result"),
    "HardtanhBackward0": _pointwise(F.hardtanh, "min_val", "max_val"),
    "LeakyReluBackward0": _pointwise(F.leaky_relu, "negative_slope"),
    "HardsigmoidBackward0": _pointwise(F.hardsigmoid),
    "HardswishBackward0": _pointwise(F.hardswish),
    "GeluBackward0": Op((("self", 0),), lambda node, m, x: F.gelu(x[0], approximate=node._saved_approximate)),  # type: ignore[attr-defined]
    "SiluBackward0": _pointwise(F.silu),
    "MishBackward0": _pointwise(F.mish),
    "SoftplusBackward0": _pointwise(F.softplus, "beta", "threshold"),
    "SigmoidBackward0": _pointwise(torch.sigmoid, slot=None, result="result"),
    "TanhBackward0": _pointwise(torch.tanh, slot=None, result="result"),
    "GluBackward0": _pointwise(F.glu, "dim"),
    "AddBackward0": Op(((None, 0), (None, 1)), lambda node, m, x: torch.add(x[0], x[1], alpha=node._saved_alpha)),  # type: ignore[attr-defined]
    "SubBackward0": Op(((None, 0), (None, 1)), lambda node, m, x: torch.sub(x[0], x[1], alpha=node._saved_alpha)),  # type: ignore[attr-defined]
    "MulBackward0": _of_two(torch.mul, "self", "other"),
    "DivBackward0": _of_two(torch.div, "self", "other"),
    "NativeDropoutBackward0": Op(
        ((None, 0), ("result1", None)),
        lambda node, m, x: torch.ops.aten.native_dropout_backward(x[0], x[1], dropout_scale(node._saved_p)),  # type: ignore[attr-defined]
    ),
    "NativeLayerNormBackward0": Op((("input", 0), ("weight?", 1), ("bias?", 2)), _layer_norm),
    "FusedRmsNormBackward0": Op((("input", 0), ("weight?", 1)), _rms_norm),
    "NativeGroupNormBackward0": Op((("input", 0), ("weight?", 1)), _group_norm, outside=norm_bias),
    "NativeBatchNormBackward0": Op(BATCH_NORM, _batch_norm(torch.native_batch_norm, "eps"), outside=norm_bias),
    "CudnnBatchNormBackward0": Op(BATCH_NORM, _batch_norm(torch.cudnn_batch_norm, "epsilon"), outside=norm_bias),
}
"""Ops that cost a pass or two over memory, by their backward nodes."""

NEED_EPS = ("NativeLayerNormBackward0", "FusedRmsNormBackward0")
"""Their nodes do not know it; the module does, if it calls it so."""

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)
"""Modules of which it is known that `bias` is what they add. A convolution that normalizes its weights has one too,
which is zero at first: the first forward would not tell that it is another."""


# --- what a watched forward tells -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """A tensor that an op reads: from a slot of its node, or of what made it, if not both."""

    slot: str | None
    edge: int | None
    maker: Term | None
    is_empty: bool = False
    """Whether the op was given nothing there."""


@dataclass(frozen=True)
class Term:
    """What a node made, as something that can be made again."""

    name: str
    sequence: int
    result: str | None
    reads: tuple[Read, ...]


@dataclass(frozen=True)
class Passage:
    """How a saved tensor comes from what its maker made: by these views and casts, the last first."""

    names: tuple[str, ...]
    term: Term


Saves = Callable[[Node, str], bool]
"""Whether a slot of a node is filled."""


def passage(tensor: Tensor, saves: Saves) -> Passage | None:
    """How the tensor could be made again, from its own graph; None if its maker is not cheap, or not known."""
    names, node = [], tensor.grad_fn
    is_cast = False
    while (
        node is not None and node.name() in VIEWS and (not is_cast or node.name() in RESHAPING or node.name() == CAST)
    ):
        is_cast = is_cast or node.name() == CAST
        names.append(node.name())
        node = node.next_functions[0][0]
    term = None if node is None else _term(node, saves, MOST_RERUNS)
    return None if term is None else Passage(tuple(names), term)


def _term(node: Node, saves: Saves, most: int) -> Term | None:
    op = OPS.get(node.name())
    if op is None or most == 0:
        return None
    reads = tuple(_read(node, slot, edge, saves, most) for slot, edge in op.reads)
    return Term(node.name(), node._sequence_nr(), op.result, reads)


def _read(node: Node, slot: str | None, edge: int | None, saves: Saves, most: int) -> Read:
    name = None if slot is None else slot.rstrip("?")
    filled = name is not None and saves(node, name)
    if name is not None and name != slot:
        return Read(name if filled else None, None, None, is_empty=not filled)
    maker, number = (None, 0) if edge is None else node.next_functions[edge]
    term = None if maker is None or number != 0 else _term(maker, saves, most - 1)
    return Read(name if filled else None, edge, term)


# --- ways to make it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """Read from a slot of the node."""

    slot: str


@dataclass(frozen=True)
class Made:
    """Made again by what the node's op reads: from a slot, from the node behind an edge, or nothing."""

    name: str
    parts: tuple[tuple[int | None, Made | Taken] | None, ...]
    module: nn.Module | None = None


@dataclass(frozen=True)
class Way:
    """One way to make a tensor: the ops to run, and the sites that must tell their values."""

    what: Made | Taken
    sites: frozenset[int]
    reruns: int


SiteAt = Callable[[int, str], int | None]
"""(sequence number of a node, slot) -> number of the site."""
ModuleAt = Callable[[int], nn.Module | None]
"""Number of a site -> the module that saved it."""


def ways(term: Term, site_at: SiteAt, module_at: ModuleAt) -> tuple[Way, ...]:
    """The ways to make again what the node of `term` made, the cheapest first."""
    found = sorted(_made(term, site_at, module_at), key=lambda way: way.reruns)
    return tuple(way for way in found if way.reruns <= MOST_RERUNS)[:MOST_WAYS]


def _made(term: Term, site_at: SiteAt, module_at: ModuleAt) -> Iterator[Way]:
    module = _module_of(term, site_at, module_at)
    if OPS[term.name].outside is not None and not isinstance(module, NORMS):
        return
    if term.name in NEED_EPS and not isinstance(getattr(module, "eps", None), float):
        return
    for parts in product(*(list(_options(term, read, site_at, module_at)) for read in term.reads)):
        filled = [(edge, way) for edge, way in parts if way is not None]
        pieces = tuple(None if way is None else (edge, way.what) for edge, way in parts)
        sites = frozenset(site for _, way in filled for site in way.sites)
        yield Way(Made(term.name, pieces, module), sites, 1 + sum(way.reruns for _, way in filled))


def _module_of(term: Term, site_at: SiteAt, module_at: ModuleAt) -> nn.Module | None:
    """The module that ran the op, if its node saved anything."""
    sites = (site_at(term.sequence, read.slot) for read in term.reads if read.slot is not None)
    return next((module_at(site) for site in sites if site is not None), None)


def _options(term: Term, read: Read, site_at: SiteAt, module_at: ModuleAt) -> Iterator[tuple[int | None, Way | None]]:
    """Where to have what an op reads: (edge to the node to ask, how); no edge is the op's own node."""
    if read.is_empty:
        yield None, None
        return
    site = None if read.slot is None else site_at(term.sequence, read.slot)
    if site is not None and read.slot is not None:
        yield None, Way(Taken(read.slot), frozenset([site]), 0)
    maker = read.maker
    if maker is None:
        return
    kept = None if maker.result is None else site_at(maker.sequence, maker.result)
    if kept is not None and maker.result is not None:
        yield read.edge, Way(Taken(maker.result), frozenset([kept]), 0)
    for way in _made(maker, site_at, module_at):
        yield read.edge, way


# --- at work --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Handle:
    """What is held instead of the tensor."""

    node: Node
    offset: int
    outside: tuple[tuple[Tensor, int], ...]
    """Parameters read besides, with their versions."""


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

    @property
    def open_ways(self) -> tuple[Way, ...]:
        return tuple(way for way in self.ways if way not in self.refuted)

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
        node = _behind(self.node or tensor.grad_fn, self.names)
        return node is not None and self.way is not None and _agrees(node, self.way.what) and is_dense(tensor)

    def comes_out(self, tensor: Tensor) -> bool:
        """Whether making it again gives the same bits; a way that does not is refuted."""
        if self.fits(tensor):
            layout = Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            with torch.no_grad():
                made = self.again(Packed(layout, Demand(), (), self.handle(tensor)))
            if _same_bits(made, tensor):
                return True
        self.refute()
        return False

    def handle(self, tensor: Tensor) -> Handle:
        node = self.node or tensor.grad_fn
        behind = _behind(node, self.names)
        assert node is not None
        assert behind is not None
        assert self.way is not None
        outside = tuple((parameter, parameter._version) for parameter in _outside(behind, self.way.what))
        return Handle(node, int(tensor.storage_offset()), outside)

    def again(self, packed: Packed) -> Tensor:
        """The tensor, made again."""
        handle, layout = packed.extra, packed.layout
        for parameter, version in handle.outside:
            if parameter._version != version:
                raise SavedTensorModifiedError(
                    f"a parameter of shape {tuple(parameter.shape)} was changed in place between forward and backward "
                    f"(version {version} then, {parameter._version} now), so what a norm made with it cannot be made "
                    "again. Call backward before optimizer.step(), or exempt the module with Rule(path, Keep())."
                )
        node = _behind(handle.node, self.names)
        assert node is not None
        assert self.way is not None
        kind = layout.device.type
        around = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else NOTHING_AROUND
        with around:  # what was cast is in its slot as it was
            made = _value(node, self.way.what).to(layout.dtype)
        return _laid_out(made, layout, handle.offset)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return torch.equal(one.detach().view(integers), other.detach().view(integers))


def _laid_out(made: Tensor, layout: Layout, offset: int) -> Tensor:
    if made.shape == layout.shape and made.stride() == layout.stride:
        return made
    seen = made.as_strided(layout.shape, layout.stride, offset)
    return seen if offset == 0 else seen.clone()  # others will look at its memory from the start


def _behind(node: Node | None, names: tuple[str, ...]) -> Node | None:
    """The node behind these views and casts."""
    for name in names:
        if node is None or node.name() != name:
            return None
        node = node.next_functions[0][0]
    return node


def _agrees(node: Node | None, what: Made | Taken) -> bool:
    if node is None or isinstance(what, Taken):
        return node is not None
    if node.name() != what.name:
        return False
    edges = node.next_functions
    return all(
        edge is None or _agrees(edges[edge][0], piece)
        for edge, piece in (part for part in what.parts if part is not None)
    )


def _outside(node: Node, what: Made | Taken) -> Iterator[Tensor]:
    if isinstance(what, Taken):
        return
    reads = OPS[what.name].outside
    parameter = None if reads is None else reads(node, what.module)
    if parameter is not None:
        yield parameter
    for edge, piece in (part for part in what.parts if part is not None):
        if edge is not None:
            yield from _outside(_asked(node, edge), piece)


def _asked(node: Node, edge: int | None) -> Node:
    found = node if edge is None else node.next_functions[edge][0]
    assert found is not None  # `fits` looked
    return found


def _value(node: Node, what: Made | Taken) -> Tensor:
    if isinstance(what, Taken):
        return getattr(node, f"_saved_{what.slot}")  # type: ignore[no-any-return]
    tensors = tuple(None if part is None else _value(_asked(node, part[0]), part[1]) for part in what.parts)
    return OPS[what.name].again(node, what.module, tensors)
