"""Ranking: how much the weights of each layer, and of each channel, have to learn for what they cost.

A layer's importance is its RGN, the sum over channels of the norm of the gradient over C^W + C^A, accumulated over
steps of any related task: the order of layers is the architecture's, more than the task's (Spearman 0.8 and above).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from slimgrad.errors import SpecError
from slimgrad.spec import Value


@dataclass(frozen=True, kw_only=True, repr=False)
class LayerRank(Value):
    """One layer's part."""

    path: str
    channels: int
    rgn: float
    """Sum over channels and steps."""
    by_channel: tuple[float, ...] = ()
    """The same for each channel; empty where only layers were written down."""

    def __post_init__(self) -> None:
        if not all(0 <= value < math.inf for value in (self.rgn, *self.by_channel)):
            raise SpecError(
                f"LayerRank: {self.path!r} has an RGN that is no number from 0 on; were all gradients finite when it "
                "was measured?"
            )
        if len(self.by_channel) not in (0, self.channels):
            raise SpecError(
                f"LayerRank: {self.path!r} has {self.channels} channels, and the RGN of {len(self.by_channel)} of "
                "them; expected all or none"
            )


@dataclass(frozen=True, kw_only=True, repr=False)
class Ranking(Value):
    """What `trady_rank` measures. `to_json` and `from_json` carry it to another task, or `save` and `load`."""

    model: str
    steps: int
    layers: tuple[LayerRank, ...]
    """In the order of the model."""
    remark: str = ""

    def of(self, layers: Mapping[str, int]) -> dict[str, LayerRank]:
        """The ranks of a model with these layers (path -> channels), by name; or in order, where another library names
        the layers of the same architecture in other ways.
        """
        known = {rank.path: rank for rank in self.layers}
        if all(path in known and known[path].channels == channels for path, channels in layers.items()):
            return {path: known[path] for path in layers}
        if [rank.channels for rank in self.layers] == list(layers.values()):
            return dict(zip(layers, self.layers, strict=True))
        wrong = [path for path, channels in layers.items() if path not in known or known[path].channels != channels]
        raise SpecError(
            f"the ranking of {self.model} ({len(self.layers)} layers) is of another model: {wrong[0]!r} with "
            f"{layers[wrong[0]]} channels is not in it. Measure one for this model by sg.trady_rank(model, loader, ...)"
        )

    def without_channels(self) -> Ranking:
        """The layers alone, which is all that most modes look at."""
        bare = (LayerRank(path=rank.path, channels=rank.channels, rgn=rank.rgn) for rank in self.layers)
        return Ranking(model=self.model, steps=self.steps, layers=tuple(bare), remark=self.remark)

    def save(self, path: str | Path) -> Path:
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")
        return Path(path)

    @classmethod
    def load(cls, source: str | Path) -> Ranking:
        """From a JSON file, or by the name of one that ships: `Ranking.shipped()`."""
        named = resources.files(__package__).joinpath("rankings").joinpath(f"{source}.json")
        if named.is_file():
            return cls.from_json(named.read_text(encoding="utf-8"))
        try:
            return cls.from_json(Path(source).read_text(encoding="utf-8"))
        except OSError as error:
            names = ", ".join(map(repr, cls.shipped())) or "none"
            raise SpecError(
                f"no ranking {str(source)!r}: it is no file ({error}), and those that ship are {names}"
            ) from error

    @classmethod
    def shipped(cls) -> list[str]:
        """The names of the rankings that come with slimgrad."""
        found = resources.files(__package__).joinpath("rankings").iterdir()
        return sorted(entry.name.removesuffix(".json") for entry in found if entry.name.endswith(".json"))


def pool(rgn: Mapping[str, float], coverage: float) -> list[str]:
    """The layers that come first by RGN, until they have this part of all of it; in the order of `rgn`."""
    found: set[str] = set()
    goal, have = coverage * sum(rgn.values()), 0.0
    for path in sorted(rgn, key=lambda path: -rgn[path]):
        if have >= goal and found:
            break
        found.add(path)
        have += rgn[path]
    return [path for path in rgn if path in found]


def a_priori(layers: Mapping[str, tuple[int, int, int]]) -> dict[str, float]:
    """Without a measurement; path -> (channels, C^W, C^A).

    The gradient of a channel has C^W elements, each a sum over C^A positions: as if all terms were independent and
    alike, its norm is the square root of both. On the MobileNetV2 of TraDy's paper that ranks layers much as measured
    gradients do (Spearman 0.83), and 34 of 36 layers of the measured pool are in this one, which has 37. To take all
    gradients for equally large gives 0.78, and 23 of 36.
    """
    return {path: n * math.sqrt(weights * inputs) / (weights + inputs) for path, (n, weights, inputs) in layers.items()}


def by_channel(ranks: Mapping[str, LayerRank]) -> dict[str, Sequence[float]]:
    """RGN of every channel, or an error where they were not written down."""
    bare = [path for path, rank in ranks.items() if not rank.by_channel]
    if bare:
        raise SpecError(
            f"mode='deterministic' takes the channels with the largest RGN, and the ranking has none for {bare[0]!r}; "
            "measure one with channels by sg.trady_rank(model, loader, ...)"
        )
    return {path: rank.by_channel for path, rank in ranks.items()}
