"""How a batch is given to a model, and how a loss comes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimgrad.errors import BatchError
from slimgrad.rules import Shapes

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def call_arguments(batch: Any) -> Arguments:
    """A mapping is given as keywords, a tuple or list as positions, anything else as the one argument."""
    if isinstance(batch, Mapping):
        return (), {str(key): value for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(batch), {}
    return (batch,), {}


def shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    """Of what a model is called with."""
    return tuple(["nested" if tensor.is_nested else tensor.shape for tensor in tensors])


def split(batch: Any, loss_fn: Callable[..., Any] | None) -> tuple[Arguments, Callable[[Any], Any]]:
    """The arguments of the model, and a function from its output to the loss.

    With a `loss_fn` of two arguments, a pair is `(inputs, target)`: `loss_fn(model(inputs), target)`; for any other
    batch it is called as `loss_fn(output, batch)`. With one argument it gets the output. Without `loss_fn` the output's
    own loss is taken, or else the output itself.
    """
    if loss_fn is None:
        return call_arguments(batch), own_loss
    if _positions(loss_fn) < 2:
        return call_arguments(batch), loss_fn
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, target = batch
        return call_arguments(inputs), lambda output: loss_fn(output, target)
    return call_arguments(batch), lambda output: loss_fn(output, batch)


def own_loss(output: Any) -> Any:
    """The loss that the output carries (Hugging Face style), or the output."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return output if loss is None else loss


def _positions(function: Callable[..., Any]) -> int:
    """How many positional arguments the function takes without defaults."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 1
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return 2  # such as nn.Module.__call__
    return sum(1 for p in parameters if p.kind in positional and p.default is inspect.Parameter.empty)


def call(model: Callable[..., Any], arguments: Arguments) -> Any:
    """Call the model, or say how the batch was given to it."""
    args, kwargs = arguments
    try:
        return model(*args, **kwargs)
    except TypeError as error:
        given = f"{len(args)} positional and the keywords {sorted(kwargs)}" if kwargs else f"{len(args)} positional"
        raise BatchError(
            f"the model does not take this batch ({given}): {error}. A dict is given as keywords, a tuple as "
            "positions; with a loss_fn of two arguments a pair is (inputs, target)."
        ) from error


def signature_of(modules: Mapping[str, nn.Module], parameters: Sequence[Tensor], tensors: tuple[Tensor, ...]) -> Any:
    """What roles depend on: modes, frozen parameters, autocast, and what the model is given but for shapes."""
    kinds = {tensor.device.type for tensor in (*tensors, *parameters[:1])}
    return (
        tuple([module.training for module in modules.values()]),
        tuple([parameter.requires_grad for parameter in parameters]),
        tuple([(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in sorted(kinds)]),
        tuple([(tensor.dtype, tensor.requires_grad, tensor.dim()) for tensor in tensors]),
    )
