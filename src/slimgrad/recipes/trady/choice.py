"""ChannelChoice: the channels that are trained in one epoch, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from slimgrad.report.human import human_bytes, plural
from slimgrad.spec import Value


@dataclass(frozen=True, kw_only=True, repr=False)
class ChannelChoice(Value):
    """What one draw chose."""

    epoch: int
    channels: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Path of a layer -> its channels."""
    elements: int = 0
    """C^W + C^A of all of them, of one sample, as the paper counts."""
    bytes: int = 0
    """What they take for the whole batch: inputs, their part of weights, gradients, the optimizer's states; and what is
    trained whole."""

    @property
    def count(self) -> int:
        return sum(map(len, self.channels.values()))

    def __str__(self) -> str:
        where = f"{plural(self.count, 'channel')} in {plural(len(self.channels), 'layer')}"
        return f"epoch {self.epoch}: {where}, {self.elements:,} elements per sample, {human_bytes(self.bytes)}"
