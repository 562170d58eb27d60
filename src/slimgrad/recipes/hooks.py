"""Hooks by which controllers see a training."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

C = TypeVar("C")


class Hook(ABC, Generic[C]):
    """On a module or a weight; on a copy of the model it is inert. It does not keep its owner alive, for what hangs on
    a parameter is no place for a cycle.
    """

    def __init__(self, owner: C | None, path: str) -> None:
        self._owner = None if owner is None else weakref.ref(owner)
        self.path = path

    @property
    def owner(self) -> C | None:
        return None if self._owner is None else self._owner()

    @property
    def is_inert(self) -> bool:
        return self._owner is None

    @abstractmethod
    def __call__(self, *args: Any) -> None: ...

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Hook[C]:
        return type(self)(None, self.path)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (None, self.path)
