"""ResMLP (Touvron et al., 2021): no attention and no norms, only linear layers across patches and across channels.

The reference model for block pruning, as the paper writes it: S12 and S24 for images of 224x224, and a small one that
is trained on CIFAR-10 here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tasks.base import Places
from tasks.images import CLASSES, SIDE


@dataclass(frozen=True)
class Shape:
    """The sizes of a ResMLP."""

    patch: int
    width: int
    depth: int
    layer_scale: float
    """With which each branch begins: the deeper, the smaller."""
    side: int = 224
    classes: int = 1000

    @property
    def patches(self) -> int:
        return (self.side // self.patch) ** 2


S12 = Shape(patch=16, width=384, depth=12, layer_scale=0.1)
S24 = Shape(patch=16, width=384, depth=24, layer_scale=1e-5)
SMALL = Shape(patch=4, width=192, depth=6, layer_scale=0.1, side=SIDE, classes=CLASSES)


class Patches(nn.Module):
    """An image as a row of tokens."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2)


class Affine(nn.Module):
    """What stands in the place of a norm: a scale and a shift for each channel, learnt."""

    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((width,), scale))
        self.beta = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x + self.beta


class Block(nn.Module):
    """A linear layer across patches, then a perceptron across channels; each scaled before it is added."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        self.norm_patches, self.norm_channels = Affine(width), Affine(width)
        self.patches = nn.Linear(shape.patches, shape.patches)
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale_patches, self.scale_channels = Affine(width, shape.layer_scale), Affine(width, shape.layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale_patches(self.patches(self.norm_patches(x).transpose(1, 2)).transpose(1, 2))
        return x + self.scale_channels(self.channels(self.norm_channels(x)))


class ResMLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.patches = Patches(shape.patch, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.depth)))
        self.norm = Affine(shape.width)
        self.head = nn.Linear(shape.width, shape.classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(images))).mean(1))


def resmlp(places: Places) -> nn.Module:
    """The small one."""
    return ResMLP(SMALL)
