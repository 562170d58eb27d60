"""Frozen values with versioned JSON: what every codec, rule, profile and plan is."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from slimgrad.errors import RuleError, SpecError
from slimgrad.spec.reading import at, readers_of, said

FORMAT = "slimgrad"

V = TypeVar("V", bound="Value")


class Value:
    """Mixin for frozen dataclasses: versioned JSON, and a repr that is what one would type."""

    version: ClassVar[int] = 1
    may_be_nan: ClassVar[bool] = False
    """Whether its numbers were measured, and not all of them need be numbers."""

    def to_dict(self) -> dict[str, Any]:
        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        body = {f.name: encode(getattr(self, f.name)) for f in fields}
        return {"type": type(self).__name__, "version": self.version, **body}

    @classmethod
    def from_dict(cls: type[V], data: Mapping[str, Any]) -> V:
        fields = fields_of(cls, data)
        try:
            return cls(**fields)
        except RuleError as error:  # of codecs as text
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
    except (TypeError, ValueError) as error:
        raise SpecError(f"this is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(f"expected a JSON object, found {type(data).__name__}")
    return data


def checked_body(cls: type[Value], data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `cls` in `data`, after checking type, version, and that there are all of them and no others."""
    if not isinstance(data, Mapping):
        raise SpecError(f"expected a JSON object of type {cls.__name__!r}, found {said(data)}")
    found_type, found_version = data.get("type"), data.get("version")
    if found_type != cls.__name__:
        raise SpecError(f"expected JSON of type {cls.__name__!r}, found {found_type!r}")
    if found_version != cls.version:
        raise SpecError(
            f"{cls.__name__}: this slimgrad reads version {cls.version}, the text has {found_version!r}; "
            "write it again with this version"
        )
    body = {key: item for key, item in data.items() if key not in ("format", "type", "version")}
    _check_names(cls, body)
    return body


def _check_names(cls: type[Value], body: Mapping[str, Any]) -> None:
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    given = (dataclasses.MISSING, dataclasses.MISSING)
    missing = [f.name for f in fields if f.name not in body and (f.default, f.default_factory) == given]
    unknown = [str(name) for name in body if name not in {f.name for f in fields}]
    if missing:
        raise SpecError(f"{cls.__name__}: the JSON lacks {', '.join(missing)}")
    if unknown:
        known = ", ".join(f.name for f in fields)
        raise SpecError(f"{cls.__name__}: there is no field {', '.join(unknown)}; there are {known or 'none'}")


def fields_of(cls: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `cls` in `data`, each of the type that it is annotated with."""
    readers = readers_of(cls)
    return {name: at(f"{cls.__name__}.{name}", readers[name], item) for name, item in checked_body(cls, data).items()}
