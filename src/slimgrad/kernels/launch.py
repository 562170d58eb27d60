"""What every Triton twin's host side needs: the right device, and a launch that costs little host time."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

HERE = contextlib.nullcontext()


def device_of(t: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        return torch.cuda.device(t.device)
    return HERE


class Launcher:
    """One Triton kernel with its variants, found by a key of ours.

    `kernel[grid](...)` looks at every argument to find the compiled variant again, which takes most of its 20 us of
    host time. Here the caller's key names the variant. It must tell apart whatever Triton specialises on: dtypes,
    constants, and whether a pointer is aligned to 16 bytes. Integers must be `do_not_specialize`.
    """

    def __init__(self, kernel: Any, **options: int) -> None:
        self._kernel = kernel
        self._options = options
        self._variants: dict[Hashable, Any] = {}

    def __call__(self, key: Hashable, programs: int, source: Tensor, *args: Any) -> None:
        """Launch on the device of `source`; the arguments are all of the kernel's, constants included."""
        with device_of(source):
            place = (key, source.get_device(), source.data_ptr() % 16 == 0)
            compiled = self._variants.get(place)
            if compiled is None:
                # The interpreter returns None: nothing is compiled, nothing is remembered.
                self._variants[place] = self._kernel[(programs,)](*args, **self._options)
                return
            stream = torch._C._cuda_getCurrentRawStream(place[1])
            compiled.run(programs, 1, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
