"""What every Triton twin's host side needs."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager

import torch
from torch import Tensor


def device_of(t: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        return torch.cuda.device(t.device)
    return HERE


HERE = contextlib.nullcontext()
