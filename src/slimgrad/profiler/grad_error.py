"""grad_error: what a codec or recipe does to the gradients of one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from slimgrad.errors import BatchError, UnsupportedModelError
from slimgrad.profiler.profile import undisturbed
from slimgrad.runtime.batches import Arguments, call, split
from slimgrad.runtime.run import apply, check_model
from slimgrad.spec import GradError, ParameterError

Gradients = dict[str, Tensor | None]


def grad_error(
    model: nn.Module,
    batch: Any,
    what: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    min_bytes: int | None = None,
) -> GradError:
    """How far the gradients of one batch are from the exact ones, if `what` is applied: per parameter, by the norm of
    the difference and by the angle between the two.

    `batch` and `loss_fn` are those of `profile`; `what` and `min_bytes` are those of `apply`. Call it under the same
    autocast as training, with the model in the mode it will train in. Dropout draws the same in all passes. Buffers,
    gradients and random state are left as they were, and nothing stays applied. Recipes that change while a model is
    trained are looked at as they begin; the `rules` of a run are as they are by then.
    """
    check_model(model)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise UnsupportedModelError("no parameter of the model requires a gradient, so there is none to compare")
    arguments, to_loss = split(batch, loss_fn)
    exact = _gradients(model, parameters, arguments, to_loss)
    run = apply(model, what, min_bytes=min_bytes)
    try:
        _gradients(model, parameters, arguments, to_loss)  # the first forward is watched
        found = _gradients(model, parameters, arguments, to_loss)
    finally:
        run.remove()
    rows = (_compared(name, exact[name], found[name]) for name in parameters)
    return GradError(what=what if isinstance(what, str) else repr(what), parameters=tuple(rows))


def _gradients(
    model: nn.Module, parameters: dict[str, nn.Parameter], arguments: Arguments, to_loss: Callable[[Any], Any]
) -> Gradients:
    with undisturbed(model), torch.enable_grad():
        loss = to_loss(call(model, arguments))
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise BatchError(f"expected a loss of one number to take gradients of, found {found}; give a loss_fn")
        trained = {name: p for name, p in parameters.items() if p.requires_grad}  # what is applied may freeze some
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return dict.fromkeys(parameters) | dict(zip(trained, gradients, strict=True))


def _compared(name: str, exact: Tensor | None, found: Tensor | None) -> ParameterError:
    a = torch.zeros(1, dtype=torch.float64) if exact is None else exact.double().flatten()
    b = torch.zeros_like(a) if found is None else found.double().flatten()
    size, error = float(a.norm()), float((a - b).norm())
    cosine = float(cosine_similarity(a, b, dim=0)) if error else 1.0
    return ParameterError(name=name, exact=size, error=error, cosine=cosine)
