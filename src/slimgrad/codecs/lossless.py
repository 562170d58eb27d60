"""Lossless: keep exactly what backward reads, and nothing more. Gradients stay equal bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed, Treatment, per_layout
from slimgrad.codecs.keep import Keep
from slimgrad.codecs.masks import Bit, bit_of
from slimgrad.errors import SavedTensorModifiedError, SpecError
from slimgrad.kernels import Layout
from slimgrad.spec import Need


@dataclass(frozen=True, kw_only=True, repr=False)
class Lossless(Codec):
    """Serves NOTHING by a shape, MASK by one bit, INDEX by one byte, WEIGHT by a reference to the parameter."""

    lossy: ClassVar[bool] = False

    def serves(self, demand: Demand, dtype: torch.dtype) -> bool:
        handler = HANDLERS.get(demand.need)
        return handler is not None and handler.serves(demand, dtype)

    def pack(self, tensor: Tensor, demand: Demand = ITSELF) -> Packed:
        return HANDLERS.get(demand.need, ITSELF_HANDLER).pack(tensor, demand)

    def unpack(self, packed: Packed) -> Tensor:
        return HANDLERS.get(packed.demand.need, ITSELF_HANDLER).unpack(packed)

    def promised(self, shape: Sequence[int], dtype: torch.dtype, demand: Demand = ITSELF) -> int:
        return HANDLERS.get(demand.need, ITSELF_HANDLER).promised(shape, dtype, demand)

    def needs_served(self) -> tuple[Need, ...]:
        return tuple(HANDLERS)


@dataclass(frozen=True)
class Handler:
    """How one need is served."""

    serves: Callable[[Demand, torch.dtype], bool]
    pack: Callable[[Tensor, Demand], Packed]
    unpack: Callable[[Packed], Tensor]
    promised: Callable[[Sequence[int], torch.dtype, Demand], int]


# --- NOTHING: the shape alone ---------------------------------------------------------------------------------------


def _pack_shape(tensor: Tensor, demand: Demand) -> Packed:
    return Packed(Layout.of(tensor), demand)


def _unpack_shape(packed: Packed) -> Tensor:
    return packed.layout.empty()


# --- MASK: one bit per element --------------------------------------------------------------------------------------


def _bit(demand: Demand, dtype: torch.dtype) -> Bit | None:
    return bit_of(demand.fn, demand.detail, dtype)


def _pack_mask(tensor: Tensor, demand: Demand) -> Packed:
    on = None
    if demand.fn == "dropout" and tensor.numel():  # on a CPU only, where there is no device to wait for
        on = float(tensor.amax())
    return _mask_treatment(tensor, demand.fn, tuple(demand.detail.items()), on).pack(tensor, demand)


@per_layout
def _mask_treatment(
    layout: Layout, fn: str | None, detail: tuple[tuple[str, Any], ...], on: float | None
) -> kernels.Packer:
    bit = bit_of(fn, dict(detail), layout.dtype)
    if bit is None:
        raise SpecError(f"Lossless cannot serve {Need.MASK} of {fn} in {layout.dtype} by one exact bit")
    return kernels.bit_packer(layout, bit.rule, bit.on if on is None else on, bit.off)


def _mask_bytes(shape: Sequence[int], dtype: torch.dtype, demand: Demand) -> int:
    return -(-math.prod(shape) // 8)


# --- INDEX: a position inside the window, or inside the plane -------------------------------------------------------


def _pool(detail: Mapping[str, Any]) -> kernels.Windows:
    fields = (detail[name] for name in ("input_size", "kernel_size", "stride", "padding", "dilation"))
    return kernels.Windows(*map(tuple, fields))


def _fits_window(demand: Demand) -> bool:
    """Whether one byte can name the position in the window; otherwise the position in the plane is narrowed."""
    return demand.fn == "window" and _pool(demand.detail).fits


def _serves_index(demand: Demand, dtype: torch.dtype) -> bool:
    return dtype == torch.int64 and demand.fn in ("window", "plane") and "input_size" in demand.detail


def _pack_index(tensor: Tensor, demand: Demand) -> Packed:
    layout = Layout.of(tensor)
    if _fits_window(demand):
        codes = kernels.pack_window(tensor, _pool(demand.detail))
    else:
        codes = kernels.narrow_int(layout.flat(tensor), math.prod(demand.detail["input_size"]))
    return Packed(layout, demand, (codes,))


def _unpack_index(packed: Packed) -> Tensor:
    layout, codes, demand = packed.layout, packed.payload[0], packed.demand
    if not _fits_window(demand):
        return layout.restore(kernels.widen_int(codes))
    indices = kernels.unpack_window(codes, _pool(demand.detail))
    return indices if indices.stride() == layout.stride else layout.empty().copy_(indices)


def _index_bytes(shape: Sequence[int], dtype: torch.dtype, demand: Demand) -> int:
    if _fits_window(demand):
        return math.prod(shape)
    return math.prod(shape) * kernels.narrow_dtype(math.prod(demand.detail["input_size"])).itemsize


# --- WEIGHT: the parameter, cast again in backward ------------------------------------------------------------------


def _serves_weight(demand: Demand, dtype: torch.dtype) -> bool:
    return demand.parameter is not None and dtype.is_floating_point


def _pack_weight(tensor: Tensor, demand: Demand) -> Packed:
    assert demand.parameter is not None
    extra = {"version": demand.parameter._version, "offset": tensor.storage_offset()}
    return Packed(Layout(tensor.shape, tensor.stride(), tensor.dtype, tensor.device), demand, (), extra)


def _unpack_weight(packed: Packed) -> Tensor:
    parameter, layout, extra = packed.demand.parameter, packed.layout, packed.extra
    assert parameter is not None
    if parameter._version != extra["version"]:
        raise SavedTensorModifiedError(
            f"a parameter of shape {tuple(parameter.shape)} was changed in place between forward and backward "
            f"(version {extra['version']} then, {parameter._version} now), so its {layout.dtype} copy cannot be made "
            "again. Call backward before optimizer.step(), or exempt the module with Rule(path, Keep())."
        )
    source = parameter.detach() if torch.is_grad_enabled() else parameter
    copy = source.to(layout.dtype)
    if copy.shape == layout.shape and copy.stride() == layout.stride:
        return copy
    return copy.as_strided(layout.shape, layout.stride, extra["offset"])


# --- anything, by itself --------------------------------------------------------------------------------------------


KEEP = Keep()


def _pack_itself(tensor: Tensor, demand: Demand) -> Packed:
    if tensor.dtype == torch.bool:
        return _pack_mask(tensor, Demand(need=Need.MASK, fn="bool"))
    return KEEP.pack(tensor, demand)


def _itself_bytes(shape: Sequence[int], dtype: torch.dtype, demand: Demand) -> int:
    return (_mask_bytes if dtype == torch.bool else KEEP.promised)(shape, dtype, demand)


ITSELF_HANDLER = Handler(lambda demand, dtype: True, _pack_itself, KEEP.unpack, _itself_bytes)
"""`Lossless().pack(x)` outside a gate: bit masks shrink, everything else is copied."""

HANDLERS: dict[Need, Handler] = {
    Need.NOTHING: Handler(lambda demand, dtype: True, _pack_shape, _unpack_shape, lambda shape, dtype, demand: 0),
    Need.MASK: Handler(
        lambda demand, dtype: _bit(demand, dtype) is not None, _pack_mask, Treatment.unpack, _mask_bytes
    ),
    Need.INDEX: Handler(_serves_index, _pack_index, _unpack_index, _index_bytes),
    Need.WEIGHT: Handler(_serves_weight, _pack_weight, _unpack_weight, lambda shape, dtype, demand: 0),
}
