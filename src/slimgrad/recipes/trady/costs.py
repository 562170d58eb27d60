"""What a channel costs: its inputs, the gradient of the weight that reads it, and what the optimizer keeps for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from slimgrad.kernels.channels import Kernels
from slimgrad.recipes.pruning import products
from slimgrad.recipes.trady.sizes import NOTHING, Size
from slimgrad.rules import Shapes
from slimgrad.spec.budgets import MOST, bytes_of

Chosen = Mapping[str, tuple[int, ...]]
"""Path of a layer -> its channels."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A product whose channels may be trained."""

    path: str
    module: nn.Module
    kernels: Kernels

    @property
    def weight(self) -> nn.Parameter:
        return self.module.weight  # type: ignore[return-value]

    @property
    def weights(self) -> int:
        """C^W: how many elements of the weight read one channel."""
        return self.weight.numel() // self.kernels.channels

    @property
    def dim(self) -> int:
        """Which dimension of the input counts channels."""
        return 1 if isinstance(self.module, nn.modules.conv._ConvNd) else -1


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """All products with a weight of their own; of what several modules share, no channel can be told apart."""
    owners: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    modules = {path: model.get_submodule(path) for path in products(model)}
    return {
        path: Layer(path, module, _kernels(module))
        for path, module in modules.items()
        if isinstance(module.weight, nn.Parameter) and owners[id(module.weight)] == 1
    }


def _kernels(module: nn.Module) -> Kernels:
    weight = module.weight
    assert isinstance(weight, Tensor)
    if isinstance(module, nn.modules.conv._ConvNd):
        return Kernels(module.in_channels, module.groups, module.transposed)
    if isinstance(module, nn.Linear):
        return Kernels(module.in_features)
    return Kernels(weight.shape[0], inputs_first=True)  # Conv1D of transformers


def batch_of(shapes: Shapes) -> int:
    """How many samples a model is given: what the first dimension of its first tensor counts."""
    return next((int(shape[0]) for shape in shapes if shape != "nested" and len(shape)), 1)


def states_of(optimizer: Optimizer | None, group: Mapping[str, Any] | None = None) -> int:
    """How many numbers the optimizer keeps for each that it trains, by its defaults or in a group; two, as Adam, if it
    is of no known kind.
    """
    if optimizer is None:
        return 0
    settings = optimizer.defaults if group is None else group
    if "betas" in settings:
        return 2 + bool(settings.get("amsgrad"))
    if "momentum" in settings:
        return int("alpha" in settings) + bool(settings["momentum"]) + bool(settings.get("centered"))
    return 2


class States:
    """The same for each parameter, since groups have settings of their own."""

    def __init__(self, optimizer: Optimizer | None) -> None:
        self._otherwise = states_of(optimizer)
        groups = [] if optimizer is None else optimizer.param_groups
        self._known = {id(parameter): states_of(optimizer, group) for group in groups for parameter in group["params"]}

    def of(self, parameter: Tensor) -> int:
        return self._known.get(id(parameter), self._otherwise)


OWN_COPIES = 2
"""The channels' part of the weight as a parameter of its own, and its gradient."""


def limit(budget: int | str) -> int:
    """Elements, or bytes; not more than a tensor can count."""
    return min(budget, MOST) if isinstance(budget, int) else bytes_of(budget)


@dataclass(frozen=True, eq=False)
class Costs:
    """What was seen in forwards, so that everything has its price."""

    sizes: Mapping[str, Size]
    """Path -> input, of the layers that were called."""
    states: States = field(default_factory=lambda: States(None))

    def inputs(self, layer: Layer) -> int:
        """C^A: elements of one channel's input, of one sample."""
        return -(-self._size(layer).per_sample // layer.kernels.channels)

    def elements(self, layer: Layer) -> int:
        """Of one channel: C^W + C^A, as the paper counts."""
        return layer.weights + self.inputs(layer)

    def bytes(self, layer: Layer) -> int:
        """Of one channel: inputs of the whole batch, the parameter of its own, its gradient and states."""
        inputs = self._size(layer).bytes // layer.kernels.channels
        return inputs + (OWN_COPIES + self.states.of(layer.weight)) * layer.weights * layer.weight.itemsize

    def whole(self, modules: Mapping[str, nn.Module]) -> int:
        """Bytes of what is trained whole: inputs, gradients, states."""
        parameters = {id(p): p for module in modules.values() for p in module.parameters() if p.requires_grad}
        trained = sum((1 + self.states.of(p)) * p.nbytes for p in parameters.values())
        return trained + sum(self.sizes.get(path, NOTHING).bytes for path in with_parameters(modules))

    def _size(self, layer: Layer) -> Size:
        return self.sizes.get(layer.path, NOTHING)


def with_parameters(modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Those of these modules, and of what is in them, that have parameters of their own."""
    found: dict[int, tuple[str, nn.Module]] = {}
    for path, outer in modules.items():
        for name, module in outer.named_modules(prefix=path):
            if any(True for _ in module.parameters(recurse=False)):
                found.setdefault(id(module), (name, module))
    return dict(found.values())


def total(chosen: Chosen, price: Callable[[str], int]) -> int:
    """The price of these channels together, where `price` is that of one channel of a layer."""
    return sum(len(indices) * price(path) for path, indices in chosen.items())
