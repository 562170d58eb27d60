"""What a pack hook hands to autograd in place of a tensor, and what an unpack hook turns back into one."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.multiprocessing.reductions import StorageWeakRef

from slimgrad.codecs import Codec, Demand, Derive, Packed, Quant
from slimgrad.errors import DoubleBackwardError, SavedTensorModifiedError, SiteChangedError
from slimgrad.ops.reading import reader
from slimgrad.runtime import needs
from slimgrad.runtime.views import CAST, LEAF, RESHAPING
from slimgrad.spec import Need, Site

View = tuple[torch.Size, tuple[int, ...], int | torch.SymInt]
"""Shape, strides and offset."""

Origin = tuple[int, int]
"""A node's sequence number, and which of its outputs."""


_current_node = torch._C._current_autograd_node
sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]


class Kept:
    """A tensor held as it is, with autograd's own guard against later in-place changes.

    It holds `detach()`, not what a node made: one that saves its own output would otherwise keep itself alive for ever.
    The detached tensor shares the version counter, which autograd does not compare where hooks are in use.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = tensor._version

    def open(self) -> Tensor:
        if self.tensor._version != self.version:
            raise SavedTensorModifiedError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a {self.tensor.dtype} tensor of shape {list(self.tensor.shape)} is at version "
                f"{self.tensor._version}; expected version {self.version} instead"
            )
        return self.tensor


class Sharing(enum.Enum):
    """With whom a Packed is shared."""

    NONE = enum.auto()
    MEMORY = enum.auto()
    """Views of the same memory."""
    WHOLE = enum.auto()
    """Views with gaps that fill one storage together, which is packed whole: q, k and v of one product."""
    COPIES = enum.auto()
    """Copies in another dtype that autocast makes of one tensor, one for each product that reads it."""


@dataclass(frozen=True, eq=False)
class Order:
    """What to do at one site from now on, and how to recognise the site."""

    site: Site
    answer: needs.Answer
    codec: Codec
    demand: Demand
    dtype: torch.dtype
    is_output: bool
    """Whether the node that saves the tensor also made it."""
    sibling: int | None = None
    """Index, within the same call, of the slot whose shape the demand needs."""
    family: int = 0
    """Orders of the same codec and demand have the same number."""
    sharing: Sharing = Sharing.NONE
    # Looked at for every tensor, so not looked up behind two dots each time:
    rank: int = field(init=False)
    producer: str | None = field(init=False)
    node: str = field(init=False)
    elementwise: bool = field(init=False)
    holds_values: bool = field(init=False)
    alone: bool = field(init=False)
    """Whether each tensor has a Packed of its own, made of nothing but the tensor."""
    derives: bool = field(init=False)
    read: Callable[[Packed], Tensor] = field(init=False)
    """What backward is handed of a Packed."""
    first_order: bool = field(init=False)
    """Whether second-order gradients must be refused."""
    is_peeked: bool = field(init=False)
    """Whether what is made of it can be made of what is packed."""
    readers: tuple[str, ...] = ()
    """Nodes that read it too, to make what they need from it."""
    reads_besides: int = 0
    """How often they do, where it is worth holding until then."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rank", len(self.site.shape))
        object.__setattr__(self, "producer", self.site.producer)
        object.__setattr__(self, "node", self.site.node)
        object.__setattr__(self, "elementwise", self.codec.elementwise)
        object.__setattr__(self, "holds_values", self.codec.holds_values)
        object.__setattr__(self, "alone", self.codec.elementwise and self.sharing is Sharing.NONE)
        object.__setattr__(self, "derives", isinstance(self.codec, Derive) and self.demand.derivation is not None)
        object.__setattr__(self, "read", reader(self.codec))
        object.__setattr__(self, "first_order", self.codec.lossy or self.answer.once)
        object.__setattr__(self, "is_peeked", self.derives or isinstance(self.codec, Quant))

    def matches(self, tensor: Tensor) -> bool:
        """Whether the tensor looks like the one this order was made for."""
        if self.derives and not self.demand.derivation.fits(tensor):  # type: ignore[union-attr]
            return False
        if tensor.dtype is not self.dtype or tensor.dim() != self.rank:
            return False
        if self.demand.parameter is not None:
            return tensor.shape == self.site.shape
        node = tensor.grad_fn
        if node is None:
            return self.producer is None
        name = node.name()
        if name != self.producer and not (name in RESHAPING and self.producer in RESHAPING):
            return False
        return (node._sequence_nr() == sequence_number() - 1) is self.is_output

    def demand_for(self, shapes: list[torch.Size]) -> Demand:
        """The demand, with the input size a pooling index is relative to."""
        if self.sibling is None:
            return self.demand
        return sized(self.demand, self.site.node, shapes[self.sibling])

    def verify(self, node: Node) -> None:
        """Ask the node that really runs whether it needs what was learnt; a wrong gradient must never pass silently."""
        name = node.name()
        if name in self.readers or needs.CHECKPOINT in self.readers:
            return  # a region reads its inputs while any of its nodes runs
        # Where the values are held, it does not matter what is read of them; asking the node would take 10 us.
        if (self.holds_values and name == self.node) or self.node == needs.CHECKPOINT:
            return
        if name == self.node:
            if self.demand.need is Need.WEIGHT or self.answer is needs.DROPOUT_MASK:
                return
            found = needs.answer(node, self.site.slot)
            if found is self.answer or found == self.answer:
                return
            what = f"{found.need} {found.detail or ''}".strip()
        else:
            what = name
        raise SiteChangedError(
            f"{self.site.name}: learnt as {self.answer.need} for {self.site.node} with {dict(self.answer.detail)}, but "
            f"backward runs {what}. The forward took another path than the one watched. Exempt this module with "
            f"Rule({self.site.path!r}, Keep()), or apply anew after the change."
        )


def sized(demand: Demand, node: str, input_shape: torch.Size) -> Demand:
    """The demand of a pooling index, completed by the spatial size of the pool's input."""
    rank = len(demand.detail["kernel_size"]) if "kernel_size" in demand.detail else 3 if "3D" in node else 2
    return replace(demand, detail={**demand.detail, "input_size": tuple(input_shape[-rank:])})


def producer_name(tensor: Tensor) -> str | None:
    """The backward node that made the tensor, or None."""
    node = tensor.grad_fn
    return None if node is None else node.name()


def origin(tensor: Tensor) -> Origin | None:
    """Which output of which node the tensor is a copy of in another dtype, seen through views; None if it is none.

    Copies of one output have equal values: changing it in place would give it another node.
    """
    node = tensor.grad_fn
    while node is not None and node.name() in RESHAPING:
        node = node.next_functions[0][0]
    if node is None or node.name() != CAST:
        return None
    source, output = node.next_functions[0]
    return None if source is None or source.name() == LEAF else (source._sequence_nr(), output)


def is_output(tensor: Tensor) -> bool:
    """Whether the node that saves the tensor right now, the newest in this thread, is the one that made it."""
    return tensor.grad_fn is not None and tensor.grad_fn._sequence_nr() == sequence_number() - 1


class Latest:
    """The memory that shared tensors of one forward were unpacked to last, for readers to come."""

    __slots__ = ("memories", "most")

    UNPACKED = 2
    """Attention reads q, k and v before its own output, which the product after it has just read."""
    MADE = 4
    """Of what is made again for several: what a gated unit read, its gate, the values beside it, and their product."""

    def __init__(self, most: int) -> None:
        self.memories: dict[int, torch.UntypedStorage] = {}
        self.most = most

    def keep(self, memory: torch.UntypedStorage) -> None:
        self.memories[memory._cdata] = memory
        if len(self.memories) > self.most:
            del self.memories[next(iter(self.memories))]

    def drop(self, memory: torch.UntypedStorage) -> None:
        self.memories.pop(memory._cdata, None)


class Shared:
    """A Packed with several readers. Unpacked once for those that read at the same time, such as q, k and v of one
    attention, and for those that read right after, such as the three products that q, k and v come from.

    It is the memory that is remembered, weakly: autograd makes tensors of its own of what it is handed. `latest` holds
    it until all have read it or a few others are unpacked, so that readers who never come cost no more than those.
    """

    __slots__ = ("_latest", "_memory", "packed", "readers")

    def __init__(self, packed: Packed, latest: Latest) -> None:
        self.packed = packed
        self.readers = 0
        """How many are still to come."""
        self._latest = latest
        self._memory: StorageWeakRef | None = None

    def open(self, codec: Codec, view: View | None) -> Tensor:
        memory = None if self._memory is None else torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        if memory is None:
            tensor = codec.unpack(self.packed)
            memory = tensor.untyped_storage()
            self._memory = StorageWeakRef(memory)
            opened = tensor if view is None else tensor.as_strided(*view)
        else:
            layout = self.packed.layout
            shape, stride, offset = view or (layout.shape, layout.stride, 0)
            opened = torch.empty(0, dtype=layout.dtype, device=layout.device).set_(memory, offset, shape, stride)
        self.readers -= 1
        (self._latest.keep if self.readers > 0 else self._latest.drop)(memory)
        return opened


class Peek(threading.local):
    """What is wanted as it is packed, when it is opened in this thread right now: the node's name and the slot."""

    wanted: tuple[str, str] | None = None
    found: Sealed | None = None


_peek = Peek()
_NOTHING = torch.empty(0)


def peeked(node: Node, slot: str) -> Tensor | Sealed:
    """What is behind a node's slot: what was packed, if that is in groups or can be made again; else the tensor."""
    _peek.wanted, _peek.found = (node.name(), slot), None
    try:
        tensor: Tensor = getattr(node, f"_saved_{slot}")
        return tensor if _peek.found is None else _peek.found
    finally:
        _peek.wanted, _peek.found = None, None


class Sealed:
    """A tensor of which only what backward needs is kept."""

    __slots__ = ("order", "packed", "shared", "view")

    def __init__(self, order: Order, packed: Packed, shared: Shared | None = None, view: View | None = None) -> None:
        self.order = order
        self.packed = packed
        self.shared = shared
        self.view = view
        """Which part of the shared memory is asked for, if it is not the tensor that was packed."""
        if shared is not None:
            shared.readers += 1 + order.reads_besides

    def open(self) -> Tensor:
        order, node = self.order, _current_node()
        if node is not None:
            order.verify(node)
            if order.first_order and torch.is_grad_enabled():
                raise DoubleBackwardError(
                    f"{order.site.name}: a second-order gradient (create_graph=True) goes through a tensor kept by "
                    f"{order.codec!r}, which holds too little for it. Exempt the module with "
                    f"Rule({order.site.path!r}, Keep())."
                )
        if _peek.wanted is not None and order.is_peeked and _peek.wanted == (order.node, order.site.slot):
            _peek.found = self
            return _NOTHING
        return self.tensor()

    def tensor(self) -> Tensor:
        if self.shared is None:
            return self.order.read(self.packed)
        return self.shared.open(self.order.codec, self.view)


class Held:
    """The ticket of a watched forward: first the tensor itself, then what the learnt order makes of it."""

    __slots__ = ("__weakref__", "audit", "maker", "reader", "ticket")

    def __init__(self, ticket: Kept | Sealed, reader: Reader, maker: Node | None = None) -> None:
        self.ticket = ticket
        self.reader = reader
        self.maker = maker
        """The node of a tensor that could be made again: one from before the node that saved it, never that one."""
        self.audit: Any = None

    def open(self) -> Tensor:
        if self.reader.reading:
            self.reader.found.append(self)
            return self.ticket.tensor if isinstance(self.ticket, Kept) else self.ticket.open()
        self.reader.opened = True
        if self.audit is not None:
            self.audit.settle()  # backward begins: the moment at which kept bytes are counted
            self.audit = None
        return self.ticket.open()


class Reader:
    """Collects the tickets that reading a node's saved slot opens; this tells which slot each ticket serves."""

    __slots__ = ("found", "opened", "reading")

    def __init__(self) -> None:
        self.reading = False
        self.opened = False
        """Whether backward has begun, so that the graph may be gone."""
        self.found: list[Held] = []

    def read(self, node: Node, attribute: str) -> list[Held]:
        self.reading, found = True, self.found
        try:
            getattr(node, attribute)
        except RuntimeError:  # already freed: it keeps nothing any more
            return []
        finally:
            self.reading, self.found = False, []  # what holds a ticket would hold its tensor
        return found


Ticket = Kept | Sealed | Held


unpack: Callable[[Ticket], Tensor] = methodcaller("open")
"""The unpack hook."""
