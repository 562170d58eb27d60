"""Needs, sites and storages: the words in which slimgrad says what autograd keeps, and for whom."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from slimgrad.spec.values import Value

OUTSIDE = "<outside>"
"""The path of what is saved under `with run:` but outside the model, such as the loss."""


class Need(enum.Enum):
    """What a backward slot must deliver, usually far less than the tensor kept for it; the least demanding first."""

    NOTHING = "nothing"
    """The value is never read; shape, strides and dtype are."""
    WEIGHT = "weight"
    """A parameter, a view of one, or its autocast copy."""
    INDEX = "index"
    """Small integers, such as the position inside a pooling window."""
    MASK = "mask"
    """One bit per element."""
    DERIVATIVE = "derivative"
    """Only f'(x) of a pointwise f."""
    OPERAND = "operand"
    """Enters the gradient of a parameter only; the gradient that flows on stays exact."""
    VALUES = "values"
    """The values enter the gradient that flows on."""
    EXACT = "exact"
    """Must not change; also the safe default for anything unknown."""

    @property
    def rank(self) -> int:
        """How demanding it is."""
        return list(Need).index(self)

    def __str__(self) -> str:
        return self.name


NO_SITE = -1


@dataclass(frozen=True, kw_only=True, repr=False)
class Site(Value):
    """One saved slot: which module call saved it, for which backward node, and what that node needs of it."""

    path: str
    """Module path, '' for the model itself."""
    module: str
    """Class name of that module."""
    call: int
    """Which call of that module within one forward."""
    index: int
    """Which of the tensors that this call saved itself."""
    node: str
    slot: str
    need: Need
    fn: str | None = None
    """The pointwise function, for MASK and DERIVATIVE."""
    detail: Mapping[str, Any] = field(default_factory=dict)
    """The node's own constants (kernel size, bounds, alpha), as far as a codec wants them."""
    producer: str | None = None
    """The backward node of the op that made the tensor; None for leaves."""
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    """Bytes of the saved view; the storage behind it may be larger and shared."""
    storage: int
    """Index into Profile.storages."""
    parameter: str | None = None
    """The parameter behind it, for WEIGHT."""
    content: int = 0
    """The same number for sites that hold the very same elements, in one storage or as copies in several."""
    sources: tuple[tuple[int, ...], ...] = ()
    """Ways to make it again, the cheapest first: the numbers of the sites whose values each of them reads."""
    runs: tuple[tuple[int, ...], ...] = ()
    """Of each way, for each op that it runs again: a site of what the op reads; NO_SITE if it saves none of that."""

    chained: tuple[bool, ...] = ()
    """Of each way: whether one kernel may do it, from sources in groups of a few bits."""

    @property
    def reruns(self) -> tuple[int, ...]:
        """Of each way: how many ops it runs again."""
        return tuple(map(len, self.runs))

    @property
    def is_result(self) -> bool:
        """Whether the op that saves it returned it, and so saves it when it has run; others save it before."""
        return self.slot.startswith("result")

    @property
    def key(self) -> tuple[str, int, int]:
        """What identifies the site from step to step."""
        return self.path, self.call, self.index

    @property
    def name(self) -> str:
        call = f"#{self.call}" if self.call else ""
        return f"{self.path or '(model)'}{call}:{self.node}.{self.slot}"


@dataclass(frozen=True, kw_only=True, repr=False)
class Storage(Value):
    """One block of memory, counted once however many slots keep it alive."""

    bytes: int
    kind: str
    """'activation' or 'weight copy' (by autocast); 'parameter', 'buffer' or 'input', which are not autograd's."""
    savers: tuple[int, ...]
    """Indices into Profile.sites."""

    @property
    def counted(self) -> bool:
        """Whether letting go of it would free memory: parameters, buffers and inputs live on anyway."""
        return self.kind in ("activation", "weight copy")
