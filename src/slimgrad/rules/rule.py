"""Rules: which codec goes where. The first rule that selects a site with a codec that can serve it wins."""

from __future__ import annotations

import difflib
import fnmatch
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from slimgrad.codecs import CODECS, Codec, Derive, Lossless, Offload, codec_from_dict
from slimgrad.errors import RuleError, SpecError
from slimgrad.kernels.blocks import extent
from slimgrad.rules.wording import clauses
from slimgrad.spec import OUTSIDE, Need, Site, Value
from slimgrad.spec.values import checked_body


@dataclass(frozen=True, repr=False)
class Operands(Value):
    """Selects what serves the gradients of weights alone, but not in modules at these paths, and not what has fewer
    rows than that, as the matrix that a product reads.
    """

    but: tuple[str, ...] = ()
    least_rows: int = 0

    def __call__(self, site: Site) -> bool:
        if site.need is not Need.OPERAND or any(path_matches(site.path, path) for path in self.but):
            return False
        return not self.least_rows or extent(site.shape)[0] >= self.least_rows

    @property
    def optional(self) -> bool:
        """Whether it is no mistake if nothing is selected."""
        return self.least_rows > 0


@dataclass(frozen=True, repr=False)
class AnyOf(Value):
    """Selects what has one of these needs."""

    needs: tuple[Need, ...]
    optional: ClassVar[bool] = True

    def __call__(self, site: Site) -> bool:
        return site.need in self.needs


@dataclass(frozen=True)
class InputOf(Value):
    """What the product of one module reads. Where that is kept by somebody else anyway, there is nothing to select."""

    optional: ClassVar[bool] = True

    path: str

    def __call__(self, site: Site) -> bool:
        return site.need is Need.OPERAND and site.path == self.path


MULTIPLIED = frozenset(
    (
        "AddmmBackward0.mat1",
        "MmBackward0.self",
        "LinearBackward0.input",
        "BmmBackward0.self",
        "BaddbmmBackward0.batch1",
        "AddbmmBackward0.batch1",
    )
)
CONVOLVED = frozenset(
    (
        "ConvolutionBackward0.input",
        "ConvolutionBackward1.input",
        "MkldnnConvolutionBackward0.self",
        "CudnnConvolutionBackward0.self",
    )
)


@dataclass(frozen=True)
class ChannelsOf(Value):
    """What the product of one module reads with its channels in dimension `dim`, 1 of a convolution and -1 of others. A
    forward of somebody's own may multiply from the other side, or lay windows beside each other first: which channel is
    which is not known there.
    """

    optional: ClassVar[bool] = True

    path: str
    channels: int
    dim: int

    def __call__(self, site: Site) -> bool:
        if site.need is not Need.OPERAND or site.path != self.path:
            return False
        places = CONVOLVED if self.dim == 1 else MULTIPLIED
        return f"{site.node}.{site.slot}" in places and site.shape[self.dim] == self.channels


@dataclass(frozen=True, repr=False)
class At(Value):
    """Selects sites one by one: by path, number of the call, and number of the tensor that the call saves."""

    optional: ClassVar[bool] = True

    keys: frozenset[tuple[str, int, int]]

    def __call__(self, site: Site) -> bool:
        return site.key in self.keys

    def __repr__(self) -> str:
        return f"At({len(self.keys)} sites)"

    def to_dict(self) -> dict[str, Any]:
        return {"type": "At", "version": self.version, "keys": [list(key) for key in sorted(self.keys)]}


SELECTORS: dict[str, type[Operands | AnyOf | InputOf | ChannelsOf | At]] = {
    "operands": Operands,
    "any_of": AnyOf,
    "input_of": InputOf,
    "channels_of": ChannelsOf,
    "at": At,
}
"""Functions of a site that can be written to JSON, by the key they are written under."""

Where = str | type[nn.Module] | Need | Callable[[Site], bool]


@dataclass(frozen=True, repr=False)
class Rule(Value):
    """`Rule("encoder.*", codec)`, `Rule(nn.ReLU, codec)`, `Rule(Need.MASK, codec)`, `Rule(lambda site: ..., codec)`."""

    where: Where
    codec: Codec

    def __post_init__(self) -> None:
        if not isinstance(self.codec, Codec):
            raise RuleError(
                f"a rule's second part must be a codec such as {', '.join(f'{name}()' for name in CODECS)}; "
                f"found {self.codec!r}"
            )
        is_class = isinstance(self.where, type) and issubclass(self.where, nn.Module)
        if not (isinstance(self.where, (str, Need)) or is_class or _is_predicate(self.where)):
            raise RuleError(
                "a rule's first part must be a path glob, an nn.Module class, a Need or a function of a Site; "
                f"found {self.where!r}"
            )

    def selects(self, site: Site, module: nn.Module | None) -> bool:
        where = self.where
        if isinstance(where, Need):
            return site.need is where
        if isinstance(where, str):
            return path_matches(site.path, where)
        if isinstance(where, type):
            return isinstance(module, where)
        return bool(where(site))

    @property
    def is_optional(self) -> bool:
        """Whether it is no mistake if it selects nothing."""
        return bool(getattr(self.where, "optional", False))

    def __repr__(self) -> str:
        shown = self.where.__name__ if isinstance(self.where, type) else repr(self.where)
        return f"Rule({shown}, {self.codec!r})"

    def to_dict(self) -> dict[str, Any]:
        return {
            "type": "Rule",
            "version": self.version,
            "where": _where_to_dict(self.where),
            "codec": self.codec.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rule:
        body = checked_body(cls, data)
        return cls(_where_from_dict(body["where"]), codec_from_dict(body["codec"]))


Rules = tuple[Rule, ...]


def path_matches(path: str, pattern: str) -> bool:
    """Shell-style match; 'head.*' means the module head and everything below it."""
    return fnmatch.fnmatchcase(path, pattern) or (pattern.endswith(".*") and path == pattern[:-2])


def _is_predicate(where: Any) -> bool:
    return callable(where) and not isinstance(where, type)


def _where_to_dict(where: Where) -> dict[str, Any]:
    if isinstance(where, Need):
        return {"need": where.value}
    if isinstance(where, str):
        return {"path": where}
    if isinstance(where, type):
        return {"class": f"{where.__module__}:{where.__qualname__}"}
    for key, kind in SELECTORS.items():
        if isinstance(where, kind):
            return {key: where.to_dict()}
    raise SpecError(f"a rule with a function ({where!r}) cannot be written to JSON; use a path, a class or a Need")


def _where_from_dict(data: Mapping[str, Any]) -> Where:
    if "path" in data:
        return str(data["path"])
    if "need" in data:
        return Need(data["need"])
    for key, kind in SELECTORS.items():
        if key in data:
            return kind.from_dict(data[key])
    if "class" in data:
        module, _, name = data["class"].partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise SpecError(f"the rule's module class {data['class']!r} cannot be found: {error}") from error
        return found  # type: ignore[no-any-return]
    known = ", ".join(map(repr, ("path", "class", "need", *SELECTORS)))
    raise SpecError(f"a rule must say one of {known}; found {dict(data)!r}")


def as_rules(what: Any) -> Rules:
    """What `apply` was given, as rules.

    A bare codec is one rule for every site it can serve; what a lossy one leaves is kept by `Lossless` where that is
    less, because what is exact and smaller is never unwelcome, and a ReLU that holds on to what a Quant lets go of is.
    """
    if isinstance(what, str):
        rules = tuple(Rule(where, codec) for where, codec in clauses(what))
        what = rules[0].codec if len(rules) == 1 and rules[0].where == "*" else rules
    if isinstance(what, Codec):
        alone = not what.lossy and not isinstance(what, (Derive, Offload))
        return (Rule("*", what),) if alone else (Rule("*", what), Rule("*", Lossless()))
    if isinstance(what, Rule):
        return (what,)
    if isinstance(what, Sequence) and not isinstance(what, str) and what and all(isinstance(r, Rule) for r in what):
        return tuple(what)
    raise RuleError(
        f"cannot apply {what!r}: expected a codec ({', '.join(f'{name}()' for name in CODECS)}), a list of "
        "Rule(where, codec), or either as text, such as 'quant(bits=4)'; or a recipe such as slimgrad.dropit()"
    )


def check_against_model(rules: Sequence[Rule], modules: Mapping[str, nn.Module]) -> None:
    """Refuse rules by path or class that no module of the model can ever match."""
    for rule in rules:
        where = rule.where
        if isinstance(where, str) and not any(path_matches(path, where) for path in (*modules, OUTSIDE)):
            close = difflib.get_close_matches(where.rstrip(".*"), list(modules), n=3, cutoff=0.4)
            hint = f"close are {', '.join(map(repr, close))}" if close else f"there are {len(modules)} modules"
            raise RuleError(f"{rule!r} matches no module: no path is like {where!r}; {hint}")
        if isinstance(where, type) and not any(isinstance(module, where) for module in modules.values()):
            kinds = sorted({type(module).__name__ for module in modules.values()})
            raise RuleError(f"{rule!r} matches no module: the model has no {where.__name__}; it has {', '.join(kinds)}")
