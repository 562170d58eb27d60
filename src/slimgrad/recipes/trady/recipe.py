"""TraDy (Quelennec et al., ICLR 2026): each epoch trains other channels, drawn until a strict budget is met."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer

from slimgrad.codecs import Channels, Codec, codec_from_dict
from slimgrad.codecs.selection import check_choice
from slimgrad.errors import SpecError
from slimgrad.recipes.pruning import check_shared, skip_names, with_rest
from slimgrad.recipes.trady.controller import TradyController
from slimgrad.recipes.trady.costs import Chosen, Layer, limit
from slimgrad.recipes.trady.ranking import Ranking
from slimgrad.rules import ChannelsOf, Recipe, Rule, Rules
from slimgrad.spec.reading import tuples
from slimgrad.spec.values import checked_body

Mode = Literal["uniform", "weighted", "static", "full_random", "deterministic"]
MODES = ("uniform", "weighted", "static", "full_random", "deterministic")


@dataclass(frozen=True, kw_only=True, repr=False)
class Trady(Recipe):
    """The recipe that `trady` makes."""

    budget: int | str
    ranking: Ranking | str | None = None
    coverage: float = 0.97
    seed: int = 0
    mode: Mode = "uniform"
    train: tuple[str, ...] = ("head",)
    rest: Codec | None = None

    def __post_init__(self) -> None:
        if isinstance(self.budget, bool) or not isinstance(self.budget, (int, str)) or limit(self.budget) < 0:
            raise SpecError(
                f"trady: budget must be elements per sample, as 27946, or bytes, as '2MiB'; found {self.budget!r}"
            )
        if not isinstance(self.ranking, (Ranking, str, type(None))):
            raise SpecError(
                "trady: ranking must be a Ranking, the name of one that ships or the path of its JSON file; "
                f"found {self.ranking!r}"
            )
        if isinstance(self.ranking, str):
            Ranking.load(self.ranking)
        if isinstance(self.coverage, bool) or not isinstance(self.coverage, (int, float)) or not 0 < self.coverage <= 1:
            raise SpecError(f"trady: coverage must be a number above 0 and at most 1, found {self.coverage!r}")
        if type(self.seed) is not int or self.seed < 0:
            raise SpecError(f"trady: seed must be a number from 0 on, found {self.seed!r}")
        check_choice("trady", "mode", self.mode, MODES)
        check_shared("trady", self.train, self.rest, setting="train")

    @property
    def min_bytes(self) -> int:
        """All inputs are packed, however small: what is not would be kept whole, over the budget."""
        return 0

    def measured(self) -> Ranking | None:
        return Ranking.load(self.ranking) if isinstance(self.ranking, str) else self.ranking

    def stages(self, model: nn.Module) -> Mapping[int, Rules]:
        return {0: self.rules({}, {})}

    def controller(self, model: nn.Module, optimizer: Optimizer | None) -> TradyController:
        return TradyController(self, model, optimizer)

    def rules(self, layers: Mapping[str, Layer], chosen: Chosen) -> Rules:
        found = []
        for path, mine in chosen.items():
            layer = layers[path]
            where = ChannelsOf(path, layer.kernels.channels, layer.dim)
            found.append(Rule(where, Channels(indices=mine, dim=layer.dim)))
        return with_rest(found, self.rest)

    def __repr__(self) -> str:
        return super().__repr__().replace("Trady(", "trady(", 1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trady:
        body = {name: tuples(value) for name, value in checked_body(cls, data).items()}
        if isinstance(body["ranking"], Mapping):
            body["ranking"] = Ranking.from_dict(body["ranking"])
        return cls(**{**body, "rest": None if body["rest"] is None else codec_from_dict(body["rest"])})


def trady(
    budget: int | str,
    ranking: Ranking | str | Path | None = None,
    coverage: float = 0.97,
    seed: int = 0,
    mode: Mode = "uniform",
    *,
    train: Iterable[str] = ("head",),
    rest: Codec | None = None,
) -> Trady:
    """Fine-tuning in which each epoch trains other channels of linear layers and convolutions, within a budget.

    A channel that is not chosen keeps no input, gets no gradient and does not change; everything else is frozen, but
    for the layers that `train` names whole ("head" is the last one). The gradient that flows on is exact, and ends
    below the first layer that is trained. BatchNorms use their running statistics. Call `run.epoch()` when an epoch
    begins, and give `apply` the optimizer: the channels take the place of their weights in it, so that momentum, weight
    decay and Adam cannot move anything else.

    `budget` is elements of inputs and weights for one sample, as the paper counts, or bytes as "2MiB": inputs for the
    whole batch, gradients, the optimizer's states. It is never exceeded. `ranking`, by `trady_rank`, says which layers
    have most to learn for what they cost: those that have `coverage` of it are drawn from. Without one it is guessed
    from sizes.

    Modes: "uniform" draws anew in each epoch; "weighted" by the norm of the gradient as it was seen last; for
    comparison, "static" draws once, "full_random" draws from all layers, "deterministic" takes the channels with the
    largest RGN.
    """
    return Trady(
        budget=budget,
        ranking=str(ranking) if isinstance(ranking, Path) else ranking,
        coverage=coverage,
        seed=seed,
        mode=mode,
        train=skip_names(train),
        rest=rest,
    )
