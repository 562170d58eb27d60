"""Rules as text, for command lines and configuration files: "quant(bits=4)", "head.*: keep(); quant(bits=4)".

Clauses are separated by semicolons, the first that fits a site wins. A clause is a codec, as one would type it but in
small letters if one likes, after a path glob or the name of a Need and a colon if it is not for every site.
"""

from __future__ import annotations

import ast
from typing import Any

from slimgrad.codecs import CODECS, Codec
from slimgrad.errors import RuleError
from slimgrad.spec import Need

Clause = tuple[str | Need, Codec]


def clauses(text: str) -> list[Clause]:
    """The clauses of a text, or an error that quotes the one that cannot be read."""
    found = [_clause(part.strip()) for part in text.split(";") if part.strip()]
    if not found:
        raise RuleError(f"cannot read {text!r}: expected a codec such as 'quant(bits=4)'")
    return found


def _clause(text: str) -> Clause:
    where, colon, codec = text.rpartition(":")
    place = where.strip() if colon else "*"
    needs = {need.name: need for need in Need}
    return needs.get(place, place), _codec(codec.strip())


def _codec(text: str) -> Codec:
    known = {name.lower(): kind for name, kind in CODECS.items()}
    name, settings = called(text)
    if name.lower() not in known:
        raise RuleError(f"cannot read {text!r}: unknown codec {name!r}; known are {', '.join(known)}")
    try:
        return known[name.lower()](**settings)
    except TypeError as error:
        raise RuleError(f"cannot read {text!r}: {error}") from error


def called(text: str) -> tuple[str, dict[str, Any]]:
    """The name and the keyword arguments of a call, whose values may be codecs too; nothing is executed."""
    try:
        call = ast.parse(text.strip(), mode="eval").body
        if isinstance(call, ast.Name):
            return call.id, {}
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and not call.args:
            return call.func.id, {str(word.arg): _value(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise RuleError(f"cannot read {text!r} as a codec such as 'quant(bits=4)': {error}") from error
    raise RuleError(f"cannot read {text!r} as a codec: expected a name and keyword arguments, as in 'quant(bits=4)'")


def _value(node: ast.expr) -> Any:
    return _codec(ast.unparse(node)) if isinstance(node, ast.Call) else ast.literal_eval(node)
