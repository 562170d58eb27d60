"""trady_rank: which layers and channels have most to learn for what they cost."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimgrad.codecs import Lossless
from slimgrad.errors import BatchError, SpecError, UnsupportedModelError
from slimgrad.kernels.channels import norms
from slimgrad.profiler.profile import undisturbed
from slimgrad.recipes.trady import LayerRank, Ranking
from slimgrad.recipes.trady.costs import Costs, Layer, batch_of, layers_of
from slimgrad.recipes.trady.frozen import Frozen, trained_whole
from slimgrad.recipes.trady.sizes import Look, Size
from slimgrad.runtime.batches import Arguments, call, shapes_of, split
from slimgrad.runtime.graph import tensors_in
from slimgrad.runtime.run import apply, check_model

DIGITS = 4


def trady_rank(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: Callable[..., Any] | None = None,
    steps: int = 100,
    *,
    optimizer: Optimizer | None = None,
    layers_at_once: int | None = None,
    train: Iterable[str] = ("head",),
    each_step: Callable[[int], object] | None = None,
) -> Ranking:
    """The RGN of every linear layer and convolution, over `steps` batches of any related task.

    Batches and `loss_fn` are those of `profile`; a loader that ends begins again. With an `optimizer` what `train`
    names whole (the head) learns the task meanwhile; nothing else changes. BatchNorms use their running statistics.
    Gradients go as soon as they are measured; with `layers_at_once` inputs are kept for that many layers at a time, and
    each batch is gone through as often as it takes. `each_step` is given the number of every step done, for a progress
    bar.
    """
    check_model(model)
    _check(steps, layers_at_once)
    whole = trained_whole(train, model)
    layers = [layer for path, layer in layers_of(model).items() if path not in whole]
    if not layers:
        raise UnsupportedModelError(
            "trady_rank: no linear layer or convolution is left to rank: none but those in train= has a weight of its "
            "own"
        )
    size = layers_at_once or len(layers)
    groups = [layers[first : first + size] for first in range(0, len(layers), size)]
    found = _Found(layers)
    with _still(model, whole):
        for number, batch in enumerate(itertools.islice(_again(loader), steps)):
            for group in groups:
                if optimizer is not None:
                    optimizer.zero_grad()  # the head learns from the last pass alone
                with found.listening(group), undisturbed(model):
                    _backward(model, batch, loss_fn, found, in_parts=len(groups) > 1)
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            if each_step is not None:
                each_step(number + 1)
    return Ranking(model=type(model).__name__, steps=steps, layers=tuple(found.ranks()))


class _Found:
    """Sums of the norms of gradients, channel by channel."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.layers = layers
        self.norms: dict[str, Tensor] = {}
        self.sizes: dict[str, Size] = {}
        self.look = Look(1)
        """What layers are given in the forward that runs."""

    @contextmanager
    def listening(self, group: Sequence[Layer]) -> Iterator[None]:
        """While the weights of these layers have gradients."""
        with ExitStack() as handles:
            for layer in group:
                layer.weight.requires_grad_(True)
                handles.callback(layer.weight.requires_grad_, False)
                handles.callback(layer.weight.register_post_accumulate_grad_hook(self._gradient(layer)).remove)
                handles.callback(
                    layer.module.register_forward_pre_hook(self._input(layer.path), with_kwargs=True).remove
                )
            yield
            self.sizes |= self.look.sizes

    def _gradient(self, layer: Layer) -> Callable[[Tensor], None]:
        def look(weight: Tensor) -> None:
            assert weight.grad is not None
            parts = layer.kernels.parts(torch.arange(layer.kernels.channels, device=weight.device))
            self.norms[layer.path] = self.norms.get(layer.path, 0) + norms(parts, parts.take(weight.grad))
            weight.grad = None

        return look

    def _input(self, path: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, args, kwargs: self.look.add(path, module, args, kwargs)

    def ranks(self) -> Iterator[LayerRank]:
        """Layers that no gradient came to have nothing to learn."""
        costs = Costs(self.sizes)
        for layer in self.layers:
            channels = layer.kernels.channels
            rgn = self.norms.get(layer.path, torch.zeros(channels)).double()
            if layer.path in self.sizes:
                rgn /= costs.elements(layer)
            each = tuple(_short(value) for value in rgn.tolist())
            yield LayerRank(path=layer.path, channels=channels, rgn=_short(float(rgn.sum())), by_channel=each)


def _short(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def _backward(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None, found: _Found, *, in_parts: bool
) -> None:
    """One forward and backward. Where only some layers have gradients, the others keep nothing."""
    arguments, to_loss = split(batch, loss_fn)
    run = apply(model, Lossless(), batch=_as_batch(arguments), min_bytes=0) if in_parts else None
    found.look = Look(batch_of(shapes_of(tuple(tensors_in(arguments, depth=3)))))
    try:
        with torch.enable_grad():
            loss = to_loss(call(model, arguments))
            if not isinstance(loss, Tensor) or loss.numel() != 1:
                raise BatchError("trady_rank: expected a loss of one number to take gradients of; give a loss_fn")
            loss.backward()
    finally:
        if run is not None:
            run.remove()


def _as_batch(arguments: Arguments) -> Any:
    positions, keywords = arguments
    return keywords or positions


@contextmanager
def _still(model: nn.Module, whole: dict[str, nn.Module]) -> Iterator[None]:
    """Everything frozen but those modules; gradients that were there are laid aside, and put back."""
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.grad = None
    frozen = Frozen(model, whole)
    frozen.freeze()
    try:
        yield
    finally:
        frozen.thaw()
        for parameter, gradient in before:
            parameter.grad = gradient


def _again(loader: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise BatchError("trady_rank: the loader has no batches, or none any more; give one that can begin again")


def _check(steps: object, layers_at_once: object) -> None:
    for name, value in (("steps", steps), ("layers_at_once", layers_at_once)):
        if (type(value) is not int or value < 1) and (name, value) != ("layers_at_once", None):
            raise SpecError(f"trady_rank: {name} must be a number from 1 on, found {value!r}")
