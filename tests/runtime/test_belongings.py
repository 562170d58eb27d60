"""What models hold between forwards is theirs, and a forward on fake tensors leaves nothing in it."""

from __future__ import annotations

import functools
from collections import defaultdict, deque
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import slimgrad as sg


class Holding(nn.Module):
    """Makes a table when it is first needed, and remembers in all the ways there are."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mid, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.register_buffer("later", None)
        self.table: Tensor | None = None
        self.calls = 0
        self.seen: list[Tensor] = []
        self.nested = {"means": defaultdict(list)}
        self.last: deque[Tensor] = deque(maxlen=2)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, 16)
            self.later = torch.ones(16)
            self.register_buffer("late", torch.ones(16), persistent=False)
            self.scale = torch.full((), 0.5)
        self.calls += 1
        x = self.body(x) * self.later + self.table * self.late * self.scale
        self.seen.append(x.detach().mean())
        self.nested["means"]["x"].append(x.detach().mean())
        self.last.append(x.detach().mean())
        return self.head(self.mid(x))


def batch() -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


WAYS: dict[str, Callable[[nn.Module], object]] = {
    "trady": lambda model: sg.apply(model, sg.trady(1000)),
    "apply with a batch": lambda model: sg.apply(model, sg.Lossless(), batch=batch()),
    "profile": lambda model: sg.profile(model, batch(), fake=True),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_forward_on_fakes_leaves_nothing_in_modules(way: Callable[[nn.Module], object]) -> None:
    torch.manual_seed(0)
    model = Holding()
    before = (model.seen, model.nested["means"], model.last)
    way(model)
    loss = model(batch()).square().sum()
    loss.backward()
    assert type(loss) is Tensor and float(model.head.weight.grad.abs().sum()) > 0
    after = (model.seen, model.nested["means"], model.last)
    assert all(one is other for one, other in zip(before, after, strict=True))
    assert model.calls == len(model.seen) == len(model.nested["means"]["x"]) == len(model.last) == 1
    held = [model.table, model.later, model.late, model.scale, *model.seen, *model.nested["means"]["x"], *model.last]
    assert all(type(tensor) is Tensor for tensor in held)
    assert sorted(model.state_dict()) == sorted([*Holding().state_dict(), "later"])


def test_fakes_that_somebody_else_keeps_are_told_of_instead_of_training_with_them() -> None:
    @functools.lru_cache
    def table() -> Tensor:
        return torch.linspace(0, 1, 16)

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x) + table())

    model = Cached()
    run = sg.apply(model, sg.trady(1000))
    with pytest.raises(sg.UnsupportedModelError, match=r"Cached returned a fake tensor: .*a function with a cache"):
        model(batch())
    assert not run.active and all(parameter.requires_grad for parameter in model.parameters())
    table.cache_clear()
    with torch.no_grad():
        model(batch())
    sg.apply(model, sg.trady(1000))
    assert type(model(batch())) is Tensor
