"""Ways: how what a node made can be made again, told by the graph of a watched forward, and followed in a later one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node

from slimgrad.runtime.reruns import NEED_EPS, OPS
from slimgrad.runtime.views import CAST, LEAF, RESHAPING, VIEWS, redone, seen_through

MOST_RERUNS = 5
"""Ops that one derivation may run. A ResNet block's output takes four: two norms, their sum, the ReLU."""

MOST_WITH_PRODUCTS = 12
"""With products among them. What a gated unit returns takes eight: gate and values are products of what a norm made."""

LOOKED_THROUGH = VIEWS | RESHAPING
RESHAPED = RESHAPING | {CAST}

MOST_WAYS = 4
"""Ways to make one tensor that are remembered, the cheapest first."""

# --- what a watched forward tells -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Leaf:
    """A parameter, or an input."""

    identity: int


@dataclass(frozen=True)
class Read:
    """A tensor that an op reads: from a slot of its node, or of what made it, if not both."""

    slot: str | None
    edge: int | None
    maker: Term | Leaf | None
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
    if tensor.output_nr != 0:
        return None
    nodes, node = seen_through(tensor.grad_fn, LOOKED_THROUGH)
    term = None if node is None else _term(node, saves, MOST_RERUNS)
    return None if term is None else Passage(tuple(node.name() for node in nodes), term)


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
    there, number = (None, 0) if edge is None else node.next_functions[edge]
    if there is None or number != 0:
        return Read(name if filled else None, edge, None)
    maker: Any = through(there)
    behind_it = Leaf(id(maker.variable)) if maker.name() == LEAF else _term(maker, saves, most - 1)
    return Read(name if filled else None, edge, behind_it)


# --- ways to make it ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Taken:
    """Read from a slot of the node, which has this name."""

    name: str
    slot: str


@dataclass(frozen=True)
class Made:
    """Made again by what the node's op reads: from a slot, from what is behind an edge, or nothing."""

    name: str
    parts: tuple[Part | None, ...]
    module: nn.Module | None = None


What = Made | Taken | Leaf
Part = tuple[int | None, What]
"""The edge to what is asked, which is None for the node itself; and how that has it."""


@dataclass(frozen=True)
class Way:
    """One way to make a tensor: the ops to run, and the sites that must tell their values."""

    what: What
    sites: frozenset[int]
    runs: tuple[tuple[str, int | None], ...] = ()
    """The ops that run again: the name of the node, and a site that it saves before it runs, if there is one."""

    @property
    def reruns(self) -> int:
        return len(self.runs)

    @property
    def products(self) -> int:
        return sum(OPS[name].is_product for name, _ in self.runs)

    @property
    def is_lossy(self) -> bool:
        return any(OPS[name].is_lossy for name, _ in self.runs)


def modules_in(what: What) -> Iterator[nn.Module]:
    """The modules that are asked for more than nodes tell, or whose parameters are read."""
    if isinstance(what, Made):
        if what.module is not None and (what.name in NEED_EPS or OPS[what.name].outside is not None):
            yield what.module
        for _, piece in (part for part in what.parts if part is not None):
            yield from modules_in(piece)


SiteAt = Callable[[int, str], int | None]
"""(sequence number of a node, slot) -> number of the site."""
ModuleAt = Callable[[int], nn.Module | None]
"""Number of a site -> the module that saved it."""


@dataclass(frozen=True)
class Known:
    """What is known beside the graph."""

    site_at: SiteAt
    module_at: ModuleAt
    stays: Callable[[int], bool]
    """Whether the leaf of this identity is there in backward."""


def ways(term: Term, known: Known) -> tuple[Way, ...]:
    """The ways to make again what the node of `term` made, the cheapest first; with one product at the most, because
    what a second one reads is a site too.
    """
    found = sorted(_made(term, known), key=lambda way: (way.products, way.reruns))
    return tuple(way for way in found if way.reruns <= MOST_RERUNS and way.products <= 1)[:MOST_WAYS]


def _made(term: Term, known: Known) -> Iterator[Way]:
    owners, own = OPS[term.name].owners, _own_site(term, known.site_at)
    module = None if own is None else known.module_at(own)
    if owners and not isinstance(module, owners):
        return
    if term.name in NEED_EPS and not isinstance(getattr(module, "eps", None), float):
        return
    for parts in product(*(list(_options(term, read, known)) for read in term.reads)):
        filled = [(edge, way) for edge, way in parts if way is not None]
        pieces = tuple(None if way is None else (edge, way.what) for edge, way in parts)
        sites = frozenset(site for _, way in filled for site in way.sites)
        runs = ((term.name, own), *(run for _, way in filled for run in way.runs))
        yield Way(Made(term.name, pieces, module), sites, runs)


def _own_site(term: Term, site_at: SiteAt) -> int | None:
    """A site of what the op read, if its node saved any of it."""
    sites = (site_at(term.sequence, read.slot) for read in term.reads if read.slot is not None)
    return next((site for site in sites if site is not None), None)


def _options(term: Term, read: Read, known: Known) -> Iterator[tuple[int | None, Way | None]]:
    """Where to have what an op reads: (edge to the node to ask, how); no edge is the op's own node."""
    if read.is_empty:
        yield None, None
        return
    site = None if read.slot is None else known.site_at(term.sequence, read.slot)
    if site is not None and read.slot is not None:
        yield None, Way(Taken(term.name, read.slot), frozenset([site]))
    maker = read.maker
    if maker is None:
        return
    if isinstance(maker, Leaf):
        if site is None and known.stays(maker.identity):
            yield read.edge, Way(maker, frozenset())
        return
    kept = None if maker.result is None else known.site_at(maker.sequence, maker.result)
    if kept is not None and maker.result is not None:
        yield read.edge, Way(Taken(maker.name, maker.result), frozenset([kept]))
    for way in _made(maker, known):
        yield read.edge, way


# --- followed in a graph ----------------------------------------------------------------------------------------------


def behind(node: Node | None, names: Sequence[str]) -> tuple[list[Node], Node] | None:
    """The nodes of these views and casts, and the one behind them."""
    nodes: list[Node] = []
    for name in names:
        if node is None or node.name() != name:
            return None
        nodes.append(node)
        node, number = node.next_functions[0]
        if number != 0:
            return None
    return None if node is None else (nodes, node)


def through(node: Node) -> Node:
    """What is behind reshaping views and casts, which `part_value` does once more."""
    found = seen_through(node, RESHAPED)[1]
    return node if found is None else found


def asked(node: Node, edge: int | None) -> Node:
    found = node if edge is None else node.next_functions[edge][0]
    assert found is not None  # `fits` looked
    return found if edge is None else through(found)


def value(node: Node, what: What) -> Tensor:
    if isinstance(what, Taken):
        return getattr(node, f"_saved_{what.slot}")  # type: ignore[no-any-return]
    if isinstance(what, Leaf):
        return node.variable  # type: ignore[attr-defined, no-any-return]
    tensors = tuple(None if part is None else part_value(node, part) for part in what.parts)
    made = OPS[what.name].again(node, what.module, tensors)
    came: Any = node._input_metadata[0]
    return made.to(came.dtype)  # an op in place leaves a tensor in its own dtype


def part_value(node: Node, part: Part) -> Tensor:
    """What a node reads, in the shape and dtype in which it came."""
    edge, what = part
    made = value(asked(node, edge), what)
    return made if edge is None else redone(made, seen_through(node.next_functions[edge][0], RESHAPED)[0])
