"""What TraDy cannot train, said before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, SGD, Optimizer

from slimgrad.errors import SlimgradError, UnsupportedModelError
from slimgrad.recipes.trady.hooks import Measure


def check_model(model: nn.Module) -> None:
    _check_processes()
    _check_runs(model)
    for module in model.modules():
        if isinstance(module, (DataParallel, DistributedDataParallel)):
            raise UnsupportedModelError(
                f"trady trains a model by itself, in one process, and this one is wrapped in {type(module).__name__}: "
                "which parameters have gradients changes with every epoch, and data-parallel wrappers decide that "
                "once. Train what is inside the wrapper, without it"
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise UnsupportedModelError(
                f"trady: parameter {name!r} has no shape yet; run the model once, so that lazy modules know theirs"
            )


def _check_processes() -> None:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UnsupportedModelError(
            "trady trains in one process so far: which parameters have gradients changes with every epoch, and "
            "data-parallel wrappers decide that once"
        )


def _check_runs(model: nn.Module) -> None:
    hooks = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    if any(isinstance(hook, Measure) and hook.owner is not None for hook in hooks):
        raise SlimgradError(
            "trady: the model is still under a run that was left by `with run:` before the step that belongs to its "
            "last forward; call its remove() first"
        )


def check_optimizer(optimizer: Optimizer | None) -> None:
    """Parameters come and go with every epoch."""
    if isinstance(optimizer, LBFGS):
        raise UnsupportedModelError(
            "trady: LBFGS keeps vectors of all that it trains together, and how much that is changes with every epoch; "
            "take an optimizer with states for each parameter, such as SGD or AdamW"
        )
    if isinstance(optimizer, SGD) and any(group["fused"] and group["momentum"] for group in optimizer.param_groups):
        raise UnsupportedModelError(
            "trady: torch's fused SGD with momentum cannot take parameters that come later, as channels do in every "
            "epoch; make it with fused=False"
        )


def check_layers(layers: Mapping[str, Any], optimizer: Optimizer | None) -> None:
    if layers:
        return
    given = "" if optimizer is None else ", and of those that do, the optimizer has none"
    raise UnsupportedModelError(
        "trady: no linear layer or convolution is left to draw channels from: none but the layers in train= has a "
        f"weight of its own that requires a gradient{given}"
    )
