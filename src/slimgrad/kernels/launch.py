"""What every Triton twin's host side needs: the right device, and a launch that costs little host time."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

HERE = contextlib.nullcontext()

Variants = dict[tuple[int, bool], Any]
"""(device, whether the source is aligned to 16 bytes) -> compiled kernel."""


def device_of(t: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        return torch.cuda.device(t.device)
    return HERE


def launch(kernel: Any, variants: Variants, programs: int, source: Tensor, *args: Any, **options: int) -> None:
    """Launch on the device of `source`; the arguments are all of the kernel's, constants included.

    `kernel[grid](...)` looks at every argument to find the compiled variant again, which takes most of its 20 us of
    host time. Here the caller has a table of variants for whatever else Triton specialises on: dtypes, constants, and
    integers beyond 32 bits; other integers must be `do_not_specialize`.
    """
    device = source.get_device()
    key = (device, source.data_ptr() % 16 == 0)
    compiled = variants.get(key)
    if compiled is None or device != torch.cuda.current_device():
        with device_of(source):
            # The interpreter returns None: nothing is compiled, nothing is remembered.
            variants[key] = kernel[(programs,)](*args, **options)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
