"""MobileNetV2 as torchvision names it, and the two networks for microcontrollers that TraDy is evaluated on.

    import mobilenets
    model = mobilenets.mobilenet_v2(data / "mobilenet_v2_imagenet.pth", classes=102)
    model = mobilenets.on_device(data / "mbv2-w0.35.npz", classes=102, last_conv=True)
    print(mobilenets.elements(model))

All of them are a Sequential `features`, a mean over the picture and a `classifier`, and say by `look` what input they
were trained on. Activations work in place as in torchvision. That is faster and saves no memory: for ReLU6 autograd
keeps a copy of the input beside the output, which the next convolution keeps.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

SIDE = 128
"""The width and height of the pictures, in pixels."""


@dataclass(frozen=True)
class Look:
    """How bytes become a model's input: (x / 255 - mean) / std."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


IMAGENET = Look((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CENTRED = Look((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class Block(nn.Module):
    """Widen, filter each channel, narrow; around it, where shapes allow, a residual connection."""

    def __init__(self, *layers: nn.Module, residual: bool) -> None:
        super().__init__()
        self.conv = nn.Sequential(*layers)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


class Classifier(nn.Module):
    """Features, their mean over the picture, and what is made of it."""

    def __init__(self, features: nn.Sequential, classifier: nn.Module, look: Look) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier
        self.look = look

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


# --- MobileNetV2 ------------------------------------------------------------------------------------------------------

STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""Widening, output channels, blocks, stride of the first block."""


class MobileNetV2(Classifier):
    """MobileNetV2 (Sandler et al., 2018) with random weights. Its parameters are named as torchvision's are."""

    def __init__(self, classes: int, width: float = 1.0, dropout: float = 0.2) -> None:
        channels, last = _scaled(32, width), _scaled(1280, max(1.0, width))
        layers: list[nn.Module] = [_normed(3, channels, 3, stride=2)]
        for widening, planned, blocks, stride in STAGES:
            wanted = _scaled(planned, width)
            for number in range(blocks):
                layers.append(_inverted(channels, wanted, widening, stride if number == 0 else 1))
                channels = wanted
        layers.append(_normed(channels, last, 1))
        head = nn.Sequential(nn.Dropout(dropout), nn.Linear(last, classes))
        super().__init__(nn.Sequential(*layers), head, IMAGENET)


def mobilenet_v2(weights: Path, classes: int) -> MobileNetV2:
    """MobileNetV2 1.0 with weights from a file in torchvision's names, and a fresh layer for new classes."""
    state = torch.load(weights, map_location="cpu", weights_only=True)
    trained_on, width = state["classifier.1.weight"].shape
    model = MobileNetV2(trained_on)
    model.load_state_dict(state)
    model.classifier[1] = nn.Linear(width, classes)
    return model


def _inverted(channels: int, wanted: int, widening: int, stride: int) -> Block:
    wide = channels * widening
    widen = [_normed(channels, wide, 1)] if widening > 1 else []
    narrow = (nn.Conv2d(wide, wanted, 1, bias=False), nn.BatchNorm2d(wanted))
    residual = stride == 1 and channels == wanted
    return Block(*widen, _normed(wide, wide, 3, stride, groups=wide), *narrow, residual=residual)


def _normed(channels: int, wanted: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(channels, wanted, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(wanted), nn.ReLU6(inplace=True))


def _scaled(channels: int, width: float) -> int:
    """The nearest multiple of eight that does not take away more than a tenth."""
    nearest = max(8, int(channels * width + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels * width else nearest + 8


# --- networks for microcontrollers ------------------------------------------------------------------------------------


class OnDevice(Classifier):
    """A network without normalization: that was folded into its convolutions."""

    def __init__(self, features: nn.Sequential, channels: int, classes: int) -> None:
        super().__init__(features, nn.Linear(channels, classes), CENTRED)


def on_device(file: Path, classes: int, last_conv: bool = False) -> OnDevice:
    """A network from its `.npz`, with a fresh layer for new classes.

    The file is of an int8 network, so that each layer comes with the range of its output. A range that begins at zero
    is a ReLU6, whatever its end: an end below six says only that nothing larger came up when the ranges were measured.
    The other ranges are left out. They are no part of what was trained, are hardly reached, and would make backward
    keep a mask where a convolution alone keeps nothing of its output.

    `last_conv` adds what the paper's networks have and the file has not: a last convolution to four times the
    channels, with random weights.
    """
    arrays = dict(np.load(file))
    meta = json.loads(arrays["meta"].tobytes())
    blocks: dict[int, list[nn.Module]] = {}
    for number, layer in enumerate(meta["layers"][:-1]):  # the last is the classifier of 1000 classes
        weights = torch.from_numpy(arrays[f"w{number}"]), torch.from_numpy(arrays[f"b{number}"])
        blocks.setdefault(layer["block"], []).extend(_layers(layer, *weights))
    features = [nn.Sequential(*blocks.pop(-1))]
    features += [Block(*blocks[number], residual=meta["residual"][number]) for number in sorted(blocks)]
    channels = meta["layers"][-1]["in_channels"]
    if last_conv:
        features.append(nn.Sequential(nn.Conv2d(channels, 4 * channels, 1), nn.ReLU6(inplace=True)))
        channels *= 4
    return OnDevice(nn.Sequential(*features), channels, classes)


def _layers(layer: dict[str, Any], weight: Tensor, bias: Tensor) -> Sequence[nn.Module]:
    named = ("in_channels", "out_channels", "stride", "padding", "groups")
    conv = nn.Conv2d(kernel_size=layer["kernel"], **{name: layer[name] for name in named})
    with torch.no_grad():
        conv.weight.copy_(weight)
        conv.bias.copy_(bias)
    return (conv, nn.ReLU6(inplace=True)) if layer["clamp"][0] == 0 else (conv,)


# --- size as the paper counts it --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elements:
    """The elements of all convolutions of a network: of their weights, and of their inputs for one picture."""

    convolutions: int
    weights: int
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.activations


def elements(model: nn.Module, side: int = SIDE) -> Elements:
    """Count them, by way of one picture through a copy of the model."""
    counted: list[tuple[int, int]] = []
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(
                lambda conv, inputs, _: counted.append((conv.weight.numel(), inputs[0].numel()))
            )
    with torch.no_grad():
        model(torch.zeros(1, 3, side, side))
    weights, activations = (sum(column) for column in zip(*counted, strict=True))
    return Elements(len(counted), weights, activations)
