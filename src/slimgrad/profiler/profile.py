"""profile: run one forward and loss, and say who keeps every byte alive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from slimgrad.errors import SlimgradError, UnsupportedModelError
from slimgrad.profiler.timeline import timeline as make_timeline
from slimgrad.runtime.batches import Arguments, call, split
from slimgrad.runtime.fake import faked
from slimgrad.runtime.graph import tensors_in
from slimgrad.runtime.lesson import Lesson, Owners, lesson, owners_of
from slimgrad.runtime.run import check_model
from slimgrad.runtime.watch import WatchFrame, watched
from slimgrad.spec import OUTSIDE, Profile

OPAQUE = ("MkldnnRnnLayerBackward0", "CudnnRnnBackward0", "MiopenRnnBackward0")
"""Nodes of fused recurrent kernels. They save a workspace whose size only the kernel knows: none on fake tensors."""


def profile(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None = None,
    *,
    fake: bool = False,
    device: torch.device | str | None = None,
    timeline: bool = True,
) -> Profile:
    """What autograd keeps between forward and backward of one step.

    `batch` is a dict (given as keywords), a tuple (given as positions) or one tensor. With a `loss_fn` of two arguments
    a pair is `(inputs, target)`; without one, the output's own `.loss` is used if it has one. Call it under the same
    autocast as training, with the model in the mode (train or eval) it will train in.

    `fake=True` allocates and computes nothing, for models that do not fit; `device` then says where to pretend to be.
    Buffers, gradients and random state are left as they were. The step is run on fake tensors once more, backward too,
    for the `timeline` that a plan needs; where that cannot be done, `meta["no_timeline"]` says why. What has a
    size that only a real step tells is named in `meta["unknown"]`.
    """
    check_model(model, meta_allowed=fake)
    if device is not None and not fake:
        raise UnsupportedModelError("device= is for fake=True; otherwise move the model and the batch there")
    arguments, to_loss = split(batch, loss_fn)
    with torch.enable_grad():
        if fake:
            with _told_of_fakes(model), faked(model, arguments, device) as pretend:
                owners = owners_of(model, (pretend.arguments, pretend.like(batch)), pretend)
                like_loss = split(pretend.like(batch), loss_fn)[1]
                learnt = _watch(model, pretend.call, pretend.arguments, like_loss, owners, {"fake": True})
        else:
            with undisturbed(model):
                owners = owners_of(model, (arguments, batch))
                learnt = _watch(model, model, arguments, to_loss, owners, {"fake": False})
    found = replace(learnt.profile, meta={**learnt.profile.meta, **_sizes(model, batch), **_unknown(learnt.profile)})
    return _with_timeline(found, learnt, model, batch, loss_fn, device) if timeline else found


@contextmanager
def _told_of_fakes(model: nn.Module) -> Iterator[None]:
    """What fails may do so on fake tensors alone: kernels look at values, or at strides that only a device decides."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, SlimgradError):
            raise
        raise UnsupportedModelError(
            f"{type(model).__name__} failed on fake tensors ({error}). If a real step fails too, it is the model, the "
            "batch or the loss; if not, profile it with fake=False"
        ) from error


def _sizes(model: nn.Module, batch: Any) -> dict[str, int]:
    """Bytes that are there before the step, and the elements that get gradients."""
    tensors = {tensor.data_ptr() or id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
    return {
        "model_bytes": sum(tensors.values()),
        "batch_bytes": sum(tensor.nbytes for tensor in tensors_in(batch)),
        "trained_bytes": sum(p.nbytes for p in model.parameters() if p.requires_grad),
    }


def _unknown(found: Profile) -> dict[str, str]:
    names = [site.name for site in found.sites if site.node in OPAQUE and not site.bytes]
    return {"unknown": ", ".join(names)} if names else {}


def _with_timeline(
    found: Profile,
    learnt: Lesson,
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., Any] | None,
    device: torch.device | str | None,
) -> Profile:
    try:
        with undisturbed(model):
            steps = make_timeline(model, batch, loss_fn, learnt, device=device)
    except UnsupportedModelError as error:
        return replace(found, meta={**found.meta, "no_timeline": str(error)})
    return replace(found, timeline=steps)


def _watch(
    model: nn.Module,
    forward: Callable[..., Any],
    arguments: Arguments,
    to_loss: Callable[[Any], Any],
    owners: Owners,
    meta: dict[str, Any],
) -> Lesson:
    frame = WatchFrame()
    allocated = _allocated()
    frame.enter(OUTSIDE)
    with watched(model, frame):
        output = call(forward, arguments)
        loss = to_loss(output)
    roots = [tensor.grad_fn for tensor in (*tensors_in(output), *tensors_in(loss))]
    del output
    if allocated is not None and not meta["fake"]:
        meta["allocated_bytes"] = torch.cuda.memory_allocated() - allocated
    devices = sorted({str(record.device) for record in frame.records})
    meta |= {"model": type(model).__name__, "device": ", ".join(devices), "torch": torch.__version__}
    meta["mode"] = "train" if model.training else "eval"
    return lesson(frame, roots, owners, dict(model.named_modules()), meta)


def _allocated() -> int | None:
    return torch.cuda.memory_allocated() if torch.cuda.is_initialized() else None


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Put buffers (running statistics) and random state back afterwards; the very tensors, where others took their
    places.
    """
    shelves = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    saved: list[tuple[Tensor, Tensor]] = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for shelf, before in shelves:
            shelf.clear()
            shelf.update(before)
        with torch.no_grad():
            for buffer, value in saved:
                buffer.copy_(value)
