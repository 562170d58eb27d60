"""JSON data as what a field is annotated with, or an error that says what was expected there."""

from __future__ import annotations

import enum
import reprlib
import types
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from slimgrad.errors import SlimgradError, SpecError

Read = Callable[[Any], Any]

PLAIN = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
"""What JSON has by itself, in words."""


@cache
def readers_of(cls: Any) -> dict[str, Read]:
    """Of each field of a Value. Texts are not taken for lists of letters, nor true and false for numbers."""
    return {name: reader_of(hint, cls.may_be_nan) for name, hint in get_type_hints(cls).items()}


@cache
def reader_of(hint: Any, nan: bool = False) -> Read:
    """What reads data of this type; NaN is no number unless `nan`."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _either(parts, nan)
    if origin in (tuple, frozenset):
        return _list(origin, parts, nan)
    if origin is Mapping:
        return _mapping(reader_of(parts[1], nan))
    if origin is None and hasattr(hint, "from_dict"):
        return hint.from_dict  # type: ignore[no-any-return]
    if origin is None and isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _member(hint)
    return _plain(hint, nan) if hint in PLAIN else tuples


def _either(parts: Sequence[Any], nan: bool) -> Read:
    *others, last = [reader_of(part, nan) for part in parts if part is not types.NoneType]

    def read(value: Any) -> Any:
        if value is None and types.NoneType in parts:
            return None
        for other in others:
            try:
                return other(value)
            except SpecError:
                continue
        return last(value)

    return read


def _list(kind: Callable[[Any], Any], parts: Sequence[Any], nan: bool) -> Read:
    is_any_length = len(parts) == 1 or parts[-1] is Ellipsis
    readers = [reader_of(part, nan) for part in parts if part is not Ellipsis]

    def read(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise SpecError(f"expected a list, found {said(value)}")
        if not is_any_length and len(value) != len(readers):
            raise SpecError(f"expected a list of {len(readers)}, found {said(value)}")
        each = readers * len(value) if is_any_length else readers
        return kind([at(f"number {place}", *pair) for place, pair in enumerate(zip(each, value, strict=True), 1)])

    return read


def _mapping(each: Read) -> Read:
    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise SpecError(f"expected an object, found {said(value)}")
        return {key: at(repr(key), each, item) for key, item in value.items()}

    return read


def at(where: str, read: Read, item: Any) -> Any:
    """What is read there; an error says where that was."""
    try:
        return read(item)
    except SlimgradError as error:
        raise SpecError(f"{where}: {error}") from error


def _member(kind: type[enum.Enum]) -> Read:
    def read(value: Any) -> Any:
        try:
            return kind(value)
        except ValueError as error:
            known = ", ".join(repr(member.value) for member in kind)
            raise SpecError(f"expected one of {known}; found {said(value)}") from error

    return read


def _plain(kind: type, nan: bool) -> Read:
    kinds = (int, float) if kind is float else kind

    def read(value: Any) -> Any:
        is_other = isinstance(value, bool) and kind is not bool
        if not isinstance(value, kinds) or is_other or (value != value and not nan):
            raise SpecError(f"expected {PLAIN[kind]}, found {said(value)}")
        return value

    return read


def said(value: Any) -> str:
    """What was found, in few words."""
    return "null" if value is None else reprlib.repr(value)


def tuples(value: Any) -> Any:
    """JSON lists back to tuples, so that values compare equal after a round trip."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value
