"""COMET (Jin et al., VLDB 2022): products keep their inputs within a bound that follows from what gradients can bear.

NOTE [What gradients can bear]
The bound of a layer is the one with which the noise of its gradient (noise.py) is `target` times the mean magnitude
of its momentum. Momentum is taken as SGD has it, a sum of gradients of which each weighs less with every step; Adam's
is an average, and divided by 1 - beta1. Where an optimizer has none, or one of something else (RMSprop's is of steps),
it is ours, of the gradients that the optimizer sees. Where gradients are clipped, or scaled for float16, their noise is
so too: by as much as the norm of the gradient changes between its accumulation and the optimizer's step.

NOTE [When bounds change]
Statistics take two passes over dY and the inputs, so they are taken at some steps only: first at the first, then every
so many steps, where that interval is halved if a bound moved by more than 2x, and doubled otherwise, up to `refresh`.
Until there are any, inputs are kept within START of their range. Bounds are rounded down to quarters of powers of two,
so that a layer whose bound hardly moves keeps its codec, and the sizes that it knows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from slimgrad.codecs import Bounded, Codec, codec_from_dict
from slimgrad.codecs.selection import check_flag
from slimgrad.errors import SpecError
from slimgrad.recipes.hooks import Hook
from slimgrad.recipes.noise import allowed_bound, here, mean_size, norm, variance_by
from slimgrad.recipes.pruning import check_shared, products, skip_names, skipped_paths, with_rest
from slimgrad.report.bounds import bounds_plot
from slimgrad.rules import Controller, InputOf, Recipe, Rule, Rules, Shapes
from slimgrad.spec.reading import tuples
from slimgrad.spec.values import checked_body

START = 1e-3
"""Of a tensor's range."""
MOVED = 2.0
STAYS = 0.9
"""How much of a momentum stays with every step, where it is ours."""
LEAST_BOUND, MOST_BOUND = 1e-30, 1e30
Estimate = Literal["channels", "paper"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Comet(Recipe):
    """The recipe that `comet` makes."""

    target: float = 0.01
    refresh: int = 1000
    rest: Codec | None = None
    skip: tuple[str, ...] = ()
    predict: Literal["none", "lorenzo", "auto"] = "auto"
    estimate: Estimate = "channels"
    adapt: bool = True
    dither: bool = True

    def __post_init__(self) -> None:
        number = isinstance(self.target, (int, float)) and not isinstance(self.target, bool)
        if not number or not 0 < self.target < math.inf:
            raise SpecError(f"comet: target must be a positive number, found {self.target!r}")
        if type(self.refresh) is not int or self.refresh < 1:
            raise SpecError(f"comet: refresh must be a number of steps, at least 1; found {self.refresh!r}")
        check_shared("comet", self.skip, self.rest)
        if self.estimate not in ("channels", "paper"):
            raise SpecError(f"comet: estimate must be 'channels' or 'paper', found {self.estimate!r}")
        check_flag("comet", "adapt", self.adapt)
        Bounded(predict=self.predict, dither=self.dither)

    def stages(self, model: nn.Module) -> Mapping[int, Rules]:
        return {0: self.rules(self.layers(model), {})}

    def controller(self, model: nn.Module, optimizer: Optimizer | None) -> CometController:
        return CometController(self, {path: model.get_submodule(path) for path in self.layers(model)}, optimizer)

    def layers(self, model: nn.Module) -> list[str]:
        """The products that are treated."""
        skipped = set(skipped_paths("comet", self.skip, model))
        return [path for path in products(model) if path not in skipped]

    def rules(self, layers: Iterable[str], bounds: Mapping[str, float]) -> Rules:
        found = [Rule(InputOf(path), self.codec(bounds.get(path))) for path in layers]
        return with_rest(found, self.rest)

    def codec(self, bound: float | None) -> Bounded:
        if bound is None:
            return Bounded(bound=START, relative=True, predict=self.predict, dither=self.dither)
        return Bounded(bound=bound, predict=self.predict, dither=self.dither)

    def __repr__(self) -> str:
        return super().__repr__().replace("Comet(", "comet(", 1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Comet:
        body = checked_body(cls, data)
        rest = None if body["rest"] is None else codec_from_dict(body["rest"])
        return cls(**{**{name: tuples(value) for name, value in body.items()}, "rest": rest})


@dataclass
class Seen:
    """What one layer showed in the forwards and backwards of one step; tensors, which the host does not wait for."""

    first: str
    """The first layer that read the same input: they share what is kept of it, and so the bound."""
    variances: list[Tensor] = field(default_factory=list)
    """Of the gradient's noise, for a bound of 1."""
    accumulated: Tensor | None = None
    """The norm of the gradient when it was."""

    def to(self, device: torch.device) -> Seen:
        accumulated = None if self.accumulated is None else self.accumulated.to(device)
        return Seen(self.first, [variance.to(device) for variance in self.variances], accumulated)


class CometController(Controller):
    """Bounds that follow the momentum."""

    def __init__(self, recipe: Comet, layers: Mapping[str, nn.Module], optimizer: Optimizer | None) -> None:
        self.recipe = recipe
        self.layers = layers
        self._optimizer = optimizer
        self.bounds: dict[str, float] = {}
        self.interval = 1
        self.next = 0
        """The step at which statistics are taken again."""
        self.path: list[tuple[int, dict[str, float]]] = []
        """Each refresh: its step, and the bounds from then on."""
        self._step = 0
        self._seen: dict[str, Seen] = {}
        self._inputs: dict[int, tuple[StorageWeakRef, str]] = {}
        self._momenta: dict[str, Tensor] = {}
        """Of layers whose momentum is ours to have."""
        self._handles: list[RemovableHandle] = []
        self._heard: dict[str, tuple[nn.Parameter, RemovableHandle]] = {}
        """Weights that tell when their gradient is there."""
        self._rules = recipe.rules(layers, {})

    @property
    def rules(self) -> Rules:
        return self._rules

    @property
    def looks(self) -> bool:
        """Whether statistics are taken in this step."""
        return self._step >= self.next and (self.recipe.adapt or not self.bounds)

    def attach(self) -> None:
        if self._handles:
            return
        for path, module in self.layers.items():
            self._handles.append(module.register_forward_hook(_Look(self, path)))
        self._listen()

    def detach(self) -> None:
        for handle in (*self._handles, *(handle for _, handle in self._heard.values())):
            handle.remove()
        self._handles.clear()
        self._heard.clear()

    def begin(self, step: int, shapes: Shapes) -> None:
        if step != self._step:
            self._seen.clear()
        self._inputs.clear()
        self._step = step
        if self.looks:
            self._listen()

    def end(self) -> None:
        """A step was taken: if statistics were, bounds follow."""
        if self._optimizer is not None:
            for path in self._momenta:
                self._remember(path)
        found = {path: self._allowed(path, seen) for path, seen in self._seen.items() if seen.variances}
        known = {path: bound for path, bound in found.items() if bound is not None}
        if known:
            device = next(iter(known.values())).device  # layers may lie on several
            values = torch.stack([bound.to(device) for bound in known.values()]).tolist()  # the one time the host waits
            self._follow({path: value for path, value in zip(known, values, strict=True) if 0 < value < math.inf})
        self._seen.clear()

    def plot(self, path: str | Path) -> Path:
        """Draw where the bounds of all layers went, and write it to `path`."""
        return bounds_plot(self.path, path)

    def state_dict(self) -> dict[str, Any]:
        momenta = {path: momentum.cpu() for path, momentum in self._momenta.items()}
        seen = {path: vars(seen.to(torch.device("cpu"))) for path, seen in self._seen.items()}
        when = {"interval": self.interval, "next": self.next, "step": self._step}
        return {"bounds": dict(self.bounds), **when, "momenta": momenta, "seen": seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        unknown = sorted({*state["bounds"], *state["momenta"]} - set(self.layers))
        if unknown:
            raise SpecError(f"comet: the state has bounds for {', '.join(unknown[:3])}, which the model does not have")
        self.interval, self.next, self._step = state["interval"], state["next"], state["step"]
        devices = {path: weight.device for path, layer in self.layers.items() if (weight := _weight(layer)) is not None}
        momenta, seen = (state[each].items() for each in ("momenta", "seen"))
        self._momenta = {path: found.to(devices[path], copy=True) for path, found in momenta if path in devices}
        self._seen = {path: Seen(**found).to(devices[path]) for path, found in seen if path in devices}
        self._have(dict(state["bounds"]))

    # --- statistics ---

    def _listen(self) -> None:
        """Have hooks on the weights of now: some were frozen before, or are others than at first."""
        for path, module in self.layers.items():
            weight, (known, handle) = _weight(module), self._heard.get(path, (None, None))
            if handle is not None and known is not weight:
                handle.remove()
                del self._heard[path]
            if weight is not None and weight.requires_grad and known is not weight:
                self._heard[path] = weight, weight.register_post_accumulate_grad_hook(_Accumulated(self, path))

    def look(self, path: str, x: Tensor, y: Tensor) -> None:
        """A layer's forward."""
        weight = _weight(self.layers[path])
        if weight is None or not weight.requires_grad:  # the input of a frozen layer is not kept
            return
        if torch.compiler.is_compiling():  # nor is anything packed there
            return
        storage = x.untyped_storage()
        known, first = self._inputs.get(storage._cdata, (None, path))
        if known is None or known.expired():
            first = path
            self._inputs[storage._cdata] = (StorageWeakRef(storage), path)
        seen = self._seen.setdefault(path, Seen(first))
        if y.requires_grad:
            variance = variance_by(self.layers[path], x, paper=self.recipe.estimate == "paper")
            y.register_hook(lambda dy: seen.variances.append(variance(dy)))

    def accumulated(self, path: str, weight: Tensor) -> None:
        assert weight.grad is not None
        if path in self._seen:
            self._seen[path].accumulated = norm(weight.grad)
        if self._optimizer is None:  # or else it may be scaled or clipped before it is used
            self._remember(path)

    def _remember(self, path: str) -> None:
        """Add the gradient to the momentum that is ours; what is not finite would stay there for good."""
        weight, known = _weight(self.layers[path]), self._momenta.get(path)
        if weight is None or weight.grad is None:
            return
        gradient = here(weight.grad.detach())
        if known is None or (known.shape, known.device) != (gradient.shape, gradient.device):
            self._momenta[path] = known = torch.zeros_like(gradient)
        known.mul_(STAYS).add_(gradient).nan_to_num_(0.0, 0.0, 0.0)

    def _allowed(self, path: str, seen: Seen) -> Tensor | None:
        """The bound with which the noise is as large as it may be; None without a gradient or a momentum."""
        weight = _weight(self.layers[path])
        size = None if weight is None else self._momentum(path, weight)
        if weight is None or size is None or seen.accumulated is None:
            return None
        changed = torch.ones_like(seen.accumulated)
        if self._optimizer is not None and weight.grad is not None:
            changed = norm(weight.grad) / seen.accumulated
        return allowed_bound(self.recipe.target * size / changed.nan_to_num(1.0), seen.variances)

    def _momentum(self, path: str, weight: Tensor) -> Tensor | None:
        """Its mean magnitude."""
        found = None if self._optimizer is None else _momentum_of(self._optimizer, weight)
        if found is None and path not in self._momenta:
            self._remember(path)
        if found is None and path in self._momenta:
            found = mean_size(self._momenta[path])
        return found

    def _follow(self, allowed: Mapping[str, float]) -> None:
        least: dict[str, float] = {}
        for path, bound in allowed.items():
            first = self._seen[path].first
            least[first] = min(bound, least.get(first, math.inf))
        fresh = {path: _rounded(least[self._seen[path].first]) for path in allowed}
        known = [(bound, self.bounds[path]) for path, bound in fresh.items() if path in self.bounds]
        moves = [max(pair) / min(pair) for pair in known]
        settled = 0 < len(moves) == len(fresh) and max(moves) <= MOVED
        self.interval = min(self.recipe.refresh, self.interval * 2) if settled else max(1, self.interval // 2)
        self.next = self._step + self.interval
        if not fresh.items() <= self.bounds.items():  # the same rules would be decided upon once more
            self._have(self.bounds | fresh)
        self.path.append((self._step, dict(self.bounds)))

    def _have(self, bounds: dict[str, float]) -> None:
        self.bounds = bounds
        self._rules = self.recipe.rules(self.layers, bounds)


class _Look(Hook[CometController]):
    """A forward hook that looks at a layer where that is asked for."""

    def __call__(self, *args: Any) -> None:
        _, inputs, output = args
        controller = self.owner
        if controller is None or not controller.looks or not torch.is_grad_enabled():
            return
        if inputs and isinstance(output, Tensor):
            controller.look(self.path, inputs[0], output)


class _Accumulated(Hook[CometController]):
    """A hook on a weight whose gradient was accumulated."""

    def __call__(self, *args: Any) -> None:
        controller = self.owner
        if controller is not None:
            controller.accumulated(self.path, args[0])


def _weight(module: nn.Module) -> nn.Parameter | None:
    """None if it is no parameter but computed from others, by a parametrization; such a layer's input is left alone."""
    return module._parameters.get("weight")


def _momentum_of(optimizer: Optimizer, weight: Tensor) -> Tensor | None:
    """The mean magnitude of SGD's, or of Adam's as SGD would have it; None of others, whose are not of gradients."""
    state = optimizer.state.get(weight, {})
    groups = (group for group in optimizer.param_groups if any(each is weight for each in group["params"]))
    group = next(groups, {})
    if "dampening" in group and state.get("momentum_buffer") is not None:
        return mean_size(state["momentum_buffer"])
    if "betas" in group and state.get("exp_avg") is not None:
        return mean_size(state["exp_avg"]) / (1 - float(group["betas"][0]))
    return None


def _rounded(bound: float) -> float:
    """Down to quarters of powers of two."""
    return min(max(float(2.0 ** (math.floor(math.log2(bound) * 4) / 4)), LEAST_BOUND), MOST_BOUND)


def comet(
    target: float = 0.01,
    refresh: int = 1000,
    rest: Codec | None = None,
    *,
    skip: Iterable[str] = (),
    predict: Literal["none", "lorenzo", "auto"] = "auto",
    estimate: Estimate = "channels",
    adapt: bool = True,
    dither: bool = True,
) -> Comet:
    """Linear layers and convolutions keep their inputs within a bound, each its own, that follows the training.

    The bound of a layer is such that the noise it adds to the gradient of the weight is `target` times the mean
    magnitude of the momentum: that of `apply(..., optimizer=...)`, or else one of ours. It is found anew every
    `refresh` steps, and more often while it moves. Forward is exact, and so is the gradient that flows on; zeros stay
    zeros. `rest` treats everything else. `skip` leaves out layers: "first", "head", or paths. With `estimate="paper"`
    the noise is taken from the mean magnitude of dY; with `adapt=False` the first bounds stay, for comparison.
    """
    how: dict[str, Any] = {"predict": predict, "estimate": estimate, "adapt": adapt, "dither": dither}
    return Comet(target=target, refresh=refresh, rest=rest, skip=skip_names(skip), **how)
