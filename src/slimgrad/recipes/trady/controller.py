"""Draws channels, freezes everything else, and gives the optimizer what is trained.

NOTE [What is frozen, and how]
Parameters that are not trained have `requires_grad` False while the run is active, so that autograd keeps nothing for
them, and its graph begins at the first layer that is trained. BatchNorms run in eval mode, or their inputs would be
kept for statistics. `remove()` puts both back.

NOTE [When channels are drawn]
What a channel costs depends on the sizes of inputs, so the first forward is shown on fake tensors before it begins, and
so is each that may be larger than those before. A draw follows from seed and epoch. It waits while there are gradients
that no step has taken, as in the middle of gradient accumulation; where the channels are too many for a larger batch in
between, some of them are let go.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from slimgrad.errors import SlimgradWarning, SpecError
from slimgrad.recipes.trady import draws, refusals
from slimgrad.recipes.trady.choice import ChannelChoice
from slimgrad.recipes.trady.costs import Chosen, Costs, States, batch_of, layers_of, limit, total, with_parameters
from slimgrad.recipes.trady.frozen import Frozen, trained_whole
from slimgrad.recipes.trady.hooks import Gathered, Measure
from slimgrad.recipes.trady.ranking import a_priori, by_channel, pool
from slimgrad.recipes.trady.sizes import Look, Seen, autocast_on
from slimgrad.recipes.trady.weights import ChannelWeights, held_by
from slimgrad.report.channels import channels_plot
from slimgrad.rules import Controller, Rules, Shapes
from slimgrad.spec.reading import said

if TYPE_CHECKING:
    from slimgrad.recipes.trady.recipe import Trady

ONCE = ("static", "deterministic")
"""Modes that draw but once."""
UNSEEN = (
    "trady: the optimizer took a step before any training forward of the model was seen, so that no channels are drawn "
    "and only what train= names is trained; a model that is compiled, or as a whole inside torch.utils.checkpoint, is "
    "not seen"
)


class TradyController(Controller):
    """The channels of now, and how the next ones are found."""

    strict = True

    def __init__(self, recipe: Trady, model: nn.Module, optimizer: Optimizer | None) -> None:
        refusals.check_model(model)
        refusals.check_optimizer(optimizer)
        self.recipe = recipe
        self.optimizer = optimizer
        self.always = trained_whole(recipe.train, model)
        """Path -> module that is trained whole."""
        self._frozen = Frozen(model, self.always)
        trainable = {id(parameter) for parameter in self._frozen.parameters}
        if optimizer is not None:
            trainable &= held_by(optimizer)
        self.layers = {path: layer for path, layer in layers_of(model).items() if id(layer.weight) in trainable}
        self._ranks = self._ranked(model)
        refusals.check_layers(self.layers, optimizer)
        self.choice: ChannelChoice | None = None
        """What is trained now."""
        self.path: list[ChannelChoice] = []
        """What was drawn so far, in order."""
        self._epoch = 0
        self._due = True
        self._seen = Seen({})
        self._states = States(optimizer)
        self._before: tuple[Seen, bool] = self._seen, True
        """What was seen, and whether a draw was due, before the last forward that was shown."""
        self._look: Look | None = None
        """While the model runs on fake tensors."""
        self._gradients: dict[str, Tensor] = {}
        """Norms of the gradient of each channel, as they were seen last."""
        self._weights: dict[str, ChannelWeights] = {}
        self._handles: list[RemovableHandle] = []
        self._weight_handles: list[RemovableHandle] = []
        self._is_attached = False
        self._is_awaiting = False
        """Whether channels were in a forward that no step has followed yet."""
        self._has_warned = False
        self._rules = recipe.rules({}, {})

    # --- what the run sees ---

    @property
    def rules(self) -> Rules:
        return self._rules

    @property
    def notes(self) -> tuple[str, ...]:
        if self.choice is None:
            return ()
        found = [f"trady, {self.choice}; the budget is {self.recipe.budget!r}"]
        if self.optimizer is None:
            found.append(
                "trady was given no optimizer: gradients of channels that are not chosen are zeros, by which momentum, "
                "weight decay and Adam move weights all the same; give apply(..., optimizer=...) what trains the model"
            )
        return tuple(found)

    def plot(self, path: str | Path) -> Path:
        """Draw which channels were trained in which epoch, and write it to `path`."""
        return channels_plot(self.path, {name: layer.kernels.channels for name, layer in self.layers.items()}, path)

    def epoch(self) -> None:
        self._epoch += 1
        self._due = self._due or self.recipe.mode not in ONCE

    def state_dict(self) -> dict[str, Any]:
        choice = None if self.choice is None else self.choice.to_dict()
        norms = {path: norms.tolist() for path, norms in self._norms().items()}
        return {"epoch": self._epoch, "due": self._due, "choice": choice, "norms": norms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        choice = self._read(state)
        self._epoch, self._due = state["epoch"], state["due"]
        self._gradients = {path: torch.tensor(norms) for path, norms in state["norms"].items()}
        if choice is not None:
            for weights in self._weights.values():
                weights.parameter.grad = None  # of another time
            self._take(choice, was_loaded=True)

    def _read(self, state: Mapping[str, Any]) -> ChannelChoice | None:
        """The choice of a state, if that is one of this model."""
        if not isinstance(state, Mapping) or state.keys() != self.state_dict().keys():
            raise SpecError(f"trady: expected a state with {', '.join(self.state_dict())}; found {said(state)}")
        choice = None if state["choice"] is None else ChannelChoice.from_dict(state["choice"])
        channels = {} if choice is None else choice.channels
        unknown = sorted(set(channels) - set(self.layers))
        if unknown:
            raise SpecError(f"trady: the state has channels of {', '.join(unknown[:3])}, which the model does not have")
        for path, count in {path: layer.kernels.channels for path, layer in self.layers.items()}.items():
            if max(channels.get(path, ()), default=0) >= count or len(state["norms"].get(path, ())) not in (0, count):
                raise SpecError(f"trady: the state is of a model with more or fewer channels than {count} in {path!r}")
        return choice

    # --- attaching ---

    def attach(self) -> None:
        if self._is_attached:
            return
        self._is_attached = True
        self._frozen.freeze()
        modules = {path: layer.module for path, layer in self.layers.items()} | with_parameters(self.always)
        for path, module in modules.items():
            self._handles.append(module.register_forward_pre_hook(Measure(self, path), with_kwargs=True))
        if self._weights:
            self._enter()
        elif self.choice is not None:
            self._take(self.choice)

    def rest(self) -> None:
        """Channels that come back later are the same, with what the optimizer keeps for them."""
        if self._is_attached and not self._is_awaiting:
            self._withdraw()

    def detach(self) -> None:
        if self._is_attached:
            self._withdraw()
        self._weights.clear()

    def _withdraw(self) -> None:
        self._is_attached = False
        self._leave()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._frozen.thaw()

    # --- a forward, a step ---

    def preview(self, shapes: Shapes) -> Any:
        return None if self._seen.knows(self._autocast, shapes) else self._measuring(shapes)

    def untouched(self) -> AbstractContextManager[None]:
        return self._frozen.lifted()

    def begin(self, step: int, shapes: Shapes) -> None:
        try:
            if not any(weights.is_pending for weights in self._weights.values()):
                if self._due:
                    self._draw()
            elif not self._fits():
                self._draw_fewer()
        except SpecError:
            self._seen, self._due = self._before  # whoever goes on does so with a smaller batch
            raise
        self._frozen.hold(weights.layer.weight for weights in self._weights.values())
        for weights in self._weights.values():
            weights.follow()
        self._is_awaiting = bool(self._weights)

    def end(self) -> None:
        if not self._is_attached:
            return
        self._is_awaiting = False
        if self.choice is None and not self._has_warned:
            self._has_warned = True
            warnings.warn(UNSEEN, SlimgradWarning, stacklevel=2)
        if self.optimizer is not None:
            for weights in self._weights.values():
                weights.stepped()

    def gathered(self, path: str) -> None:
        """A weight has its gradient."""
        self._weights[path].gather()
        if self.optimizer is None:
            self._is_awaiting = False  # all that is ours is done

    # --- sizes ---

    @contextmanager
    def _measuring(self, shapes: Shapes) -> Iterator[None]:
        self._look = Look(batch_of(shapes))
        try:
            yield
            self._before = self._seen, self._due
            self._seen = self._seen.with_more(self._autocast, shapes, self._look.sizes)
            self._due = self._due or not self._fits()
        finally:
            self._look = None

    @property
    def _autocast(self) -> Any:
        return autocast_on(next(iter(self.layers.values())).weight.device.type)

    @property
    def _costs(self) -> Costs:
        return Costs(self._seen.sizes, self._states)

    def measure(self, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        """A layer is called."""
        if self._look is not None:
            self._look.add(path, module, args, kwargs)

    # --- draws ---

    def _draw(self) -> None:
        price = {path: self._price(path) for path in self.layers if path in self._seen.sizes}
        channels = {path: self.layers[path].kernels.channels for path in self._pool(price)}
        left = self._left()
        self._gradients = self._norms()
        self._choose(self._epoch, draws.taken(channels, price, left, self._order(channels)))
        self._due = False

    def _draw_fewer(self) -> None:
        """Of those that have gradients, so that what stays has all of its own."""
        assert self.choice is not None
        mine = self.choice.channels
        channels = {path: len(indices) for path, indices in mine.items()}
        random = draws.generator(self.recipe.seed, self._epoch)
        price = {path: self._price(path) for path in channels}
        found = draws.taken(channels, price, self._left(), draws.uniform(channels, random))
        fewer = {path: tuple(mine[path][place] for place in places) for path, places in found.items()}
        self._choose(self.choice.epoch, fewer)

    def _left(self) -> int:
        """Of the budget, for channels."""
        left = limit(self.recipe.budget) - self._price_of_whole()
        if left < 0:
            raise SpecError(
                f"trady: the budget of {self.recipe.budget} is less than what is trained whole takes alone "
                f"({', '.join(self.always)}: {self._price_of_whole()} bytes of inputs, gradients, optimizer states); "
                "raise it, use a smaller batch, or name less in train="
            )
        return left

    def _choose(self, epoch: int, channels: Chosen) -> None:
        costs = self._costs
        choice = ChannelChoice(
            epoch=epoch,
            channels=channels,
            elements=total(channels, lambda path: costs.elements(self.layers[path])),
            bytes=total(channels, lambda path: costs.bytes(self.layers[path])) + costs.whole(self.always),
        )
        self.path.append(choice)
        self._take(choice)

    def _price(self, path: str) -> int:
        """Of one channel, in what the budget counts."""
        costs, layer = self._costs, self.layers[path]
        return costs.elements(layer) if isinstance(self.recipe.budget, int) else costs.bytes(layer)

    def _price_of_whole(self) -> int:
        """The paper's elements are those of channels alone."""
        return 0 if isinstance(self.recipe.budget, int) else self._costs.whole(self.always)

    def _fits(self) -> bool:
        """Whether there are channels that the budget allows."""
        if self.choice is None:
            return False
        return total(self.choice.channels, self._price) + self._price_of_whole() <= limit(self.recipe.budget)

    def _pool(self, price: Mapping[str, int]) -> list[str]:
        """The layers that are drawn from."""
        if self.recipe.mode == "full_random":
            return list(price)
        if self._ranks is not None:
            return pool({path: self._ranks[path].rgn for path in price}, self.recipe.coverage)
        costs, layers = self._costs, [self.layers[path] for path in price]
        sizes = {layer.path: (layer.kernels.channels, layer.weights, costs.inputs(layer)) for layer in layers}
        return pool(a_priori(sizes), self.recipe.coverage)

    def _order(self, channels: draws.Pool) -> Tensor:
        mode = self.recipe.mode
        if mode == "deterministic":
            assert self._ranks is not None
            return draws.largest_first(channels, by_channel({path: self._ranks[path] for path in channels}))
        random = draws.generator(self.recipe.seed, 0 if mode in ONCE else self._epoch)
        if mode == "weighted" and self._gradients:
            return draws.weighted(channels, self._gradients, random)
        return draws.uniform(channels, random)

    def _ranked(self, model: nn.Module) -> Any:
        ranking = self.recipe.measured()
        if ranking is None:
            if self.recipe.mode == "deterministic":
                raise SpecError(
                    "trady: mode='deterministic' takes the channels with the largest RGN, so it needs a ranking; "
                    "measure one by sg.trady_rank(model, loader, ...)"
                )
            return None
        mine = {path: layer.kernels.channels for path, layer in layers_of(model).items() if path not in self.always}
        ranks = ranking.of(mine)
        if self.recipe.mode == "deterministic":
            by_channel(ranks)
        return ranks

    def _norms(self) -> dict[str, Tensor]:
        """Norms as they were seen last, those of now included."""
        if self.recipe.mode != "weighted":
            return {}
        found = dict(self._gradients)
        for path, weights in self._weights.items():
            fresh = weights.norms()
            found[path] = torch.where(fresh.isnan(), found.get(path, fresh), fresh)
        return found

    # --- what is trained ---

    def _take(self, choice: ChannelChoice, *, was_loaded: bool = False) -> None:
        before = [weights.layer for weights in self._weights.values()]
        if self._is_attached:
            self._leave()
        self._weights.clear()
        self.choice = choice
        self._rules = self.recipe.rules(self.layers, choice.channels)
        if not self._is_attached:
            return
        for path, indices in choice.channels.items():
            looks = self.recipe.mode == "weighted"
            self._weights[path] = ChannelWeights(self.layers[path], indices, self.optimizer, looks=looks)
        self._enter(adopt=was_loaded)
        for layer in before:
            if self.optimizer is not None and layer.path not in self._weights:
                layer.weight.grad = None  # of channels that are not trained any more

    def _enter(self, *, adopt: bool = False) -> None:
        for path, weights in self._weights.items():
            weights.layer.weight.requires_grad_(True)
            weights.enter(adopt=adopt)
            handle = weights.layer.weight.register_post_accumulate_grad_hook(Gathered(self, path))
            self._weight_handles.append(handle)

    def _leave(self) -> None:
        for handle in self._weight_handles:
            handle.remove()
        self._weight_handles.clear()
        for weights in self._weights.values():
            weights.leave()
            weights.layer.weight.requires_grad_(False)
