"""What a model would keep if nothing of ours were in it, where that can be seen no more: its modules run again."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from slimgrad.runtime.batches import Arguments, call
from slimgrad.runtime.fake import faked
from slimgrad.runtime.graph import tensors_in
from slimgrad.runtime.lesson import lesson, owners_of
from slimgrad.runtime.watch import WatchFrame, watched


def untouched_bytes(model: nn.Module, arguments: Arguments, modules: Mapping[str, nn.Module]) -> int | None:
    """Bytes that autograd would hold at the end of this forward; None if it cannot run on fake tensors, or not as it
    would be without anything of ours: BatchNorms in training mode refuse a single sample, which frozen ones take.
    """
    frame = WatchFrame()
    try:
        with torch.enable_grad(), faked(model, arguments) as fake:
            with watched(model, frame):
                output = call(fake.call, fake.arguments)
            roots = [tensor.grad_fn for tensor in tensors_in(output)]
            return lesson(frame, roots, owners_of(model, fake.arguments, fake), modules, {}).profile.kept_bytes
    except Exception:  # no reason to stop a training, whatever it is
        return None
