"""VGG-16 (configuration D) as it is used for CIFAR: BatchNorm after each convolution, and one linear head."""

from __future__ import annotations

from torch import nn

from tasks.base import Places
from tasks.images import CLASSES
from tasks.resnet import convolution

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
"""Channels and convolutions of each, before a pooling that halves the sides: 32 become 1."""


def vgg16(places: Places) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for outputs, convolutions in STAGES:
        for _ in range(convolutions):
            layers += [convolution(inputs, outputs, 3), nn.ReLU(inplace=True)]
            inputs = outputs
        layers.append(nn.MaxPool2d(2))
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs, CLASSES))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
