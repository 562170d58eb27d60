"""What the meter says about patterns of allocation that can be counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slimgrad.profiler.meter import Measured, measured_step

ROW = 512
"""Float64s in one 4 KiB row: a multiple of what any allocator rounds to."""


def rows(count: int, device: torch.device) -> Tensor:
    return torch.empty(count, ROW, dtype=torch.float64, device=device)


def test_the_peak_is_what_is_held_together_not_what_was_taken_in_all(device: torch.device) -> None:
    def step() -> None:
        first, second = rows(3, device), rows(5, device)
        del first
        third = rows(2, device)
        del second, third
        rows(6, device)

    assert measured_step(step, device) == Measured(peak=8 * 4096, kept=0)


def test_what_outlives_the_step_is_kept(device: torch.device) -> None:
    held: list[Tensor] = []

    def step() -> None:
        held.append(rows(2, device))
        rows(7, device)

    assert measured_step(step, device) == Measured(peak=9 * 4096, kept=2 * 4096)


def test_what_a_step_returns_is_let_go_of(device: torch.device) -> None:
    assert measured_step(lambda: rows(4, device), device) == Measured(peak=4 * 4096, kept=0)


def test_views_take_nothing_and_a_step_may_do_nothing(device: torch.device) -> None:
    before = rows(4, device)
    assert measured_step(lambda: before[1:].t().unsqueeze(0), device) == Measured(peak=0, kept=0)
    assert measured_step(lambda: None, device) == Measured(peak=0, kept=0)


def test_backward_is_counted_with_the_gradients_it_leaves(device: torch.device) -> None:
    weight = rows(4, device).fill_(1.0).requires_grad_()

    def step() -> None:
        weight.exp().sum().backward()

    step()
    weight.grad = None
    # exp() is kept and becomes the gradient times one: both are there, and two numbers, the loss and its gradient.
    found = measured_step(step, device)
    assert found.kept == 4 * 4096
    assert 2 * 4 * 4096 <= found.peak <= 2 * 4 * 4096 + 2 * 512


@pytest.mark.parametrize("size", [1, 3, 77, 1000])
def test_on_a_cpu_every_byte_counts(size: int) -> None:
    step = lambda: torch.empty(size, dtype=torch.uint8)  # noqa: E731
    assert measured_step(step, "cpu").peak == size
