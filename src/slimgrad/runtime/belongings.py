"""What modules hold in attributes of their own: as it was, once a forward that only pretends is over.

NOTE [What a forward leaves behind]
Modules keep things from one forward for the next: a table of positions, made when it is first needed, a hidden state, a
count, a list of losses. Made on fake tensors, such a table would be found by every real forward from then on, and what
is computed with a fake tensor is fake: nothing would be trained, and no error would say so. So whatever modules hold is
put back: attributes, what was registered, and what is in lists, dicts and sets. What else holds something (closures,
functions with a cache) is out of reach; the gate looks whether anything fake comes out of the first real forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

TORCHS = frozenset(vars(nn.Module()))
"""Attributes that every module has. Hooks and modes are put back by those who change them."""
REGISTERED = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


@contextmanager
def belongings_of(model: nn.Module) -> Iterator[None]:
    """Whatever happens meanwhile, the model's modules hold afterwards what they hold now."""
    places = [vars(module) for module in model.modules()]
    owns = [{name: value for name, value in place.items() if name not in TORCHS} for place in places]
    contents: dict[int, tuple[Any, list[Any]]] = {}
    for place, own in zip(places, owns, strict=True):
        _look([*own.values(), *[place[name] for name in REGISTERED]], contents)
    try:
        yield
    finally:
        for container, items in contents.values():
            _put_back(container, items)
        for place, own in zip(places, owns, strict=True):
            for name in place.keys() - own.keys() - TORCHS:
                del place[name]
            place.update(own)


def _look(values: Iterable[Any], contents: dict[int, tuple[Any, list[Any]]]) -> None:
    """Remember what is in each container, and in those inside."""
    for value in values:
        if not isinstance(value, (list, tuple, dict, set, deque)) or id(value) in contents:
            continue
        contents[id(value)] = value, _items(value)
        if not isinstance(value, set):
            _look(value.values() if isinstance(value, dict) else value, contents)


def _items(container: Any) -> list[Any]:
    return list(container.items()) if isinstance(container, dict) else list(container)


def _put_back(container: Any, items: list[Any]) -> None:
    """In place, for others may hold it too; by what the types themselves do, not what is made of them."""
    if isinstance(container, tuple) or _same(container, _items(container), items):
        return
    if isinstance(container, dict):
        dict.clear(container)
        dict.update(container, items)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, items)
    elif isinstance(container, deque):
        deque.clear(container)
        deque.extend(container, items)
    else:
        list.__setitem__(container, slice(None), items)


def _same(container: Any, now: list[Any], before: list[Any]) -> bool:
    """Whether these are the very same objects; tensors are not compared."""
    if len(now) != len(before):
        return False
    if isinstance(container, dict):
        return all(a is c and b is d for (a, b), (c, d) in zip(now, before, strict=True))
    return all(a is b for a, b in zip(now, before, strict=True))
