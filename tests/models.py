"""Small models that several tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import slimgrad as sg


def cnn(*, inplace: bool = False) -> nn.Sequential:
    """Convolution, norm, ReLU, max-pool, dropout: every lossless need is in it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=inplace),
        nn.MaxPool2d(2),
        nn.Dropout(0.2),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(inplace=inplace),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


class Projections(nn.Module):
    """q, k and v by three products that read one normed tensor, as Hugging Face has them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.q(x) + self.k(x) + self.v(x)


PRODUCTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(24, 40), (64, 24)),
    "linear, leading dimensions": (lambda: nn.Linear(24, 40), (2, 3, 17, 24)),
    "linear, no bias": (lambda: nn.Linear(24, 40, bias=False), (5, 60, 24)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 3, padding=1), (4, 6, 50)),
    "conv2d": (lambda: nn.Conv2d(6, 8, 3, padding=1), (4, 6, 12, 12)),
    "conv2d, groups": (lambda: nn.Conv2d(6, 12, 3, groups=3), (4, 6, 12, 12)),
    "conv2d, depthwise": (lambda: nn.Conv2d(6, 6, 3, groups=6, padding=1), (4, 6, 12, 12)),
    "conv2d, dilation and stride": (lambda: nn.Conv2d(6, 8, 3, dilation=2, stride=2, padding=2), (4, 6, 13, 13)),
    "conv2d, circular": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="circular"), (4, 6, 12, 12)),
    "conv2d, reflect": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="reflect"), (4, 6, 12, 12)),
    "conv3d": (lambda: nn.Conv3d(3, 5, 3, padding=1), (2, 3, 6, 8, 8)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(6, 8, 3, stride=2), (4, 6, 40)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(6, 8, 3, stride=2, output_padding=1), (4, 6, 10, 10)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(3, 4, 2, stride=2, groups=1), (2, 3, 5, 6, 7)),
    "Conv1D of transformers": (
        lambda: pytest.importorskip("transformers.pytorch_utils").Conv1D(40, 24),
        (3, 50, 24),
    ),
}


class Behind(nn.Module):
    """A layer behind something whose result autograd must keep for it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * 1.5)


class Twice(nn.Module):
    """One activation in two places, in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act = nn.Linear(width, width), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.act(self.up(x)) * 2.0) * 1.0


def one_backward(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the model returns, the gradient of x, and the one that was sent in; its own are in its parameters."""
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    dy = torch.linspace(-1, 1, y.numel()).view(y.shape)
    y.backward(dy)
    return y.detach(), leaf.grad, dy


def read_by(layer: nn.Module, x: Tensor) -> tuple[nn.Module, Tensor]:
    """A copy of the layer, and what its product reads of x: the padded x, where the padding is not of zeros."""
    alone = copy.deepcopy(layer)
    alone.zero_grad()
    if getattr(layer, "padding_mode", "zeros") == "zeros":
        return alone, x
    alone.padding, alone.padding_mode = (0, 0), "zeros"
    return alone, F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)


def mlp() -> nn.Sequential:
    """A first layer, one between and a head."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def step(model: nn.Module) -> list[Tensor]:
    """The gradients of `mlp` over one batch, always the same."""
    model.zero_grad()
    model(torch.randn(256, 32, generator=torch.Generator().manual_seed(0))).square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def images(batch: int = 4, *, seed: int = 0, size: int = 16) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


def gradients(model: nn.Module, forward: Callable[[nn.Module], Tensor], *, seed: int = 0) -> list[Tensor]:
    """The parameters' gradients of one step whose random draws are fixed by `seed`."""
    model.zero_grad()
    torch.manual_seed(seed)
    forward(model).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def pair(model: nn.Module, what: object | None = None) -> tuple[nn.Module, nn.Module, sg.Run]:
    """The model, a treated copy of it, and the run."""
    treated = copy.deepcopy(model)
    return model, treated, sg.apply(treated, sg.Lossless() if what is None else what, min_bytes=4096)


def hook_count(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def run_everywhere(block: nn.Module, x: Tensor, dy: Tensor) -> tuple[sg.Run, list[Tensor]]:
    """A block with a layer `up`, under autocast: as it is, checkpointed, and twice beside a gate.

    The gradient of that layer's weight is the same each time. The gate's run, and the outputs.
    """
    treated = copy.deepcopy(block)
    run = sg.apply(treated, sg.Lossless(), min_bytes=64)
    grads, outputs = [], []
    for call in (block, lambda x: checkpoint(block, x, use_reentrant=False), treated, treated):
        block.zero_grad()
        treated.zero_grad()
        with torch.autocast(x.device.type, torch.bfloat16):
            output = call(x)
        output.float().backward(dy)
        grads.append((treated if call is treated else block).up.weight.grad.clone())
        outputs.append(output)
    assert all(torch.equal(grads[0], other) for other in grads[1:])
    return run, outputs
