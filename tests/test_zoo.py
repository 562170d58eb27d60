"""The zoo itself: without these, a bit-for-bit comparison of gradients over it would prove nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor

from tests.zoo import ZOO, Entry, assert_same_gradients, call, deterministic, fresh, gradients

every_entry = pytest.mark.parametrize("entry", ZOO, ids=str)


@every_entry
def test_two_identical_runs_give_the_same_bits(entry: Entry, device: torch.device) -> None:
    model = fresh(entry, device)
    twin = copy.deepcopy(model)
    assert_same_gradients(gradients(entry, model, device), gradients(entry, twin, device))


@pytest.mark.parametrize("entry", [entry for entry in ZOO if entry.autocast], ids=str)
def test_two_identical_runs_under_bf16_autocast_give_the_same_bits(entry: Entry, device: torch.device) -> None:
    model = fresh(entry, device)
    twin = copy.deepcopy(model)
    low = gradients(entry, model, device, autocast=torch.bfloat16)
    assert_same_gradients(low, gradients(entry, twin, device, autocast=torch.bfloat16))
    with pytest.raises(AssertionError, match="gradients differ"):  # autocast does something
        assert_same_gradients(low, gradients(entry, model, device))


@every_entry
def test_every_trainable_parameter_and_float_input_gets_a_finite_gradient(entry: Entry) -> None:
    model = fresh(entry)
    assert model.training
    grads = gradients(entry, model, "cpu")
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in grads if not name.startswith("input:")} == trainable
    assert all(g.isfinite().all() for g in grads.values())
    assert sum(bool(g.any()) for g in grads.values()) > 0.8 * len(grads)


@every_entry
def test_gradients_depend_on_what_is_saved(entry: Entry) -> None:
    """Rounding what autograd keeps must show, or the comparison could not catch a codec that loses bits."""

    def rounded(t: Tensor) -> Tensor:
        return t.bfloat16().float() if t.dtype == torch.float32 and not isinstance(t, torch.nn.Parameter) else t

    model = fresh(entry)
    exact = gradients(entry, model, "cpu")
    with torch.autograd.graph.saved_tensors_hooks(rounded, lambda t: t):
        lossy = gradients(entry, model, "cpu")
    with pytest.raises(AssertionError, match="gradients differ"):
        assert_same_gradients(exact, lossy)


@every_entry
def test_several_saved_storages_are_larger_than_four_kibibytes(entry: Entry) -> None:
    model = fresh(entry)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, Tensor] = {}  # holding the tensors keeps their addresses distinct

    def watch(t: Tensor) -> Tensor:
        kept.setdefault(t.untyped_storage().data_ptr(), t.detach())
        return t

    with torch.autograd.graph.saved_tensors_hooks(watch, lambda t: t):
        call(model, entry.batch("cpu"))
    large = [t for key, t in kept.items() if key not in parameters and t.untyped_storage().nbytes() > 4096]
    assert len(large) >= 5


@every_entry
def test_batches_and_weights_are_deterministic(entry: Entry) -> None:
    first, second = fresh(entry).state_dict(), fresh(entry).state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    entry.batch("cpu")
    assert torch.equal(before, torch.get_rng_state())


def test_names_are_unique() -> None:
    assert len({entry.name for entry in ZOO}) == len(ZOO)


def test_a_run_leaves_no_gradients_and_the_settings_of_torch_as_they_were() -> None:
    model = fresh(ZOO[0])
    gradients(ZOO[0], model, "cpu")
    assert all(p.grad is None for p in model.parameters())
    assert not torch.are_deterministic_algorithms_enabled()
    with deterministic():
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()


def test_comparison_accepts_equal_gradients_with_nans() -> None:
    x = torch.tensor([1.0, math.nan, -math.inf, -0.0])
    assert_same_gradients({"w": x, "b": torch.empty(0)}, {"w": x.clone(), "b": torch.empty(0)})
    assert_same_gradients({"w": x}, {"w": torch.where(x.isnan(), -x, x)})  # another NaN


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            torch.tensor([1.0, 2.0, 0.0]).nextafter(torch.tensor(9.0)),
            r"w: 3 of 3 elements differ, by 2.38e-07 at most; ",
        ),
        (torch.tensor([1.0, 2.0, -0.0]), r"w: 1 of 3 elements differ, by 0 at most \(signs of zeros\)"),
        (torch.tensor([1.0, math.nan, 0.0]), r"w: 1 of 3 elements differ, by nan"),
        (torch.tensor([[1.0, 2.0, 0.0]]), r"w: shape"),
        (torch.tensor([1.0, 2.0, 0.0], dtype=torch.bfloat16), r"w: dtype torch.float32 != torch.bfloat16"),
    ],
)
def test_comparison_says_what_differs(other: Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        assert_same_gradients({"w": torch.tensor([1.0, 2.0, 0.0])}, {"w": other})


def test_comparison_names_missing_gradients_and_counts_the_rest() -> None:
    x, y = torch.zeros(2), torch.ones(2)
    with pytest.raises(AssertionError, match=r"2 of 2 gradients differ\n  a: only on the left\n  b: only on the right"):
        assert_same_gradients({"a": x}, {"b": x})
    with pytest.raises(AssertionError, match=r"7 of 8 gradients differ[\s\S]*\.\.\. and 2 more"):
        assert_same_gradients({str(i): x for i in range(8)}, {str(i): y if i else x for i in range(8)})
