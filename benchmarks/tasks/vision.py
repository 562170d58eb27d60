"""The image models that are no transformers: ResNet-18 as it is used for CIFAR, and a small ResMLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tasks.base import Places
from tasks.images import CLASSES, SIDE

# --- ResNet-18 --------------------------------------------------------------------------------------------------------

RESNET_WIDTHS = (64, 128, 256, 512)
RESNET_BLOCKS = 2


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, outputs, 3, stride)
        self.second = convolution(outputs, outputs, 3)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else convolution(inputs, outputs, 1, stride)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))) + self.shortcut(x))


def resnet18(places: Places) -> nn.Module:
    """The stem is a 3x3 convolution without pooling, because the images are small."""
    layers: list[nn.Module] = [convolution(3, RESNET_WIDTHS[0], 3), nn.ReLU(inplace=True)]
    inputs = RESNET_WIDTHS[0]
    for number, outputs in enumerate(RESNET_WIDTHS):
        for block in range(RESNET_BLOCKS):
            layers.append(BasicBlock(inputs, outputs, stride=2 if number > 0 and block == 0 else 1))
            inputs = outputs
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


# --- ResMLP -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ResMLPShape:
    patch: int
    width: int
    depth: int
    layer_scale: float


RESMLP = ResMLPShape(patch=4, width=192, depth=6, layer_scale=0.1)


class Patches(nn.Module):
    """An image as a row of tokens."""

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.count = (SIDE // patch) ** 2
        self.project = nn.Conv2d(3, width, patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        return self.project(images).flatten(2).transpose(1, 2)


class Affine(nn.Module):
    def __init__(self, width: int, scale: float = 1.0) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full((width,), scale))
        self.beta = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.alpha * x + self.beta


class ResMLPBlock(nn.Module):
    """A linear layer across patches, then a perceptron across channels; each scaled before it is added."""

    def __init__(self, patches: int, shape: ResMLPShape) -> None:
        super().__init__()
        width = shape.width
        self.norm_patches, self.norm_channels = Affine(width), Affine(width)
        self.patches = nn.Linear(patches, patches)
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale_patches, self.scale_channels = Affine(width, shape.layer_scale), Affine(width, shape.layer_scale)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale_patches(self.patches(self.norm_patches(x).transpose(1, 2)).transpose(1, 2))
        return x + self.scale_channels(self.channels(self.norm_channels(x)))


class ResMLP(nn.Module):
    def __init__(self, shape: ResMLPShape) -> None:
        super().__init__()
        self.patches = Patches(shape.patch, shape.width)
        self.blocks = nn.Sequential(*(ResMLPBlock(self.patches.count, shape) for _ in range(shape.depth)))
        self.norm = Affine(shape.width)
        self.head = nn.Linear(shape.width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.patches(images))).mean(1))


def resmlp(places: Places) -> nn.Module:
    return ResMLP(RESMLP)
