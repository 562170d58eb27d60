"""TinyShakespeare, character by character."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from tasks.attention import character_gpt
from tasks.base import Batch, Places, Source

SHAKESPEARE_FILE = "text/tinyshakespeare.txt"
CONTEXT = 128
TRAINING_SHARE = 0.9


class Characters:
    """One long row of character numbers; the model sees windows of it and predicts the next character everywhere."""

    def __init__(self, ids: Tensor, device: torch.device) -> None:
        border = int(TRAINING_SHARE * len(ids))
        self.device = device
        self.train, self.test = ids[:border].to(device), ids[border:].to(device)
        self.window = torch.arange(CONTEXT + 1, device=device)

    @property
    def examples(self) -> int:
        return len(self.train) // CONTEXT

    def batches(self, seed: int, steps: int, size: int) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.train) - CONTEXT, (steps, size, 1), generator=generator).to(self.device)
        for step in range(steps):
            windows = self.train[starts[step] + self.window]
            yield (windows[:, :-1],), windows[:, 1:]

    def tests(self, size: int) -> Iterator[Batch]:
        length = (len(self.test) - 1) // CONTEXT * CONTEXT
        inputs, targets = (self.test[first : first + length].view(-1, CONTEXT) for first in (0, 1))
        for chunk, wanted in zip(inputs.split(size), targets.split(size), strict=True):
            yield (chunk,), wanted


@cache
def alphabet(path: Path) -> tuple[str, ...]:
    return tuple(sorted(set(path.read_text(encoding="utf-8"))))


def load_shakespeare(places: Places, device: torch.device) -> Characters:
    path = places.data / SHAKESPEARE_FILE
    numbers = {character: number for number, character in enumerate(alphabet(path))}
    return Characters(torch.tensor([numbers[character] for character in path.read_text(encoding="utf-8")]), device)


def gpt_for_shakespeare(places: Places) -> nn.Module:
    return character_gpt(len(alphabet(places.data / SHAKESPEARE_FILE)), CONTEXT)


SHAKESPEARE = Source("TinyShakespeare", (SHAKESPEARE_FILE,), load_shakespeare)
