"""A forward on fake tensors: shapes, strides and dtypes flow, no memory is allocated and nothing is computed.

NOTE [Integers stay real]
Only floating-point tensors are fake. Integers and booleans (token ids, positions, masks) are small, and models ask them
questions that fake tensors cannot answer: transformers decides by `(mask == 1).all()` whether attention needs a mask at
all, takes another path for fake tensors, and keeps 9 % more on a 1.1B Llama there than it does when it trains. A single
number that is drawn is real too, because models ask it which layers to skip; the caller's random state stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    unset_fake_temporarily,
)
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from slimgrad.errors import UnsupportedModelError
from slimgrad.runtime.batches import Arguments
from slimgrad.runtime.belongings import belongings_of
from slimgrad.runtime.graph import tensors_in


@dataclass(frozen=True)
class Faked:
    """The model's call on fake parameters and a fake batch."""

    call: Callable[..., Any]
    arguments: Arguments
    parameters: dict[str, Tensor]
    buffers: dict[str, Tensor]
    like: Callable[[Any], Any]
    """The same value with every tensor in it replaced by its fake."""


REAL_ELEMENTS = 2**26
"""Integer tensors with more elements than this are fake as well."""


class RealIntegers(TorchDispatchMode):
    """Runs an op for real if all it reads are real integers, single numbers that are real, or nothing; everything else
    is left to the fake mode.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if all(map(_is_real, tensors)) and (tensors or _makes_integers(func, args, kwargs) or _draws_one(func, args)):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
            if all(_is_real(leaf) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)):
                return result
        return func(*args, **kwargs)


def _is_real(tensor: Tensor) -> bool:
    return _is_real_integer(tensor) or (tensor.numel() <= 1 and not isinstance(tensor, FakeTensor))


def _is_real_integer(tensor: Tensor) -> bool:
    small = tensor.numel() <= REAL_ELEMENTS
    return small and not isinstance(tensor, FakeTensor) and not (tensor.is_floating_point() or tensor.is_complex())


FACTORIES = frozenset(("arange", "zeros", "ones", "full", "empty", "scalar_tensor"))


def _makes_integers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a factory function, by its dtype or by what it counts, gives integers."""
    if func.overloadpacket.__name__ not in FACTORIES:
        return False
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not (dtype.is_floating_point or dtype.is_complex)
    return func.overloadpacket.__name__ == "arange" and all(isinstance(arg, int) for arg in args)


def _draws_one(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a single random number is drawn."""
    return func.overloadpacket.__name__ in ("rand", "randn") and math.prod(args[0]) == 1


def _check_whole(model: nn.Module) -> None:
    """Refuse sharded parameters: FSDP2's own hooks would take the fakes in and not let them go again."""
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "device_mesh"):
            raise UnsupportedModelError(
                f"parameter {name!r} is sharded ({type(parameter).__name__}), and a sharded model cannot run on fake "
                "tensors; call apply(..., batch=...) or profile(..., fake=True) before fully_shard"
            )


@contextmanager
def faked(model: nn.Module, arguments: Arguments, device: torch.device | str | None = None) -> Iterator[Faked]:
    """Fake parameters, buffers and arguments, on the devices they are on or all on `device`. Whatever modules hold is
    put back afterwards (belongings.py).
    """
    target = None if device is None else torch.device(device)
    _check_device(target)
    _check_whole(model)
    fakes: dict[int, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if id(tensor) not in fakes:
            fakes[id(tensor)] = _fake(tensor, target)
        return fakes[id(tensor)]

    def like(value: Any) -> Any:
        return tree_map_only(Tensor, fake, value)

    try:
        mode, integers = FakeTensorMode(allow_non_fake_inputs=True), RealIntegers()  # type: ignore[no-untyped-call]
        with belongings_of(model), torch.random.fork_rng(devices=[]), mode, integers:
            parameters = {name: fake(tensor) for name, tensor in model.named_parameters()}
            buffers = {name: fake(tensor) for name, tensor in model.named_buffers()}
            state = {**parameters, **buffers}

            def call(*args: Any, **kwargs: Any) -> Any:
                return functional_call(model, state, args, kwargs)

            yield Faked(call, like(arguments), parameters, buffers, like)
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException) as error:
        raise _cannot(model, error) from error


def check_nothing_fake(model: nn.Module, output: Any) -> None:
    """Refuse what a real forward made from tensors that are left of one on fakes."""
    if any(isinstance(tensor, FakeTensor) for tensor in tensors_in(output)) and detect_fake_mode() is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} returned a fake tensor: when sites were learnt on fake tensors, something that "
            "is none of its modules (a function with a cache, a global table) kept one of them, and uses it now. In a "
            "new process, run the model once under torch.no_grad() before apply, so that what is kept is real"
        )


def _fake(tensor: Tensor, target: torch.device | None) -> Tensor:
    place = target or (torch.device("cpu") if tensor.is_meta else tensor.device)
    if _is_real_integer(tensor):
        # A copy, since counters such as BatchNorm's are changed in place.
        with unset_fake_temporarily():
            return torch.zeros_like(tensor, device=place) if tensor.is_meta else tensor.detach().clone().to(place)
    made = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=place)
    return made.requires_grad_(tensor.requires_grad)


def _cannot(model: nn.Module, error: Exception) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{type(model).__name__} cannot run on fake tensors, because its forward depends on values ({error}). Profile "
        "it with fake=False, and call apply without batch; trady, which must know sizes before they are kept, cannot "
        "treat it."
    )


def _check_device(device: torch.device | None) -> None:
    """Autograd needs the device's runtime even for fake tensors; without it the process would abort."""
    if device is not None and device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModelError(
            "fake tensors on 'cuda' need a CUDA build of torch and a device; here, use device='cpu' (kept bytes differ "
            "where CUDA chooses other kernels, such as attention)"
        )
