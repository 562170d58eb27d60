"""Block-sparse activation pruning: products keep some blocks of what they multiply with their weights, and skip all
others in backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import nn

from slimgrad.codecs import Blocks, Codec, Lossless
from slimgrad.errors import SpecError
from slimgrad.ops.block_size import BlockSize, quickest_block
from slimgrad.recipes.pruning import Pruning, products, shared_settings
from slimgrad.rules import AnyOf, Operands, Rule
from slimgrad.spec import Need

AUTO: Literal["auto"] = "auto"
USUAL: BlockSize = (64, 64)
"""Where nothing can be measured: convolutions of more than one position, and models without parameters."""

EXACT = (Need.NOTHING, Need.MASK, Need.INDEX)
"""What is kept exactly in less, in any case: without it, a ReLU before a convolution would hold all that is dropped."""


@dataclass(frozen=True, kw_only=True, repr=False)
class BlockPruning(Pruning):
    """The recipe that `block_pruning` makes."""

    called: ClassVar[str] = "block_pruning"

    block: BlockSize | Literal["auto"] = USUAL
    norm: Literal["l1", "l2"] = "l1"
    layout: Literal["balanced", "bsr"] = "balanced"
    means: int = 0
    sample: int = 1
    unbiased: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.block, str) and self.block != AUTO:
            raise SpecError(f"block_pruning: block must be rows and columns or 'auto', found {self.block!r}")
        super().__post_init__()

    def codec(self, part: float) -> Blocks:
        return Blocks(
            keep=part,
            block=USUAL if self.block == AUTO else self.block,
            norm=self.norm,
            layout=self.layout,
            means=self.means,
            sample=self.sample,
            unbiased=self.unbiased,
        )

    def _operands(self, part: float, skipped: tuple[str, ...], model: nn.Module) -> list[Rule]:
        """With "auto", first the layers whose quickest block is not the usual one."""
        if part == 1:
            return super()._operands(part, skipped, model)
        codec = self.codec(part)
        return [*(self._quickest(codec, skipped, model) if self.block == AUTO else ()), _rule(codec, skipped)]

    def _quickest(self, codec: Blocks, skipped: tuple[str, ...], model: nn.Module) -> list[Rule]:
        paths = products(model)
        blocks = {path: quickest_block(model.get_submodule(path), codec) for path in paths}
        return [
            _rule(replace(codec, block=block), tuple(p for p in paths if blocks[p] != block or p in skipped))
            for block in dict.fromkeys(blocks.values())
            if block != codec.block
        ]

    def _exact(self) -> Rule:
        """Alone, without the weights: to cast their copies again takes 4 % of a step of ViT-B, for 2 % of the bytes."""
        return super()._exact() if self.rest is not None else Rule(AnyOf(EXACT), Lossless())


def _rule(codec: Blocks, but: tuple[str, ...]) -> Rule:
    """For products that read enough rows: a tenth of four blocks would be one, and what it tells of the others little.
    So few are there where each row is a sample, behind a pooling.
    """
    return Rule(Operands(but, least_rows=math.ceil(codec.block[0] / codec.keep)), codec)


def block_pruning(
    keep: float | Mapping[int, float] = 0.1,
    block: BlockSize | Literal["auto"] = USUAL,
    rest: Codec | None = None,
    *,
    skip: Iterable[str] = ("first", "head"),
    layers: Mapping[str, float] | None = None,
    warmup: int = 0,
    norm: Literal["l1", "l2"] = "l1",
    layout: Literal["balanced", "bsr"] = "balanced",
    means: int = 0,
    sample: int = 1,
    unbiased: bool = True,
) -> BlockPruning:
    """Linear layers and convolutions keep the part `keep` of the blocks of their inputs.

    Forward is exact, and so is the gradient that flows on; the gradients of weights are computed from the blocks that
    are kept, in less time. `block` is rows by columns, or "auto": the quickest for each layer, by a short measurement.
    With `warmup` nothing is dropped before that step; `keep` may be a whole schedule, {0: 1.0, 500: 0.5, 1000: 0.1}.
    The "first" layer and the "head" are left out; `skip` may name others, and `layers` gives some a part of their own.
    `rest` treats everything else; what can be kept exactly in less is, in any case. Blocks are drawn by their norms, so
    that gradients are right on average; with `unbiased=False` the strongest are kept, as in the paper, which costs much
    more accuracy. `norm`, `layout`, `means` and `sample` are those of `Blocks`.
    """
    if type(warmup) is not int or warmup < 0 or (warmup and isinstance(keep, Mapping)):
        raise SpecError(
            "block_pruning: warmup must be a number of steps, and keep a single part with it; "
            f"found warmup={warmup!r}, keep={keep!r}"
        )
    parts = {0: 1.0, warmup: keep} if warmup and not isinstance(keep, Mapping) else keep
    shared = shared_settings(parts, skip, rest, layers)
    return BlockPruning(**shared, block=block, norm=norm, layout=layout, means=means, sample=sample, unbiased=unbiased)
