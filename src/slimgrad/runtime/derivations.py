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

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from slimgrad.codecs import Demand, Packed
from slimgrad.errors import SavedTensorModifiedError
from slimgrad.kernels import Layout, is_dense
from slimgrad.runtime.needs import VIEWS
from slimgrad.runtime.reruns import NEED_EPS, OPS
from slimgrad.runtime.tickets import CAST, RESHAPING

MOST_RERUNS = 5
"""Ops that one derivation may run. A ResNet block's output takes four: two norms, their sum, the ReLU."""

BEFORE_CAST = RESHAPING | {CAST}
"""What may come before a cast: a view that turns elements round would be lost with the memory that it is a view of."""

LOOKED_THROUGH = VIEWS | RESHAPING

NOTHING_AROUND = nullcontext()

MOST_WAYS = 4
"""Ways to make one tensor that are remembered, the cheapest first."""

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
    """How the tensor could be made again, from its own graph; None if its maker is none that can run again."""
    names, node = [], tensor.grad_fn
    is_cast = False
    while node is not None and node.name() in (BEFORE_CAST if is_cast else LOOKED_THROUGH):
        is_cast = is_cast or node.name() == CAST
        names.append(node.name())
        node = node.next_functions[0][0]
    term = None if node is None else _term(node, saves, MOST_RERUNS)
    return None if term is None else Passage(tuple(names), term)


def _term(node: Node, saves: Saves, most: int) -> Term | None:
    op = OPS.get(node.name())
    if op is None or most == 0 or not (op.knows is None or op.knows(node)):
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
    runs: tuple[tuple[str, int | None], ...] = ()
    """The ops that run again: the name of the node, and a site that it saves before it runs, if there is one."""

    @property
    def reruns(self) -> int:
        return len(self.runs)

    @property
    def products(self) -> int:
        return sum(OPS[name].is_product for name, _ in self.runs)


SiteAt = Callable[[int, str], int | None]
"""(sequence number of a node, slot) -> number of the site."""
ModuleAt = Callable[[int], nn.Module | None]
"""Number of a site -> the module that saved it."""


def ways(term: Term, site_at: SiteAt, module_at: ModuleAt) -> tuple[Way, ...]:
    """The ways to make again what the node of `term` made, the cheapest first; with one product at the most, because
    what a second one reads is a site too.
    """
    found = sorted(_made(term, site_at, module_at), key=lambda way: (way.products, way.reruns))
    return tuple(way for way in found if way.reruns <= MOST_RERUNS and way.products <= 1)[:MOST_WAYS]


def _made(term: Term, site_at: SiteAt, module_at: ModuleAt) -> Iterator[Way]:
    owners, own = OPS[term.name].owners, _own_site(term, site_at)
    module = None if own is None else module_at(own)
    if owners and not isinstance(module, owners):
        return
    if term.name in NEED_EPS and not isinstance(getattr(module, "eps", None), float):
        return
    for parts in product(*(list(_options(term, read, site_at, module_at)) for read in term.reads)):
        filled = [(edge, way) for edge, way in parts if way is not None]
        pieces = tuple(None if way is None else (edge, way.what) for edge, way in parts)
        sites = frozenset(site for _, way in filled for site in way.sites)
        runs = ((term.name, own), *(run for _, way in filled for run in way.runs))
        yield Way(Made(term.name, pieces, module), sites, runs)


def _own_site(term: Term, site_at: SiteAt) -> int | None:
    """A site of what the op read, if its node saved any of it."""
    sites = (site_at(term.sequence, read.slot) for read in term.reads if read.slot is not None)
    return next((site for site in sites if site is not None), None)


def _options(term: Term, read: Read, site_at: SiteAt, module_at: ModuleAt) -> Iterator[tuple[int | None, Way | None]]:
    """Where to have what an op reads: (edge to the node to ask, how); no edge is the op's own node."""
    if read.is_empty:
        yield None, None
        return
    site = None if read.slot is None else site_at(term.sequence, read.slot)
    if site is not None and read.slot is not None:
        yield None, Way(Taken(read.slot), frozenset([site]))
    maker = read.maker
    if maker is None:
        return
    kept = None if maker.result is None else site_at(maker.sequence, maker.result)
    if kept is not None and maker.result is not None:
        yield read.edge, Way(Taken(maker.result), frozenset([kept]))
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
                    f"(version {version} then, {parameter._version} now), so what was made with it cannot be made "
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
