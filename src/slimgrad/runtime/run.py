"""apply and Run: the one line that users write, and what they hold in their hand afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from slimgrad.errors import SlimgradError, SpecError, UnsupportedModelError
from slimgrad.rules import Controller, Rule, check_against_model
from slimgrad.runtime.batches import call_arguments
from slimgrad.runtime.gate import Gate
from slimgrad.runtime.openings import Border
from slimgrad.runtime.stages import stages_of
from slimgrad.runtime.swaps import drop_inert_swaps
from slimgrad.spec import Report
from slimgrad.spec.budgets import as_number


class Run:
    """What is applied to a model: report on it, extend it over the loss, undo it.

    `with run:` extends the gate over what is computed inside the block but outside the model, such as a loss; leaving
    the block undoes `apply` (what was learnt stays, so that entering again costs nothing).
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    @property
    def rules(self) -> tuple[Rule, ...]:
        return self._gate.rules

    @property
    def active(self) -> bool:
        """Whether the model is under this run now."""
        return self._gate.attached

    def report(self) -> Report:
        """Promised and measured bytes of the last step, per treated site, and why large storages did not shrink."""
        if self._gate.last is None:
            raise SlimgradError(
                "nothing to report yet: no forward with gradients has run under this run. Run one training step first."
            )
        return self._gate.last.report((*self._gate.stages.notes, *self._gate.notes))

    def epoch(self) -> None:
        """Another epoch begins: for recipes that change from one to the next, such as trady; nothing to others."""
        self._gate.stages.epoch()

    @property
    def controller(self) -> Controller | None:
        """What changes the rules by what it sees, such as comet's bounds; None for most recipes."""
        return self._gate.stages.controller

    def state_dict(self) -> dict[str, Any]:
        """The step, and what a controller knows: save it beside the optimizer's state."""
        return self._gate.stages.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the training that saved this state stopped."""
        self._gate.stages.load_state_dict(state)

    def remove(self) -> None:
        """Undo `apply` exactly. Backward through forwards already done still works."""
        self._gate.remove()

    def __enter__(self) -> Run:
        if not self._gate.attached:
            self._gate.attach()
        self._gate.outside.begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.outside.end(failed=kind is not None)
        self._gate.detach()
        self._gate.stages.rest()  # no more than that: the optimizer may step after the block, and its steps count on

    def __repr__(self) -> str:
        state = "active" if self.active else "removed"
        return f"Run({type(self._gate.model).__name__}, {list(self._gate.rules)!r}, {state})"


def apply(
    model: nn.Module,
    what: Any,
    *,
    batch: Any = None,
    optimizer: Optimizer | None = None,
    min_bytes: int | None = None,
) -> Run:
    """Keep less between forward and backward of `model`.

    `what` is a codec (one rule for every site it can serve), a list of rules, of which the first match wins, or a
    recipe such as `dropit(keep=0.1)`; all of them may be text. A recipe that changes over steps counts those of
    `optimizer`, if it is given, and otherwise the model's training forwards. Without
    `batch` the first training forward is watched and packed when it returns; with `batch` the sites are learnt
    beforehand on fake tensors, so that even the first step stays small. Storages smaller than `min_bytes` are left
    alone: by default 4 KiB on a CPU, and 2 MiB on a GPU, where less is not worth the host's time (0 for trady).

    Parameters, buffers, `state_dict` and module classes are not touched.
    """
    check_model(model)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise UnsupportedModelError(f"optimizer must be a torch.optim.Optimizer, found {type(optimizer).__name__}")
    stages = stages_of(what, model, optimizer)
    modules = dict(model.named_modules())
    for rules in (stages.rules, *stages.to_come):
        check_against_model(rules, modules)
    least = None if min_bytes is None else as_number(min_bytes)
    if min_bytes is not None and (not isinstance(least, int) or least < 0):
        raise SpecError(f"min_bytes must be a number of bytes, 0 or more; found {min_bytes!r}")
    drop_inert_borders(model)
    drop_inert_swaps(model)
    gate = Gate(model, stages, stages.min_bytes if least is None else int(least))
    if batch is not None and not stages.strict:  # those learn every structure from fakes
        gate.learn_ahead(call_arguments(batch))
    gate.attach()
    return Run(gate)


def drop_inert_borders(model: nn.Module) -> None:
    """Take away what is left of a run on a copy of a treated model."""
    for module in model.modules():
        hooks = {**module._forward_pre_hooks, **module._forward_hooks}
        shelves = (
            module._forward_pre_hooks,
            module._forward_pre_hooks_with_kwargs,
            module._forward_hooks,
            module._forward_hooks_always_called,
        )
        for number in [number for number, hook in hooks.items() if getattr(hook, "is_inert", False)]:
            for shelf in shelves:
                shelf.pop(number, None)


def check_model(model: Any, *, meta_allowed: bool = False) -> None:
    """Refuse what cannot be treated, before anything is changed."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected an nn.Module, found {type(model).__name__}")
    for path, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            if isinstance(hook, Border) and hook.gate is not None:
                raise SlimgradError(
                    f"{path or 'the model'} is already under a run ({list(hook.gate.rules)!r}); call its remove() first"
                )
    for name, parameter in model.named_parameters():
        if parameter.is_meta and not meta_allowed:
            raise UnsupportedModelError(
                f"parameter {name!r} is on the meta device and cannot be trained; materialise the model first "
                "(model.to_empty(device=...)), or use profile(..., fake=True) to look at it"
            )
