"""Watching one forward outside a gate: for profiles, and for learning ahead on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from slimgrad.runtime.frame import WatchFrame


@contextmanager
def watched(model: nn.Module, frame: WatchFrame) -> Iterator[None]:
    """Module hooks that tell the frame where the forward is; gone afterwards, as are the saved-tensor hooks."""
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(frame, path), prepend=True))
        handles.append(module.register_forward_hook(_leave(frame, path), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        frame.close()


def _enter(frame: WatchFrame, path: str) -> Any:
    return lambda module, args: frame.enter(path)


def _leave(frame: WatchFrame, path: str) -> Any:
    return lambda module, args, output: frame.leave(path)
