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


def launch(
    kernel: Any, variants: Variants, programs: int, tensors: tuple[Tensor, ...], *args: Any, **options: int
) -> None:
    """Launch on the device of the first tensor; `args` are the kernel's other arguments, constants included.

    `kernel[grid](...)` looks at every argument to find the compiled variant again, which takes most of its 20 us of
    host time. Here the caller has a table of variants for whatever else Triton specialises on: dtypes, constants, and
    integers beyond 32 bits; other integers must be `do_not_specialize`. Tensors after the first must be aligned.
    """
    source = tensors[0]
    device = source.get_device()
    pointers = [tensor.data_ptr() for tensor in tensors]
    key = (device, pointers[0] % 16 == 0)
    compiled = variants.get(key)
    if compiled is None or device != torch.cuda.current_device():
        with device_of(source):
            # The interpreter returns None: nothing is compiled, nothing is remembered.
            variants[key] = kernel[(programs,)](*tensors, *args, **options)
        return
    stream = torch._C._cuda_getCurrentRawStream(device)
    metadata = compiled.packed_metadata
    compiled.run(programs, 1, 1, stream, compiled.function, metadata, None, None, None, *pointers, *args)
