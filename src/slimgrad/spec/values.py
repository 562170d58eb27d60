"""Frozen values with versioned JSON: what every codec, rule, profile and plan is."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from slimgrad.errors import SpecError

FORMAT = "slimgrad"

V = TypeVar("V", bound="Value")


class Value:
    """Mixin for frozen dataclasses: versioned JSON, and a repr that is what one would type."""

    version: ClassVar[int] = 1

    def to_dict(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        body = {f.name: encode(getattr(self, f.name)) for f in fields}
        return {"type": type(self).__name__, "version": self.version, **body}

    @classmethod
    def from_dict(cls: type[V], data: Mapping[str, Any]) -> V:
        body = checked_body(cls, data)
        try:
            return cls(**body)
        except TypeError as error:
            raise SpecError(f"{cls.__name__}: {error}") from error

    def to_json(self, *, indent: int | None = 1) -> str:
        return json.dumps({"format": FORMAT, **self.to_dict()}, indent=indent)

    @classmethod
    def from_json(cls: type[V], text: str) -> V:
        return cls.from_dict(parsed(text))

    def __repr__(self) -> str:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in fields if f.repr)
        return f"{type(self).__name__}({', '.join(shown)})"


def encode(value: Any) -> Any:
    """A value as plain JSON data."""
    if isinstance(value, Value):
        return value.to_dict()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    return value


def parsed(text: str) -> dict[str, Any]:
    """JSON text as a dictionary, or a clear error."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"this is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(f"expected a JSON object, found {type(data).__name__}")
    return data


def checked_body(cls: type[Value], data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `cls` in `data`, after checking type and version."""
    found_type, found_version = data.get("type"), data.get("version")
    if found_type != cls.__name__:
        raise SpecError(f"expected JSON of type {cls.__name__!r}, found {found_type!r}")
    if found_version != cls.version:
        raise SpecError(
            f"{cls.__name__}: this slimgrad reads version {cls.version}, the text has {found_version!r}; "
            "write it again with this version"
        )
    return {key: item for key, item in data.items() if key not in ("format", "type", "version")}


def tuples(value: Any) -> Any:
    """JSON lists back to tuples, so that values compare equal after a round trip."""
    return tuple(tuples(item) for item in value) if isinstance(value, list) else value


def load_all(cls: type[V], items: Sequence[Mapping[str, Any]]) -> tuple[V, ...]:
    return tuple(cls.from_dict(item) for item in items)
