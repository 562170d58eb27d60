"""The codecs, in one explicit table. Adding one = one file here, one line below, one entry in tests/settings.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slimgrad.codecs.base import ITSELF, Codec, Demand, Packed
from slimgrad.codecs.blocks import Blocks
from slimgrad.codecs.bounded import Bounded
from slimgrad.codecs.channels import Channels
from slimgrad.codecs.derive import Derive
from slimgrad.codecs.fewbit import FewBit
from slimgrad.codecs.keep import Keep
from slimgrad.codecs.lossless import Lossless
from slimgrad.codecs.offload import Offload
from slimgrad.codecs.quant import Quant
from slimgrad.codecs.recompute import Recompute
from slimgrad.codecs.topk import TopK
from slimgrad.errors import SpecError
from slimgrad.kernels import Layout

CODECS: dict[str, type[Codec]] = {
    "Keep": Keep,
    "Lossless": Lossless,
    "Quant": Quant,
    "FewBit": FewBit,
    "TopK": TopK,
    "Blocks": Blocks,
    "Bounded": Bounded,
    "Channels": Channels,
    "Derive": Derive,
    "Recompute": Recompute,
    "Offload": Offload,
}


def codec_from_dict(data: Mapping[str, Any]) -> Codec:
    """The codec that `Codec.to_dict` wrote."""
    name = data.get("type")
    if name not in CODECS:
        raise SpecError(f"unknown codec {name!r}; known are {', '.join(CODECS)}")
    return CODECS[name].from_dict(data)


__all__ = [
    "CODECS",
    "ITSELF",
    "Blocks",
    "Bounded",
    "Channels",
    "Codec",
    "Demand",
    "Derive",
    "FewBit",
    "Keep",
    "Layout",
    "Lossless",
    "Offload",
    "Packed",
    "Quant",
    "Recompute",
    "TopK",
    "codec_from_dict",
]
