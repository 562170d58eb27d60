"""Reading the autograd graph: which node and slot each saved tensor serves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from slimgrad.runtime.tickets import Held, Reader


def tensors_in(value: Any, depth: int = 6) -> Iterator[Tensor]:
    """Every tensor in nested containers, mappings and plain objects such as dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0 or value is None or isinstance(value, (str, bytes, int, float, bool, type)):
        return
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth - 1)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, depth - 1)
    elif hasattr(value, "__dict__"):
        for item in vars(value).values():
            yield from tensors_in(item, depth - 1)


def nodes_from(roots: Iterable[Node | None], first: int) -> Iterator[Node]:
    """The nodes behind `roots` that were made since sequence number `first`: this forward's, not its inputs'."""
    seen: set[Node] = set()
    pending = [node for node in roots if node is not None]
    while pending:
        node = pending.pop()
        if node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        yield node
        pending.extend(edge for edge, _ in node.next_functions if edge is not None)


@lru_cache(maxsize=4096)
def _slots(kind: type) -> tuple[str, ...]:
    """The attributes under which a node of this class shows its saved tensors."""
    names = tuple(name for name in dir(kind) if name.startswith("_saved_"))
    return (*names, "saved_tensors") if hasattr(kind, "saved_tensors") else names


def reveal(
    roots: Iterable[Node | None], first: int, saving: set[int], reader: Reader
) -> Iterator[tuple[Held, Node, str]]:
    """Each ticket with the node and slot that holds it.

    Only nodes whose sequence number is in `saving` are read: reading a node inside a checkpointed region would run
    that region again.
    """
    for node in nodes_from(roots, first):
        if node._sequence_nr() not in saving:
            continue
        for attribute in _slots(type(node)):
            found = reader.read(node, attribute)
            slot = attribute.removeprefix("_saved_")
            for position, held in enumerate(found):
                yield held, node, slot if len(found) == 1 else f"{slot}[{position}]"
