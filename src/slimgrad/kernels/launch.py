"""What every Triton twin's host side needs: the right device, and a launch that costs little host time."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from slimgrad.kernels.geometry import Layout

HERE = contextlib.nullcontext()
USUAL_SHARED_BYTES = 96 * 1024

# A torch built without CUDA does not have them.
_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)


def device_of(t: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensor's."""
    if t.is_cuda and t.device.index != torch.cuda.current_device():
        return torch.cuda.device(t.device)
    return HERE


@lru_cache(maxsize=64)
def multiprocessors(device: torch.device) -> int:
    """How many there are; for the interpreter, a few."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@lru_cache(maxsize=64)
def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may fill with what it reads ahead: 7/8 of what there is."""
    if device.type != "cuda":
        return USUAL_SHARED_BYTES
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", USUAL_SHARED_BYTES)) // 8 * 7


@lru_cache(maxsize=64)
def reads_tiles(device: torch.device) -> bool:
    """Whether there is a tensor memory accelerator; the interpreter plays one."""
    return device.type != "cuda" or (torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0))


def is_current(t: Tensor) -> bool:
    """Whether the tensor's device is the current one."""
    return bool(t.get_device() == _current_device())


def variant_of(compiled: Any) -> Any:
    """What `launch` needs of a compiled kernel; None from the interpreter, which compiles nothing."""
    return None if compiled is None else (compiled.run, compiled.function, compiled.packed_metadata)


def launch(variant: Any, programs: int, device: int, *args: Any) -> None:
    """A compiled kernel, on the current device, with all its arguments; tensors by their addresses."""
    run, function, metadata = variant
    run(programs, 1, 1, _stream(device), function, metadata, None, None, None, *args)


class Launch:
    """A kernel on two tensors and more, with all its other arguments: constants included, in their order.

    `kernel[grid](...)` looks at every argument to find the compiled variant again, which takes most of its 20 us of
    host time. Here a variant is found by what may differ from call to call: the device, and whether the first two
    tensors are aligned to 16 bytes. The dtypes must always be the same ones, and the others must be aligned; numbers
    among them must be of a kind that no variant is compiled for. `reads`
    and `writes` are the dtypes that the kernel takes the first and the second for, where those are others; `constants`
    are tensors that follow and stay what they are.
    """

    __slots__ = ("args", "constants", "kernel", "options", "programs", "reads", "rest", "variants", "writes")

    def __init__(
        self,
        kernel: Any,
        programs: int,
        *args: Any,
        reads: torch.dtype | None = None,
        writes: torch.dtype | None = None,
        constants: tuple[Tensor, ...] = (),
        **options: Any,
    ) -> None:
        self.kernel = kernel
        self.programs = programs
        self.args = args
        self.constants = constants
        self.rest = (*(tensor.data_ptr() for tensor in constants), *args)
        self.reads = reads
        self.writes = writes
        self.options = options
        self.variants: dict[tuple[int, bool, bool], Any] = {}

    def __call__(self, source: Tensor, out: Tensor, *more: Tensor | int) -> None:
        start, target, device = source.data_ptr(), out.data_ptr(), source.get_device()
        variant = self.variants.get((device, start % 16 == 0, target % 16 == 0))
        if variant is None or _current_device() != device:
            self._first(source, out, *more)
            return
        plain = [each.data_ptr() if isinstance(each, Tensor) else each for each in more]
        launch(variant, self.programs, device, start, target, *plain, *self.rest)

    def _first(self, source: Tensor, out: Tensor, *more: Tensor | int) -> None:
        source = source if self.reads is None else source.view(self.reads)
        out = out if self.writes is None else out.view(self.writes)
        with device_of(source):
            compiled = self.kernel[(self.programs,)](source, out, *more, *self.constants, *self.args, **self.options)
        variant = variant_of(compiled)
        if variant is not None:
            start, target, device = source.data_ptr(), out.data_ptr(), source.get_device()
            self.variants[device, start % 16 == 0, target % 16 == 0] = variant


class ByLaunches:
    """A packer of two kernels. Made once per layout, because what it holds takes 20 us to find."""

    __slots__ = ("alignment", "layout", "nbytes", "packing", "unpacking", "wide")

    def __init__(
        self,
        layout: Layout,
        nbytes: int,
        packing: Launch,
        unpacking: Launch,
        wide: Launch | None = None,
        alignment: int = 1,
    ) -> None:
        self.layout = layout
        self.nbytes = nbytes
        self.packing = packing
        self.unpacking = unpacking
        self.wide = wide
        """Packs by larger words, where the tensor begins at a multiple of `alignment`."""
        self.alignment = alignment

    def pack(self, x: Tensor) -> Tensor:
        out = torch.empty(self.nbytes, dtype=torch.uint8, device=self.layout.device)
        if self.nbytes:
            wide = self.wide
            (self.packing if wide is None or x.data_ptr() % self.alignment else wide)(x, out)
        return out

    def unpack(self, packed: Tensor) -> Tensor:
        out = self.layout.empty()
        if self.nbytes:
            self.unpacking(packed, out)
        return out
