"""A forward on fake tensors: shapes, strides and dtypes flow, no memory is allocated and nothing is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

from slimgrad.errors import UnsupportedModelError
from slimgrad.runtime.batches import Arguments


@dataclass(frozen=True)
class Faked:
    """The model's call on fake parameters and a fake batch."""

    call: Callable[..., Any]
    arguments: Arguments
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    like: Callable[[Any], Any]
    """The same value with every tensor in it replaced by its fake."""


@contextmanager
def faked(model: nn.Module, arguments: Arguments, device: torch.device | str | None = None) -> Iterator[Faked]:
    """Fake parameters, buffers and arguments, on the devices they are on or all on `device`."""
    target = None if device is None else torch.device(device)
    _check_device(target)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            place = target or (torch.device("cpu") if tensor.is_meta else tensor.device)
            made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=place)
            fakes[id(tensor)] = made.requires_grad_(tensor.requires_grad)
        return fakes[id(tensor)]

    def like(value: Any) -> Any:
        return torch.utils._pytree.tree_map_only(Tensor, fake, value)

    try:
        with mode:
            parameters = {name: fake(tensor) for name, tensor in model.named_parameters()}
            buffers = {name: fake(tensor) for name, tensor in model.named_buffers()}
            state = {**parameters, **buffers}

            def call(*args: Any, **kwargs: Any) -> Any:
                return functional_call(model, state, args, kwargs)

            yield Faked(call, like(arguments), parameters, buffers, like)
    except torch._subclasses.fake_tensor.DataDependentOutputException as error:
        raise _cannot(model, error) from error
    except torch._subclasses.fake_tensor.DynamicOutputShapeException as error:
        raise _cannot(model, error) from error
    except torch._subclasses.fake_tensor.UnsupportedFakeTensorException as error:
        raise _cannot(model, error) from error


def _cannot(model: nn.Module, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot run on fake tensors, because its forward depends on values ({error}). Profile it "
        "with fake=False, and call apply without batch."
    )


def _check_device(device: torch.device | None) -> None:
    """Autograd needs the device's runtime even for fake tensors; without it the process would abort."""
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError(
            "fake tensors on 'cuda' need a CUDA build of torch and a device; here, use device='cpu' (kept bytes differ "
            "where CUDA chooses other kernels, such as attention)"
        )
