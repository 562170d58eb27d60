"""Plan: what becomes of each storage, and what that promises. A value: printed, saved, edited, compared, applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

from torch import nn

from slimgrad.codecs import Codec, Keep, Lossless, Recompute
from slimgrad.errors import RuleError, SpecError
from slimgrad.report import plans
from slimgrad.rules import At, Recipe, Rule, Rules, path_matches
from slimgrad.rules.wording import clauses
from slimgrad.spec import OUTSIDE, Value

KEEP = "keep"
AGAIN, FUSING = "recompute", "fused"
"""What is said of a storage inside a module that runs again, or that a fused op computes."""

Key = tuple[str, int, int]


@dataclass(frozen=True, kw_only=True, repr=False)
class Action(Value):
    """What becomes of one storage, or of copies of one tensor that are decided together."""

    site: str
    """The saver that asks for most."""
    path: str
    module: str
    need: str
    keys: tuple[Key, ...]
    """All savers, by Site.key."""
    what: str
    """"keep", "recompute", "fused", or codecs as text, of which every saver takes the first that serves it."""
    before: int
    after: int
    seconds: float = 0.0
    error: float = 0.0
    """What it adds to the squared relative error of the gradient."""

    def __post_init__(self) -> None:
        codecs_of(self.what)  # a text that cannot be read is refused here

    @property
    def codecs(self) -> tuple[Codec, ...]:
        return codecs_of(self.what)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Recipe):
    """What `apply` does with a model to meet a budget."""

    model: str
    device: str
    budget: str
    """As it was asked for."""
    actions: tuple[Action, ...]
    recompute: tuple[str, ...] = ()
    """Modules that run again in backward."""
    fused: tuple[tuple[str, str], ...] = ()
    """(module that a fused op computes, the codec that says how)."""
    boundaries: tuple[tuple[str, str], ...] = ()
    """(module that runs again, what becomes of its inputs)."""
    kept_before: int
    kept_bytes: int
    """Bytes at the end of forward."""
    peak_before: int | None = None
    peak_bytes: int | None = None
    """The most bytes in the step, with what is there before it; None without a timeline."""
    fixed_bytes: int = 0
    """What is there before the step: parameters, buffers, the batch, and what was reserved."""
    seconds: float = 0.0
    """What it adds to a step."""
    step_seconds: float = 0.0
    """An untouched step."""
    error: float = 0.0
    """The relative error of the gradient that is expected: 0 where everything is exact."""
    least: int = 0
    """Storages with fewer bytes are left alone."""

    def __post_init__(self) -> None:
        if self.least < 0:
            raise SpecError(f"Plan: least must be a number of bytes, 0 or more; found {self.least}")
        for _, what in (*self.fused, *self.boundaries):
            codecs_of(what)  # a text that cannot be read is refused here

    @property
    def slowdown(self) -> float:
        """The step's time beside the untouched one's."""
        return 1 + self.seconds / self.step_seconds if self.step_seconds else 1.0

    @property
    def min_bytes(self) -> int:
        return self.least

    @property
    def rules(self) -> Rules:
        """The plan as rules, which is all that `apply` needs. What it does not name is made no larger: `Lossless`."""
        by_what: dict[str, list[Key]] = {}
        for action in self.actions:
            if action.what not in (AGAIN, FUSING):
                by_what.setdefault(action.what, []).extend(action.keys)
        found = [Rule(path, Recompute()) for path in self.recompute]
        found += [Rule(path, codec) for path, what in self.fused for _, codec in clauses(what)]
        for path, what in self.boundaries:
            found += _rules(what, frozenset((path, 0, index) for index in range(MOST_INPUTS)))
        for what, keys in by_what.items():
            found += _rules(what, frozenset(keys))
        return (*found, Rule("*", Lossless()))

    def stages(self, model: nn.Module) -> Mapping[int, Rules]:
        self._check_made_for(model)
        return {0: self.rules}

    def _check_made_for(self, model: nn.Module) -> None:
        """Sites that are not there would be left alone without a word."""
        known = {OUTSIDE, *(path for path, _ in model.named_modules())}
        for path in self._paths():
            if path not in known and not any(path_matches(there, path) for there in known):
                raise RuleError(
                    f"this plan was made for {self.model}, and is not for this {type(model).__name__}, which has no "
                    f"module {path!r}; make one with sg.plan(sg.profile(model, batch), budget)"
                )

    def _paths(self) -> Iterator[str]:
        """Of the modules that it names, each once."""
        sites = (path for action in self.actions for path, _, _ in action.keys)
        around = (path for path, _ in (*self.fused, *self.boundaries))
        return iter(dict.fromkeys((*self.recompute, *around, *sites)))

    def explain(self, *, limit: int = 12) -> str:
        """Sentences on why each big site got its action."""
        return plans.explanation(self, limit=limit)

    def diff(self, other: Plan) -> str:
        """What differs in another plan for the same model, action by action."""
        if not isinstance(other, Plan):
            raise SpecError(f"diff: expected another plan, found {type(other).__name__}")
        return plans.difference(self, other)

    def table(self, *, limit: int | None = 20) -> str:
        return plans.plan_table(self, limit=limit)

    def __str__(self) -> str:
        return self.table()


def codecs_of(what: str) -> tuple[Codec, ...]:
    """The codecs of a text; none for what is kept, or is not there to be kept."""
    found = [] if what in (KEEP, AGAIN, FUSING) else clauses(what)
    if any(place != "*" for place, _ in found):
        raise SpecError(
            f"expected codecs alone, as 'quant(bits=4); lossless()', for the plan says where; found {what!r}"
        )
    return tuple(codec for _, codec in found)


MOST_INPUTS = 8
"""Tensors that a module is called with, at the most, of those that are packed where it runs again."""


def _rules(what: str, keys: frozenset[Key]) -> list[Rule]:
    codecs: tuple[Codec, ...] = (Keep(),) if what == KEEP else tuple(codec for _, codec in clauses(what))
    return [Rule(At(keys), codec) for codec in codecs]


def wording(codecs: tuple[Codec, ...]) -> str:
    """Codecs as one would type them: settings that are the default are left out, but for bits."""
    return "; ".join(map(_typed, codecs)) or KEEP


def _typed(codec: Codec) -> str:
    settings = [(f.name, getattr(codec, f.name), f.default) for f in fields(codec)]
    shown = ", ".join(f"{name}={value!r}" for name, value, default in settings if value != default or name == "bits")
    return f"{type(codec).__name__.lower()}({shown})"
