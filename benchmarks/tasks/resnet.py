"""ResNet-18 and ResNet-20 as they are used for CIFAR."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from tasks.base import Places
from tasks.images import CLASSES


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
    return resnet(widths=(64, 128, 256, 512), blocks=2)


def resnet20(places: Places) -> nn.Module:
    return resnet(widths=(16, 32, 64), blocks=3)


def resnet(widths: Sequence[int], blocks: int) -> nn.Module:
    """So many blocks of each width. The stem is a 3x3 convolution without pooling, because the images are small."""
    layers: list[nn.Module] = [convolution(3, widths[0], 3), nn.ReLU(inplace=True)]
    inputs = widths[0]
    for number, outputs in enumerate(widths):
        for block in range(blocks):
            layers.append(BasicBlock(inputs, outputs, stride=2 if number > 0 and block == 0 else 1))
            inputs = outputs
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model
