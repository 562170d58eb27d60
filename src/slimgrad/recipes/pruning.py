"""What DropIT and block pruning share: which products they treat, how much of each they keep, and from when on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

from torch import nn

from slimgrad.codecs import Codec, Keep, Lossless, codec_from_dict
from slimgrad.errors import RuleError, SpecError
from slimgrad.rules import Operands, Recipe, Rule, Rules, path_matches
from slimgrad.spec.reading import tuples
from slimgrad.spec.values import checked_body

P = TypeVar("P", bound="Pruning")

PREDICTOR = "Predictor"
"""In the class name of torchvision's heads for boxes, classes and masks."""
PREDICTIONS = ("cls_logits", "bbox_pred", "cls_score", "mask_fcn_logits")
"""Names of the layers that predict, in detectors whose heads are built in other ways."""


def products(model: nn.Module) -> list[str]:
    """Paths of the modules with a weight that multiplies activations, in the order in which the model lists them."""
    return [path for path, module in model.named_modules() if _is_product(module)]


def _is_product(module: nn.Module) -> bool:
    """Linear, convolution, and the linear layer that transformers calls Conv1D."""
    return isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)) or type(module).__name__ == "Conv1D"


def _first(model: nn.Module) -> list[str]:
    """The first convolution or patch embedding; none where an embedding, which keeps nothing, comes before."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            return []
        if _is_product(module):
            return [path]
    return []


def _head(model: nn.Module) -> list[str]:
    """The last layer, and all that predict boxes, classes and masks."""
    found = products(model)
    predictors = [path for path, module in model.named_modules() if PREDICTOR in type(module).__name__]
    inside = [path for path in found if any(path_matches(path, f"{predictor}.*") for predictor in predictors)]
    named = [path for path in found if path.rpartition(".")[2] in PREDICTIONS]
    return [*found[-1:], *inside, *named]


SKIPPED: dict[str, Callable[[nn.Module], list[str]]] = {"first": _first, "head": _head}


EXACTLY = Rule("*", Lossless())
"""For what can be kept exactly in less."""


def with_rest(rules: Iterable[Rule], rest: Codec | None, exact: Rule = EXACTLY) -> Rules:
    """A recipe's own rules, then what treats the rest, then what is exact."""
    return (*rules, *([] if rest is None else [Rule("*", rest)]), exact)


def check_shared(recipe: str, names: tuple[str, ...], rest: Codec | None, setting: str = "skip") -> None:
    """What every recipe for products is told: some layers by name, and what treats the rest."""
    if rest is not None and not isinstance(rest, Codec):
        raise SpecError(f"{recipe}: rest must be a codec such as Quant(bits=4), found {rest!r}")
    if not all(isinstance(entry, str) for entry in names):
        words = " or ".join(map(repr, SKIPPED))
        raise SpecError(f"{recipe}: {setting} must name layers, or be {words}; found {names!r}")


def skip_names(skip: Iterable[str]) -> tuple[str, ...]:
    """A single name, and what is none and will be refused, is taken for a list of one."""
    return (skip,) if isinstance(skip, str) or not isinstance(skip, Iterable) else tuple(skip)


def skipped_paths(recipe: str, skip: Iterable[str], model: nn.Module) -> tuple[str, ...]:
    """The products that are left out by name, or by what they are."""
    return tuple(dict.fromkeys(path for entry in skip for path in _skipped(recipe, entry, model)))


def _skipped(recipe: str, entry: str, model: nn.Module) -> list[str]:
    if entry in SKIPPED:
        return SKIPPED[entry](model)
    found = [path for path in products(model) if path_matches(path, entry)]
    if not found:
        words = ", ".join(map(repr, SKIPPED))
        raise RuleError(f"{recipe}: skip={entry!r} is no linear layer or convolution of the model, and none of {words}")
    return found


@dataclass(frozen=True, kw_only=True, repr=False)
class Pruning(Recipe):
    """A part of what products read is kept; everything else is left to `rest`, and to what can be kept exactly in less.

    `keep` is that part, or a schedule {step: part}; `layers` gives some layers a part of their own; `skip` names what
    is left out.
    """

    called: ClassVar[str]
    """The function that makes the recipe, for messages."""

    keep: float | Mapping[int, float] = 0.1
    skip: tuple[str, ...] = ("first", "head")
    rest: Codec | None = None
    layers: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_shared(self.called, self.skip, self.rest)
        schedule = self._schedule()
        if not schedule or min(schedule) != 0 or any(type(step) is not int or step < 0 for step in schedule):
            raise SpecError(
                f"{self.called}: a schedule maps steps to parts, from step 0 on, as in {{0: 1.0, 500: 0.1}}; "
                f"found {self.keep!r}"
            )
        for part in (*schedule.values(), *self.layers.values()):
            self.codec(part)

    @abstractmethod
    def codec(self, part: float) -> Codec:
        """What keeps this part; refuses what no part can be."""

    def stages(self, model: nn.Module) -> Mapping[int, Rules]:
        skipped = skipped_paths(self.called, self.skip, model)
        return {step: self._rules(part, skipped, model) for step, part in self._schedule().items()}

    def _schedule(self) -> Mapping[int, float]:
        return self.keep if isinstance(self.keep, Mapping) else {0: self.keep}

    def _rules(self, part: float, skipped: tuple[str, ...], model: nn.Module) -> Rules:
        rules = [Rule(path, Keep() if some == 1 else self.codec(some)) for path, some in self.layers.items()]
        rules += self._operands(part, skipped, model)
        return with_rest(rules, self.rest, self._exact())

    def _exact(self) -> Rule:
        """For what can be kept exactly in less."""
        return EXACTLY

    def _operands(self, part: float, skipped: tuple[str, ...], model: nn.Module) -> list[Rule]:
        """The rules for all layers without a part of their own."""
        return [Rule(Operands(skipped), Keep() if part == 1 else self.codec(part))]

    def __repr__(self) -> str:
        return super().__repr__().replace(f"{type(self).__name__}(", f"{self.called}(", 1)

    @classmethod
    def from_dict(cls: type[P], data: Mapping[str, Any]) -> P:
        body = checked_body(cls, data)
        if isinstance(body["keep"], Mapping):
            body["keep"] = {int(step): part for step, part in body["keep"].items()}
        rest = None if body["rest"] is None else codec_from_dict(body["rest"])
        return cls(**{**{name: tuples(value) for name, value in body.items()}, "rest": rest})


def shared_settings(
    keep: float | Mapping[int, float], skip: Iterable[str], rest: Codec | None, layers: Mapping[str, float] | None
) -> dict[str, Any]:
    """As users write them, in the types that recipes have."""
    return {
        "keep": dict(keep) if isinstance(keep, Mapping) else keep,
        "skip": skip_names(skip),
        "rest": rest,
        "layers": dict(layers or {}),
    }
