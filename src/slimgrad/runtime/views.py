"""Views and casts: nodes behind which stands the same tensor, seen otherwise; and what they did, done once more."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

LEAF = "torch::autograd::AccumulateGrad"
"""A leaf's node, which has no number of its own."""
CAST = "ToCopyBackward0"
EXPANDED = "ExpandBackward0"

RESHAPING = frozenset(["ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0"])
"""What `reshape` makes is a view on fake tensors, and an alias on real ones."""

VIEWS = frozenset(
    [
        "TBackward0",
        "TransposeBackward0",
        "PermuteBackward0",
        "ViewBackward0",
        "ReshapeAliasBackward0",
        "UnsqueezeBackward0",
        "SqueezeBackward0",
        "SqueezeBackward1",
        "SqueezeBackward2",
        EXPANDED,
        "AliasBackward0",
        CAST,
    ]
)
"""Nodes that only view or cast: behind them may stand a parameter."""

IN_ROWS = RESHAPING | {
    "UnsqueezeBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "AliasBackward0",
}
"""Those that leave elements which lie in rows where they are."""


def signed(number: int) -> int:
    """A dimension that was counted from the end, which nodes tell without its sign."""
    return number - 2**64 if number >= 2**63 else number


def seen_through(node: Node | None, names: Collection[str]) -> tuple[list[Node], Node | None]:
    """The nodes from this one on that have such names, the last first; and the one behind them."""
    nodes: list[Node] = []
    while node is not None and node.name() in names:
        source, number = node.next_functions[0]
        if number != 0:  # another output of it than the one that is made again
            break
        nodes.append(node)
        node = source
    return nodes, node


def redone(tensor: Tensor, nodes: Sequence[Node]) -> Tensor:
    """The tensor as these nodes have it seen and cast, the last first."""
    for node in reversed(nodes):
        tensor = _redone(tensor, node)
    return tensor


def _redone(tensor: Tensor, node: Any) -> Tensor:
    name, came = node.name(), node._input_metadata[0]
    if name == CAST:
        return tensor.to(came.device, came.dtype)
    if name == "TBackward0":
        return tensor.t()
    if name == "TransposeBackward0":
        return tensor.transpose(signed(node._saved_dim0), signed(node._saved_dim1))
    if name == "PermuteBackward0":
        return tensor.permute([signed(dim) for dim in node._saved_dims])
    if name == EXPANDED:
        return tensor.expand(came.shape)
    return tensor.reshape(came.shape)


def lies_as(
    shape: Sequence[int], stride: Sequence[int], nodes: Iterable[Node], seen: Sequence[int], seen_stride: Sequence[int]
) -> bool:
    """Whether elements that lie so are where these nodes leave them: a cast may put them in another order."""
    views = [node for node in nodes if node.name() != CAST]
    if not views:
        return tuple(shape) == tuple(seen) and same_strides(shape, stride, seen_stride)
    if all(view.name() in IN_ROWS for view in views) and in_rows(shape, stride) and in_rows(seen, seen_stride):
        return math.prod(shape) == math.prod(seen)  # said without the 20 µs that the views take below
    found = redone(torch.empty_strided(shape, stride, device="meta"), views)
    return tuple(found.shape) == tuple(seen) and same_strides(found.shape, found.stride(), seen_stride)


def in_rows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements lie in the order of the dimensions, without gaps."""
    step = 1
    for size, one in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and one != step:
            return False
        step *= size
    return True


def same_strides(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether they say the same of a tensor of this shape."""
    return all(size == 1 or first == second for size, first, second in zip(shape, one, other, strict=True))


def leaf_behind(node: Node | None) -> Any:
    """The leaf tensor that `node` is a view or cast of, or None."""
    return getattr(seen_through(node, VIEWS)[1], "variable", None)


def leaf_copied(tensor: Tensor) -> Any:
    """The same, if the tensor is the leaf itself, a view of it, or a view of a copy with all elements in their places;
    but not of one that was rounded twice or moved elements.
    """
    if tensor.is_leaf:
        return tensor
    nodes, end = seen_through(tensor.grad_fn, VIEWS)
    leaf = getattr(end, "variable", None)
    casts = [place for place, node in enumerate(nodes) if node.name() == CAST]
    if leaf is None or not casts:
        return leaf
    repeated = any(node.name() == EXPANDED for node in nodes[casts[0] :])
    if len(casts) > 1 or repeated or leaf.dtype == tensor.dtype:
        return None
    return leaf if lies_as(leaf.shape, leaf.stride(), nodes, tensor.shape, tensor.stride()) else None
