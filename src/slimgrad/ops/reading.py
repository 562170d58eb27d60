"""How backward reads what a codec packed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from slimgrad.codecs import Blocks, Channels, Codec, Packed
from slimgrad.ops.block_operand import BlockOperand
from slimgrad.ops.channel_operand import ChannelOperand
from slimgrad.ops.operands import Operand

OPERANDS: dict[type[Codec], type[Operand]] = {Blocks: BlockOperand, Channels: ChannelOperand}
"""Codecs whose products multiply what is packed itself."""


def reader(codec: Codec) -> Callable[[Packed], Tensor]:
    """From a Packed to what backward is handed."""
    operand = OPERANDS.get(type(codec))
    return codec.unpack if operand is None else partial(operand, codec)
