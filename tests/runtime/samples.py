"""One small call of torch per row of the needs table, for tests that look at what a backward node saves.

`SAMPLES` is the table: each entry calls one op on inputs that are the same every time. `CUDA_SAMPLES` holds the calls
that only a GPU can make. A sample named "... nasty" feeds the values at which comparisons differ: zeros of both signs,
the exact bounds and their neighbours, infinities and NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
WITHOUT_HALF = (torch.float32, torch.bfloat16, torch.float64)
FULL = (torch.float32, torch.float64)
"""For ops that have no low-precision kernel on a CPU."""

INF, NAN = float("inf"), float("nan")

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float64: torch.int64}
"""The integers under which floats are compared bit for bit."""

REPEATS = 65
"""How often nasty values are repeated: each meets every lane of a CPU's vectors, and the scalar tail behind them."""


class Inputs:
    """Makes the inputs of one call on a device; the same calls in the same order give the same values."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator().manual_seed(7)

    def frozen(self, *shape: int, like: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Halves between -4 and 4: they hit the bounds of many functions, and their sums are exact."""
        x = torch.randint(-8, 9, shape, generator=self.generator) / 2
        return x.to(self.device, self.dtype).contiguous(memory_format=like)

    def leaf(self, *shape: int, like: torch.memory_format = torch.contiguous_format) -> Tensor:
        """Trainable, as a parameter or an input that wants its gradient."""
        return self.frozen(*shape, like=like).requires_grad_()

    def made(self, *shape: int, like: torch.memory_format = torch.contiguous_format) -> Tensor:
        """An activation: it requires grad and is no leaf, so that it may be changed in place."""
        return self.leaf(*shape, like=like) * 1

    def smooth(self, *shape: int) -> Tensor:
        """As `leaf`, with values strictly between 0 and 1."""
        x = torch.rand(shape, generator=self.generator) * 0.75 + 0.125
        return x.to(self.device, self.dtype).requires_grad_()

    def integers(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def mask(self, *shape: int) -> Tensor:
        return self.integers(2, *shape).bool()

    def nasty(self, *bounds: float, nan: bool = True) -> Tensor:
        """A trainable vector of all the values at which comparisons with `bounds` may differ."""
        near = [value for bound in bounds for value in self.around(bound)]
        values = [0.0, -0.0, *near, INF, -INF, 1.5, -2.5, *([NAN] if nan else [])]
        assert len(values) < 16  # or the tail behind the vectors would not see them all
        return torch.tensor(values * REPEATS, dtype=self.dtype, device=self.device).requires_grad_()

    def contested(self, *bounds: float) -> Tensor:
        """As `nasty`, without NaN on a CPU: there stock backward blocks NaN in its vectors, not in the tail behind."""
        return self.nasty(*bounds, nan=self.device.type == "cuda")

    def around(self, bound: float) -> list[float]:
        """The bound and its two neighbours in this dtype."""
        if bound == 0:
            tiny = torch.finfo(self.dtype).tiny
            return [bound, tiny, -tiny]
        bits = torch.tensor(bound, dtype=self.dtype).view(BITS[self.dtype])
        return [(bits + step).view(self.dtype).item() for step in (-1, 0, 1)]


Call = Callable[[Inputs], "Tensor | tuple[Tensor, ...]"]


@dataclass(frozen=True)
class Sample:
    """One call of one op."""

    name: str
    call: Call
    dtypes: Sequence[torch.dtype] = DTYPES
    """Dtypes in which a CPU has kernels for it."""
    module: nn.Module | None = None
    """The module inside whose forward the call stands, where that matters."""
    gradient: tuple[float, ...] = (1.0, -2.0, 3.0, -1.0, 2.0)
    """What arrives from behind, over and over. Sums of small integers are exact, so their order does not matter."""

    def run(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The op's differentiable outputs."""
        torch.manual_seed(11)
        out = self.call(Inputs(device, dtype))
        outs = out if isinstance(out, tuple) else (out,)
        return tuple(x for x in outs if x.requires_grad)

    def arriving(self, out: Tensor) -> Tensor:
        """The gradient with which backward starts."""
        pattern = torch.tensor(self.gradient, dtype=out.dtype, device=out.device)
        return pattern.repeat(out.numel() // len(pattern) + 1)[: out.numel()].view(out.shape)

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


NASTY_GRADIENT = (1.0, -2.0, INF, 3.0, -INF, -0.0, NAN)

LAST2, LAST3 = torch.channels_last, torch.channels_last_3d

# --- products -------------------------------------------------------------------------------------------------------

PRODUCTS = [
    Sample("linear 2d", lambda i: F.linear(i.made(5, 4), i.leaf(3, 4), i.leaf(3))),
    Sample("linear 2d no bias", lambda i: F.linear(i.made(5, 4), i.leaf(3, 4))),
    Sample("linear 3d", lambda i: F.linear(i.made(2, 5, 4), i.leaf(3, 4), i.leaf(3))),
    Sample("linear 3d no bias", lambda i: F.linear(i.made(2, 5, 4), i.leaf(3, 4))),
    Sample("linear frozen weight", lambda i: F.linear(i.made(5, 4), i.frozen(3, 4), i.leaf(3))),
    Sample("linear input without grad", lambda i: F.linear(i.frozen(5, 4), i.leaf(3, 4), i.leaf(3))),
    Sample("mm of activations", lambda i: i.made(5, 4) @ i.made(4, 3)),
    Sample("bmm of activations", lambda i: torch.bmm(i.made(2, 5, 4), i.made(2, 4, 3))),
    Sample("matmul 4d of activations", lambda i: i.made(2, 2, 5, 4) @ i.made(2, 2, 4, 3)),
    Sample("baddbmm", lambda i: torch.baddbmm(i.made(2, 5, 3), i.made(2, 5, 4), i.leaf(2, 4, 3))),
    Sample("addbmm", lambda i: torch.addbmm(i.made(5, 3), i.made(2, 5, 4), i.leaf(2, 4, 3))),
    Sample("mv", lambda i: torch.mv(i.made(5, 4), i.leaf(4))),
    Sample("addmv", lambda i: torch.addmv(i.made(5), i.made(5, 4), i.leaf(4))),
    Sample("dot", lambda i: torch.dot(i.made(6), i.leaf(6))),
    Sample("bilinear", lambda i: F.bilinear(i.made(5, 4), i.made(5, 3), i.leaf(2, 4, 3))),
]


def convolutions() -> list[Sample]:
    found = []
    shapes = {1: (2, 4, 9), 2: (2, 4, 6, 5), 3: (1, 4, 4, 5, 4)}
    plain = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
    transposed = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
    for rank, shape in shapes.items():
        for kind, conv in ((f"conv{rank}d", plain[rank]), (f"conv transpose{rank}d", transposed[rank])):
            weight = (4, 4, *[3] * rank)
            found += [
                Sample(kind, lambda i, c=conv, s=shape, w=weight: c(i.made(*s), i.leaf(*w), i.leaf(4), padding=1)),
                Sample(f"{kind} frozen weight", lambda i, c=conv, s=shape, w=weight: c(i.made(*s), i.frozen(*w))),
                Sample(
                    f"{kind} frozen weight trainable bias",
                    lambda i, c=conv, s=shape, w=weight: c(i.made(*s), i.frozen(*w), i.leaf(4), stride=2),
                ),
                Sample(
                    f"{kind} input without grad",
                    lambda i, c=conv, s=shape, w=weight: c(i.frozen(*s), i.leaf(*w), i.leaf(4)),
                ),
            ]
    for rank, like in ((2, LAST2), (3, LAST3)):
        for kind, conv in ((f"conv{rank}d", plain[rank]), (f"conv transpose{rank}d", transposed[rank])):
            shape, weight = shapes[rank], (4, 4, *[3] * rank)
            found.append(
                Sample(
                    f"{kind} frozen weight channels last",
                    lambda i, c=conv, s=shape, w=weight, m=like: c(i.made(*s, like=m), i.frozen(*w, like=m)),
                )
            )
    return found


PLAIN_CONV = ((0, 0), (1, 1), (1, 1))
"""No padding, stride 1, no dilation."""


def script_conv(x: Tensor, weight: Tensor) -> Tensor:
    """A convolution as TorchScript writes it, with all that is global elsewhere."""
    padding, stride, dilation = PLAIN_CONV
    return torch._convolution(x, weight, None, stride, padding, dilation, False, (0, 0), 1, False, False, True, True)


CONVOLUTIONS = [
    *convolutions(),
    Sample("conv2d channels last", lambda i: F.conv2d(i.made(2, 4, 6, 5, like=LAST2), i.leaf(4, 4, 3, 3))),
    Sample("conv2d computed weight", lambda i: F.conv2d(i.made(2, 4, 6, 5), i.made(4, 4, 3, 3))),
    Sample("conv2d unbatched frozen weight", lambda i: F.conv2d(i.made(4, 6, 5), i.frozen(4, 4, 3, 3))),
    Sample("conv2d grouped frozen weight", lambda i: F.conv2d(i.made(2, 4, 6, 5), i.frozen(4, 1, 3, 3), groups=4)),
    Sample("conv2d dilated frozen weight", lambda i: F.conv2d(i.made(2, 4, 6, 6), i.frozen(4, 4, 3, 3), dilation=2)),
    Sample("conv2d 1x1 frozen weight", lambda i: F.conv2d(i.made(2, 4, 6, 5), i.frozen(3, 4, 1, 1))),
    Sample("conv2d larger frozen weight", lambda i: F.conv2d(i.made(2, 16, 12, 12), i.frozen(32, 16, 3, 3))),
    Sample("script convolution frozen weight", lambda i: script_conv(i.made(2, 4, 6, 5), i.frozen(4, 4, 3, 3))),
    Sample("script convolution input without grad", lambda i: script_conv(i.frozen(2, 4, 6, 5), i.leaf(4, 4, 3, 3))),
    Sample("conv tbc", lambda i: torch.conv_tbc(i.made(6, 2, 4), i.leaf(3, 4, 5), i.leaf(5))),
]

CPU_SAMPLES = (
    Sample(
        "mkldnn convolution frozen weight",
        lambda i: torch.mkldnn_convolution(i.made(2, 4, 6, 5), i.frozen(4, 4, 3, 3), None, *PLAIN_CONV, 1),
        FULL[:1],
    ),
    Sample(
        "mkldnn convolution input without grad",
        lambda i: torch.mkldnn_convolution(i.frozen(2, 4, 6, 5), i.leaf(4, 4, 3, 3), None, *PLAIN_CONV, 1),
        FULL[:1],
    ),
)
"""Calls that only a CPU can make."""

# --- functions whose backward reads one bit -------------------------------------------------------------------------

ONE_BIT = [
    Sample("relu", lambda i: F.relu(i.made(3, 5, 7))),
    Sample("relu nasty", lambda i: F.relu(i.nasty(0.0))),
    Sample("relu in place", lambda i: F.relu_(i.made(3, 5, 7))),
    Sample("relu channels last", lambda i: F.relu(i.made(2, 3, 4, 5, like=LAST2))),
    Sample("relu of a transposed", lambda i: F.relu(i.made(5, 7).t())),
    Sample("relu of an expanded", lambda i: F.relu(i.made(5, 1).expand(5, 7))),
    Sample("relu of every other column", lambda i: F.relu(i.made(5, 14)[:, ::2])),
    Sample("relu of nothing", lambda i: F.relu(i.made(0, 3))),
    Sample("relu of a scalar", lambda i: F.relu(i.made())),
    Sample("relu6", lambda i: F.relu6(i.made(3, 5, 7) * 2)),
    Sample("relu6 nasty", lambda i: F.relu6(i.contested(0.0, 6.0))),
    Sample("relu6 in place", lambda i: F.relu6(i.made(3, 5, 7) * 2, inplace=True)),
    Sample("leaky relu", lambda i: F.leaky_relu(i.made(3, 5, 7))),
    Sample("leaky relu slope 0.2 nasty", lambda i: F.leaky_relu(i.nasty(0.0), 0.2)),
    Sample("leaky relu slope -0.5 nasty", lambda i: F.leaky_relu(i.nasty(0.0), -0.5)),
    Sample("leaky relu slope 0 nasty", lambda i: F.leaky_relu(i.nasty(0.0), 0.0)),
    Sample("leaky relu in place", lambda i: F.leaky_relu_(i.made(3, 5, 7), 0.3)),
    Sample("leaky relu in place nasty", lambda i: F.leaky_relu_(i.nasty(0.0) * 1, 0.3)),
    Sample("leaky relu in place slope 0 nasty", lambda i: F.leaky_relu_(i.nasty(0.0) * 1, 0.0)),
    Sample("threshold 0.25", lambda i: F.threshold(i.made(3, 5, 7) / 2, 0.25, 20.0)),
    Sample("threshold 0.25 nasty", lambda i: F.threshold(i.nasty(0.25), 0.25, 20.0)),
    Sample("threshold -2 nasty", lambda i: F.threshold(i.nasty(-2.0), -2.0, 0.5)),
    Sample("threshold 0.25 in place nasty", lambda i: F.threshold_(i.nasty(0.25) * 1, 0.25, 20.0)),
    Sample("threshold 0.1", lambda i: F.threshold(i.made(3, 5, 7), 0.1, 20.0)),  # no dtype holds 0.1
    Sample("hardtanh", lambda i: F.hardtanh(i.made(3, 5, 7))),
    Sample("hardtanh -0.5 2", lambda i: F.hardtanh(i.made(3, 5, 7), -0.5, 2.0)),
    Sample("hardtanh -0.5 2 nasty", lambda i: F.hardtanh(i.contested(-0.5, 2.0), -0.5, 2.0)),
    Sample("hardtanh -0.5 2 in place", lambda i: F.hardtanh_(i.made(3, 5, 7), -0.5, 2.0)),
    Sample("hardtanh -0.1 0.1", lambda i: F.hardtanh(i.made(3, 5, 7), -0.1, 0.1)),
    Sample("hardsigmoid", lambda i: F.hardsigmoid(i.made(3, 5, 7))),
    Sample("hardsigmoid nasty", lambda i: F.hardsigmoid(i.nasty(-3.0, 3.0))),
    Sample("hardsigmoid in place nasty", lambda i: F.hardsigmoid(i.nasty(-3.0, 3.0) * 1, inplace=True)),
    Sample("hardshrink", lambda i: F.hardshrink(i.made(3, 5, 7))),
    Sample("hardshrink 1.5 nasty", lambda i: F.hardshrink(i.contested(-1.5, 1.5), 1.5)),
    Sample("hardshrink 0 nasty", lambda i: F.hardshrink(i.contested(0.0), 0.0)),
    Sample("softshrink", lambda i: F.softshrink(i.made(3, 5, 7))),
    Sample("softshrink 1.5 nasty", lambda i: F.softshrink(i.contested(-1.5, 1.5), 1.5)),
    Sample("prelu trainable slope", lambda i: F.prelu(i.made(3, 5, 7), i.leaf(5))),
    Sample("prelu frozen slope", lambda i: F.prelu(i.made(3, 5, 7), i.frozen(5))),
    Sample("prelu frozen single slope", lambda i: F.prelu(i.made(3, 5, 7), i.frozen(1))),
    Sample("prelu frozen slope nasty", lambda i: F.prelu(i.nasty(0.0).view(5, -1), i.frozen(1) - 0.25)),
    Sample("prelu frozen infinite slope nasty", lambda i: F.prelu(i.nasty(0.0).view(5, -1), i.frozen(1) * INF)),
    Sample("rrelu training", lambda i: F.rrelu(i.made(3, 5, 7), 0.1, 0.5, training=True), WITHOUT_HALF),
    Sample("rrelu training nasty", lambda i: F.rrelu(i.nasty(0.0), 0.1, 0.5, training=True), WITHOUT_HALF),
    Sample("rrelu training one slope nasty", lambda i: F.rrelu(i.nasty(0.0), 0.25, 0.25, training=True), WITHOUT_HALF),
    Sample("rrelu eval", lambda i: F.rrelu(i.made(3, 5, 7), 0.1, 0.5, training=False)),
    Sample("rrelu eval nasty", lambda i: F.rrelu(i.nasty(0.0), 0.1, 0.5, training=False)),
    Sample("rrelu in place", lambda i: F.rrelu_(i.made(3, 5, 7), 0.1, 0.5, training=True), WITHOUT_HALF),
    Sample("clamp", lambda i: i.made(3, 5, 7).clamp(-1, 2)),
    Sample("clamp nasty", lambda i: i.nasty(-1.0, 2.0).clamp(-1, 2)),
    Sample("clamp to one value nasty", lambda i: i.nasty(2.0).clamp(2, 2)),
    Sample("clamp min after max nasty", lambda i: i.nasty(-1.0, 2.0).clamp(2, -1)),
    Sample("clamp min only nasty", lambda i: i.nasty(0.5).clamp(min=0.5)),
    Sample("clamp max only nasty", lambda i: i.nasty(-0.5).clamp(max=-0.5)),
    Sample("clamp to infinity nasty", lambda i: i.nasty(0.5).clamp(0.5, INF)),
    Sample("clamp from infinity nasty", lambda i: i.nasty(0.5).clamp(-INF, 0.5)),
    Sample("clamp to NaN nasty", lambda i: i.nasty(0.5).clamp(max=NAN)),
    Sample("clamp 0.1", lambda i: i.nasty(0.1).clamp(-0.1, 0.1)),
    Sample("clamp in place", lambda i: i.made(3, 5, 7).clamp_(-1, 2)),
    Sample("clamp_min nasty", lambda i: i.nasty(0.5).clamp_min(0.5)),
    Sample("clamp_min in place", lambda i: i.made(3, 5, 7).clamp_min_(0.5)),
    Sample("clamp_max nasty", lambda i: i.nasty(0.5).clamp_max(0.5)),
    Sample("dropout function", lambda i: F.dropout(i.made(3, 5, 7), 0.3)),
    Sample("dropout module", lambda i: nn.Dropout(0.3)(i.made(3, 5, 7)), module=nn.Dropout(0.3)),
    Sample("dropout module half", lambda i: nn.Dropout(0.5)(i.made(3, 5, 7)), module=nn.Dropout(0.5)),
    Sample("dropout module all", lambda i: nn.Dropout(1.0)(i.made(3, 5, 7)), module=nn.Dropout(1.0)),
    Sample("dropout module in place", lambda i: nn.Dropout(0.3, True)(i.made(3, 5, 7)), module=nn.Dropout(0.3)),
    Sample("dropout module of one", lambda i: nn.Dropout(0.9)(i.made(1)), module=nn.Dropout(0.9)),
    Sample("native dropout", lambda i: torch.native_dropout(i.made(3, 5, 7), 0.3, True)),
    Sample("native dropout all", lambda i: torch.native_dropout(i.made(3, 5, 7), 1.0, True)),
    Sample("native dropout eval", lambda i: torch.native_dropout(i.made(3, 5, 7), 0.3, False)),
    Sample("alpha dropout", lambda i: F.alpha_dropout(i.made(3, 5, 7), 0.3, training=True)),
    Sample("feature dropout", lambda i: F.dropout2d(i.made(3, 5, 7, 2), 0.3)),
    Sample("where", lambda i: torch.where(i.mask(3, 5, 7), i.made(3, 5, 7), i.made(3, 5, 7))),
    Sample("where broadcast", lambda i: torch.where(i.mask(5, 1), i.made(3, 1, 7), i.made(1, 5, 7))),
    Sample("where of an expanded mask", lambda i: torch.where(i.mask(5, 1).expand(5, 7), i.made(5, 7), 0.0)),
    Sample("masked_fill", lambda i: i.made(3, 5, 7).masked_fill(i.mask(3, 5, 7), -INF)),
    Sample("masked_fill broadcast", lambda i: i.made(3, 5, 7).masked_fill(i.mask(5, 7), 0.5)),
    Sample("masked_fill by a tensor", lambda i: i.made(3, 5, 7).masked_fill(i.mask(3, 5, 7), i.leaf())),
    Sample("masked_fill in place", lambda i: i.made(3, 5, 7).masked_fill_(i.mask(3, 5, 7), 2.0)),
    Sample("masked_select", lambda i: i.made(3, 5, 7).masked_select(i.mask(3, 5, 7))),
    Sample("masked_select broadcast", lambda i: i.made(3, 5, 7).masked_select(i.mask(5, 1))),
    Sample("masked_select broadcast input", lambda i: i.made(5, 1).masked_select(i.mask(5, 7))),
    Sample("masked_scatter", lambda i: i.made(3, 5, 7).masked_scatter(i.mask(3, 5, 7), i.made(105))),
]


def nasty_gradients(samples: Sequence[Sample]) -> list[Sample]:
    """The nasty ones again, with infinities and NaN in the gradient too."""
    nasty = [sample for sample in samples if sample.name.endswith("nasty")]
    return [replace(sample, name=f"{sample.name} gradient", gradient=NASTY_GRADIENT) for sample in nasty]


# --- functions whose backward reads f'(x) ---------------------------------------------------------------------------

SMOOTH = [
    Sample("gelu", lambda i: F.gelu(i.made(3, 5, 7))),
    Sample("gelu tanh", lambda i: F.gelu(i.made(3, 5, 7), approximate="tanh")),
    Sample("silu", lambda i: F.silu(i.made(3, 5, 7))),
    Sample("silu in place", lambda i: F.silu(i.made(3, 5, 7), inplace=True)),
    Sample("mish", lambda i: F.mish(i.made(3, 5, 7))),
    Sample("hardswish", lambda i: F.hardswish(i.made(3, 5, 7))),
    Sample("softplus", lambda i: F.softplus(i.made(3, 5, 7), 2.0, 5.0)),
    Sample("elu", lambda i: F.elu(i.made(3, 5, 7), 0.5)),
    Sample("elu in place", lambda i: F.elu_(i.made(3, 5, 7), 0.5)),
    Sample("selu", lambda i: F.selu(i.made(3, 5, 7))),
    Sample("selu in place", lambda i: F.selu_(i.made(3, 5, 7))),
    Sample("celu", lambda i: F.celu(i.made(3, 5, 7), 2.0)),
    Sample("celu in place", lambda i: F.celu_(i.made(3, 5, 7), 2.0)),
    Sample("logsigmoid", lambda i: F.logsigmoid(i.made(3, 5, 7))),
    Sample("sigmoid", lambda i: F.sigmoid(i.made(3, 5, 7))),
    Sample("tanh", lambda i: F.tanh(i.made(3, 5, 7))),
    Sample("tanhshrink", lambda i: F.tanhshrink(i.made(3, 5, 7))),
    Sample("softsign", lambda i: F.softsign(i.made(3, 5, 7))),
    Sample("glu", lambda i: F.glu(i.made(3, 8))),
]

# --- pooling --------------------------------------------------------------------------------------------------------


def holes(x: Tensor) -> Tensor:
    """Windows full of -inf, some NaN, some ties: what decides which element of a window wins."""
    flat = x.detach().clone(memory_format=torch.preserve_format)
    flat[..., :2, :] = -INF
    flat[..., -1, -1] = NAN
    flat[..., -1, 0] = INF
    return flat.requires_grad_() * 1


def void(x: Tensor) -> Tensor:
    """Nothing but -inf: no element of a window is larger than what the search starts with."""
    return torch.full_like(x, -INF).requires_grad_() * 1


POOLS = [
    Sample("max pool1d", lambda i: F.max_pool1d(i.made(2, 3, 9), 3, 2, 1)),
    Sample("max pool1d unbatched", lambda i: F.max_pool1d(i.made(3, 9), 2)),
    Sample("max pool1d dilated ceil", lambda i: F.max_pool1d(i.made(2, 3, 10), 3, 2, 1, 2, ceil_mode=True)),
    Sample("max pool2d", lambda i: F.max_pool2d(i.made(2, 3, 8, 6), 2)),
    Sample("max pool2d overlapping", lambda i: F.max_pool2d(i.made(2, 3, 9, 8), 3, 2, 1)),
    Sample("max pool2d oblong", lambda i: F.max_pool2d(i.made(2, 3, 9, 8), (3, 2), (2, 1), (1, 0))),
    Sample("max pool2d dilated", lambda i: F.max_pool2d(i.made(2, 3, 9, 8), 2, 2, 1, 2)),
    Sample("max pool2d ceil", lambda i: F.max_pool2d(i.made(2, 3, 9, 8), 3, 2, 1, ceil_mode=True)),
    Sample("max pool2d unbatched", lambda i: F.max_pool2d(i.made(3, 8, 6), 2)),
    Sample("max pool2d channels last", lambda i: F.max_pool2d(i.made(2, 3, 9, 8, like=LAST2), 3, 2, 1)),
    Sample("max pool2d one channel", lambda i: F.max_pool2d(i.made(2, 1, 9, 8, like=LAST2), 3, 2, 1)),
    Sample("max pool2d of a transposed", lambda i: F.max_pool2d(i.made(2, 3, 8, 9).transpose(2, 3), 3, 2, 1)),
    Sample("max pool2d of an expanded", lambda i: F.max_pool2d(i.made(2, 1, 9, 8).expand(2, 3, 9, 8), 3, 2, 1)),
    Sample("max pool2d nasty", lambda i: F.max_pool2d(holes(i.leaf(2, 3, 9, 8)), 3, 2, 1)),
    Sample("max pool2d channels last nasty", lambda i: F.max_pool2d(holes(i.leaf(2, 3, 9, 8, like=LAST2)), 3, 2, 1)),
    Sample("max pool2d of -inf", lambda i: F.max_pool2d(void(i.leaf(1, 2, 12, 12)), 3, 2, 1)),
    Sample("max pool2d channels last of -inf", lambda i: F.max_pool2d(void(i.leaf(1, 2, 96, 96, like=LAST2)), 3, 2, 1)),
    Sample("max pool2d dilated nasty", lambda i: F.max_pool2d(holes(i.leaf(2, 3, 9, 8)), 2, 2, 1, 2)),
    Sample("max pool2d window of 255", lambda i: F.max_pool2d(i.made(1, 2, 33, 33), (15, 17), 8)),
    Sample("max pool2d window of 256", lambda i: F.max_pool2d(i.made(1, 2, 33, 33), 16, 8)),
    Sample("max pool2d window of 272", lambda i: F.max_pool2d(i.made(1, 2, 34, 34), (17, 16), 8)),
    Sample("max pool2d with indices", lambda i: F.max_pool2d(i.made(2, 3, 8, 6), 2, return_indices=True)),
    Sample("max pool3d", lambda i: F.max_pool3d(i.made(2, 3, 6, 4, 5), 2)),
    Sample("max pool3d overlapping", lambda i: F.max_pool3d(i.made(2, 3, 6, 5, 5), 3, 2, 1)),
    Sample("max pool3d dilated ceil", lambda i: F.max_pool3d(i.made(2, 3, 6, 7, 6), 2, 2, 1, 2, ceil_mode=True)),
    Sample("max pool3d unbatched", lambda i: F.max_pool3d(i.made(3, 6, 4, 5), (2, 1, 2))),
    Sample("max pool3d channels last", lambda i: F.max_pool3d(i.made(2, 3, 6, 5, 5, like=LAST3), 3, 2, 1)),
    Sample("max pool3d of -inf", lambda i: F.max_pool3d(void(i.leaf(1, 2, 6, 6, 6)), 3, 2, 1)),
    Sample("max pool3d nasty", lambda i: F.max_pool3d(holes(i.leaf(2, 3, 6, 5, 5)), 3, 2, 1)),
    Sample("adaptive max pool1d", lambda i: F.adaptive_max_pool1d(i.made(2, 3, 9), 4)),
    Sample("adaptive max pool2d", lambda i: F.adaptive_max_pool2d(i.made(2, 3, 9, 8), (4, 3))),
    Sample("adaptive max pool2d channels last", lambda i: F.adaptive_max_pool2d(i.made(2, 3, 9, 8, like=LAST2), 3)),
    Sample("adaptive max pool2d unbatched", lambda i: F.adaptive_max_pool2d(i.made(3, 20, 20), 4)),
    Sample("adaptive max pool2d nasty", lambda i: F.adaptive_max_pool2d(holes(i.leaf(2, 3, 9, 8)), 4)),
    Sample("adaptive max pool2d of -inf", lambda i: F.adaptive_max_pool2d(void(i.leaf(1, 2, 12, 12)), 4)),
    Sample("adaptive max pool3d", lambda i: F.adaptive_max_pool3d(i.made(2, 3, 6, 5, 4), 2)),
    Sample("adaptive max pool3d unbatched", lambda i: F.adaptive_max_pool3d(i.made(3, 8, 8, 8), 2)),
    Sample("adaptive max pool3d nasty", lambda i: F.adaptive_max_pool3d(holes(i.leaf(2, 3, 6, 5, 4)), (3, 4, 2))),
    Sample("fractional max pool2d", lambda i: F.fractional_max_pool2d(i.made(2, 3, 9, 8), 2, (4, 4))),
    Sample("fractional max pool2d unbatched", lambda i: F.fractional_max_pool2d(i.made(3, 9, 8), 2, 4)),
    Sample("fractional max pool2d nasty", lambda i: F.fractional_max_pool2d(holes(i.leaf(2, 3, 9, 8)), 2, 4)),
    Sample("fractional max pool3d", lambda i: F.fractional_max_pool3d(i.made(2, 3, 6, 6, 5), 2, 3)),
    Sample("fractional max pool3d nasty", lambda i: F.fractional_max_pool3d(holes(i.leaf(2, 3, 6, 6, 5)), 2, 3)),
    Sample("reflection pad1d", lambda i: F.pad(i.made(2, 3, 9), (2, 1), mode="reflect")),
    Sample("reflection pad2d", lambda i: F.pad(i.made(2, 3, 6, 5), (2, 1, 1, 3), mode="reflect")),
    Sample("reflection pad3d", lambda i: F.pad(i.made(2, 3, 4, 4, 5), (2, 1, 1, 3, 1, 1), mode="reflect")),
    Sample("replication pad1d", lambda i: F.pad(i.made(2, 3, 9), (2, 1), mode="replicate")),
    Sample("replication pad2d", lambda i: F.pad(i.made(2, 3, 6, 5), (2, 1, 1, 3), mode="replicate")),
    Sample("replication pad3d", lambda i: F.pad(i.made(2, 3, 4, 4, 5), (2, 1, 1, 3, 1, 1), mode="replicate")),
    Sample("avg pool1d", lambda i: F.avg_pool1d(i.made(2, 3, 9), 3, 2, 1)),
    Sample("avg pool2d", lambda i: F.avg_pool2d(i.made(2, 3, 8, 6), 2)),
    Sample("avg pool2d padded", lambda i: F.avg_pool2d(i.made(2, 3, 9, 8), 4, 2, 1, True, False)),
    Sample("avg pool2d channels last", lambda i: F.avg_pool2d(i.made(2, 3, 8, 6, like=LAST2), 2)),
    Sample("avg pool2d unbatched", lambda i: F.avg_pool2d(i.made(3, 8, 6), 2, divisor_override=8)),
    Sample("avg pool3d", lambda i: F.avg_pool3d(i.made(2, 3, 6, 4, 4), 2), FULL),
    Sample("avg pool3d padded", lambda i: F.avg_pool3d(i.made(2, 3, 6, 5, 5), 2, 2, 1, True, False), FULL),
    Sample("avg pool3d channels last", lambda i: F.avg_pool3d(i.made(2, 3, 6, 4, 4, like=LAST3), 2), FULL),
    Sample("adaptive avg pool1d", lambda i: F.adaptive_avg_pool1d(i.made(2, 3, 8), 2)),
    Sample("adaptive avg pool2d", lambda i: F.adaptive_avg_pool2d(i.made(2, 3, 8, 8), 4)),
    Sample("adaptive avg pool2d to one", lambda i: F.adaptive_avg_pool2d(i.made(2, 3, 8, 8), 1)),
    Sample("adaptive avg pool2d channels last", lambda i: F.adaptive_avg_pool2d(i.made(2, 3, 8, 8, like=LAST2), 4)),
    Sample("adaptive avg pool2d unbatched", lambda i: F.adaptive_avg_pool2d(i.made(3, 8, 8), 2)),
    Sample("adaptive avg pool3d", lambda i: F.adaptive_avg_pool3d(i.made(2, 3, 4, 4, 8), 2)),
]

# --- norms ----------------------------------------------------------------------------------------------------------


def batch_norm(
    i: Inputs,
    *,
    training: bool,
    weight: str | None,
    bias: str | None,
    shape: tuple[int, ...] = (4, 3, 5, 6),
    like: torch.memory_format = torch.contiguous_format,
) -> Tensor:
    """Batch norm with "leaf", "frozen" or no weight and bias."""
    affine = [None if kind is None else getattr(i, kind)(shape[1]) for kind in (weight, bias)]
    mean, var = i.frozen(shape[1]), i.frozen(shape[1]).abs() + 0.5
    return F.batch_norm(i.made(*shape, like=like), mean, var, *affine, training=training)


def batch_norms() -> list[Sample]:
    found = []
    for training in (True, False):
        for weight, bias in (("leaf", "leaf"), ("frozen", "frozen"), (None, None), ("frozen", "leaf")):
            mode, affine = "train" if training else "eval", f"{weight} weight {bias} bias"
            affine = affine.replace("None", "no").replace("leaf", "trainable")
            found.append(
                Sample(
                    f"batch norm {mode} {affine}",
                    lambda i, t=training, w=weight, b=bias: batch_norm(i, training=t, weight=w, bias=b),
                )
            )
    return found


def frozen_norm(i: Inputs, *shape: int, like: torch.memory_format = torch.contiguous_format) -> Tensor:
    return batch_norm(i, training=False, weight="frozen", bias="frozen", shape=shape, like=like)


NORMS = [
    *batch_norms(),
    Sample("batch norm eval frozen 2d", lambda i: frozen_norm(i, 6, 3)),
    Sample("batch norm eval frozen 1d", lambda i: frozen_norm(i, 2, 3, 7)),
    Sample("batch norm eval frozen 3d", lambda i: frozen_norm(i, 2, 3, 2, 4, 3)),
    Sample("batch norm eval frozen channels last", lambda i: frozen_norm(i, 4, 3, 5, 6, like=LAST2)),
    Sample("batch norm no running statistics", lambda i: F.batch_norm(i.made(4, 3, 5), None, None, training=True)),
    Sample("instance norm", lambda i: F.instance_norm(i.made(2, 3, 5, 4), weight=i.leaf(3), bias=i.leaf(3))),
    Sample("layer norm", lambda i: F.layer_norm(i.made(2, 5, 8), (8,), i.leaf(8), i.leaf(8))),
    Sample("layer norm frozen", lambda i: F.layer_norm(i.made(2, 5, 8), (8,), i.frozen(8), i.frozen(8))),
    Sample("layer norm no affine", lambda i: F.layer_norm(i.made(2, 5, 8), (5, 8))),
    Sample("group norm", lambda i: F.group_norm(i.made(2, 4, 5), 2, i.leaf(4), i.leaf(4))),
    Sample("group norm frozen", lambda i: F.group_norm(i.made(2, 4, 5), 2, i.frozen(4), i.frozen(4))),
    Sample("rms norm", lambda i: F.rms_norm(i.made(2, 5, 8), (8,), i.leaf(8))),
    Sample("vector norm", lambda i: torch.linalg.vector_norm(i.made(5, 8), dim=1)),
    Sample("norm to a scalar", lambda i: torch.ops.aten.norm.Scalar(i.made(5, 8), 2)),
    Sample("norm by dimension", lambda i: torch.ops.aten.norm.ScalarOpt_dim(i.made(5, 8), 2, [1])),
]

# --- softmax and attention ------------------------------------------------------------------------------------------


def attention(i: Inputs, mask: Tensor | None = None, *, causal: bool = False, frozen: bool = False) -> Tensor:
    shape = (2, 2, 16, 16)
    q, k, v = i.made(*shape), (i.frozen if frozen else i.made)(*shape), i.made(*shape)
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal)


def attention_by(backend: SDPBackend) -> Call:
    def call(i: Inputs) -> Tensor:
        with sdpa_kernel(backend):
            return attention(i)

    return call


SOFTMAX = [
    Sample("softmax", lambda i: F.softmax(i.made(5, 8), -1)),
    Sample("log softmax", lambda i: F.log_softmax(i.made(5, 8), -1)),
    Sample("safe softmax", lambda i: torch._safe_softmax(i.made(5, 8), -1)),
    Sample("logsumexp", lambda i: torch.logsumexp(i.made(5, 8), -1)),
    Sample("attention", attention),
    Sample("attention causal", lambda i: attention(i, causal=True)),
    Sample("attention frozen keys", lambda i: attention(i, frozen=True)),
    Sample("attention bool mask", lambda i: attention(i, i.mask(16, 16) | torch.eye(16, device=i.device).bool())),
    Sample("attention float mask", lambda i: attention(i, i.frozen(16, 16))),
    Sample("attention trainable mask", lambda i: attention(i, i.leaf(2, 2, 16, 16))),
    Sample("attention math", attention_by(SDPBackend.MATH)),
]

# --- losses ---------------------------------------------------------------------------------------------------------

LOSSES = [
    Sample("cross entropy", lambda i: F.cross_entropy(i.made(6, 5), i.integers(5, 6))),
    Sample("cross entropy smoothed", lambda i: F.cross_entropy(i.made(6, 5), i.integers(5, 6), label_smoothing=0.5)),
    Sample("cross entropy 2d", lambda i: F.cross_entropy(i.made(2, 5, 3, 4), i.integers(5, 2, 3, 4))),
    Sample("nll", lambda i: F.nll_loss(i.made(6, 5), i.integers(5, 6))),
    Sample("nll weighted", lambda i: F.nll_loss(i.made(6, 5), i.integers(5, 6), i.frozen(5), ignore_index=2)),
    Sample("nll sum", lambda i: F.nll_loss(i.made(6, 5), i.integers(5, 6), reduction="sum")),
    Sample("nll none", lambda i: F.nll_loss(i.made(6, 5), i.integers(5, 6), reduction="none")),
    Sample("nll unbatched", lambda i: F.nll_loss(i.made(5), i.integers(5))),
    Sample("nll2d", lambda i: F.nll_loss(i.made(2, 5, 3, 4), i.integers(5, 2, 3, 4))),
    Sample(
        "nll2d weighted",
        lambda i: F.nll_loss(i.made(2, 5, 3, 4), i.integers(5, 2, 3, 4), i.frozen(5), ignore_index=2, reduction="none"),
    ),
    Sample("mse", lambda i: F.mse_loss(i.made(6, 5), i.frozen(6, 5))),
    Sample("l1", lambda i: F.l1_loss(i.made(6, 5), i.frozen(6, 5))),
    Sample("smooth l1", lambda i: F.smooth_l1_loss(i.made(6, 5), i.frozen(6, 5), beta=0.5)),
    Sample("huber", lambda i: F.huber_loss(i.made(6, 5), i.frozen(6, 5), delta=0.5)),
    Sample("bce", lambda i: F.binary_cross_entropy(i.smooth(6, 5), i.mask(6, 5).to(i.dtype))),
    Sample("bce with logits", lambda i: F.binary_cross_entropy_with_logits(i.made(6, 5), i.mask(6, 5).to(i.dtype))),
    Sample("soft margin", lambda i: F.soft_margin_loss(i.made(6, 5), i.mask(6, 5).to(i.dtype) * 2 - 1)),
    Sample("multi margin", lambda i: F.multi_margin_loss(i.made(6, 5), i.integers(5, 6)), FULL),
    Sample("multilabel margin", lambda i: F.multilabel_margin_loss(i.made(6, 5), i.integers(5, 6, 5)), FULL),
    Sample("multilabel soft margin", lambda i: F.multilabel_soft_margin_loss(i.made(6, 5), i.mask(6, 5).to(i.dtype))),
    Sample("kl", lambda i: F.kl_div(i.made(6, 5), i.smooth(6, 5), reduction="batchmean")),
]

# --- elementwise products and powers, indexing, checkpoint ----------------------------------------------------------

ELEMENTWISE = [
    Sample("mul", lambda i: i.made(5, 7) * i.made(5, 7)),
    Sample("mul by a scalar parameter", lambda i: i.made(5, 7) * i.leaf()),
    Sample("div", lambda i: i.made(5, 7) / i.smooth(5, 7)),
    Sample("pow by a number", lambda i: i.made(5, 7) ** 3),
    Sample("pow by a tensor", lambda i: i.smooth(5, 7) ** i.made(5, 7)),
    Sample("pow of a number", lambda i: 2 ** i.made(5, 7)),
    Sample("exp", lambda i: i.made(5, 7).exp()),
    Sample("exp2", lambda i: i.made(5, 7).exp2()),
    Sample("expm1", lambda i: i.made(5, 7).expm1()),
    Sample("log", lambda i: i.smooth(5, 7).log()),
    Sample("log1p", lambda i: i.smooth(5, 7).log1p()),
    Sample("sqrt", lambda i: i.smooth(5, 7).sqrt()),
    Sample("rsqrt", lambda i: i.smooth(5, 7).rsqrt()),
    Sample("reciprocal", lambda i: i.smooth(5, 7).reciprocal()),
    Sample("abs", lambda i: i.made(5, 7).abs()),
    Sample("sin", lambda i: i.made(5, 7).sin()),
    Sample("cos", lambda i: i.made(5, 7).cos()),
    Sample("erf", lambda i: i.made(5, 7).erf()),
    Sample("lerp", lambda i: torch.lerp(i.made(5, 7), i.made(5, 7), i.smooth(5, 7))),
    Sample("addcmul", lambda i: torch.addcmul(i.made(5, 7), i.made(5, 7), i.made(5, 7))),
    Sample("addcdiv", lambda i: torch.addcdiv(i.made(5, 7), i.made(5, 7), i.smooth(5, 7))),
]


def grid(i: Inputs, *shape: int) -> Tensor:
    return i.smooth(*shape, len(shape) - 1).detach().requires_grad_()


INDEXING = [
    Sample("gather", lambda i: i.made(5, 7).gather(1, i.integers(7, 5, 3))),
    Sample("take", lambda i: i.made(5, 7).take(i.integers(35, 4, 3))),
    Sample("cummax", lambda i: torch.cummax(i.made(5, 7), 1)),
    Sample("cummin", lambda i: torch.cummin(i.made(5, 7), 0)),
    Sample("cummax nasty", lambda i: torch.cummax(holes(i.leaf(5, 7)), 1)),
    Sample("index_add", lambda i: i.made(5, 7).index_add(0, i.integers(5, 3), i.made(3, 7), alpha=2)),
    Sample("index_add one source", lambda i: i.made(5).index_add(0, i.integers(5, 1), i.made(1))),
    Sample("index_copy", lambda i: i.made(5, 7).index_copy(0, torch.tensor([3, 0], device=i.device), i.made(2, 7))),
    Sample("grid sample", lambda i: F.grid_sample(i.made(2, 3, 5, 4), grid(i, 2, 3, 3), align_corners=False)),
    Sample("grid sample 3d", lambda i: F.grid_sample(i.made(2, 3, 4, 3, 3), grid(i, 2, 2, 3, 3), align_corners=False)),
    Sample("checkpoint", lambda i: checkpoint(lambda x: F.relu(x.sin() * x), i.made(5, 7), use_reentrant=False)),
]

SAMPLES: tuple[Sample, ...] = (
    *PRODUCTS,
    *CONVOLUTIONS,
    *ONE_BIT,
    *nasty_gradients(ONE_BIT),
    *SMOOTH,
    *POOLS,
    *NORMS,
    *SOFTMAX,
    *LOSSES,
    *ELEMENTWISE,
    *INDEXING,
)

# --- what only CUDA can do ------------------------------------------------------------------------------------------

LOW = (torch.float16, torch.bfloat16)


def cudnn(enabled: bool) -> AbstractContextManager[None]:
    return torch.backends.cudnn.flags(enabled=enabled) if torch.cuda.is_available() else nullcontext()


def by_cudnn(sample: Sample, enabled: bool) -> Sample:
    """The same call with cuDNN allowed or forbidden."""

    def call(i: Inputs) -> Tensor | tuple[Tensor, ...]:
        with cudnn(enabled):
            return sample.call(i)

    return Sample(f"{sample.name} {'with' if enabled else 'without'} cudnn", call, sample.dtypes)


def cudnn_conv(x: Tensor, weight: Tensor) -> Tensor:
    return torch.cudnn_convolution(x, weight, *PLAIN_CONV, 1, benchmark=False, deterministic=True, allow_tf32=False)


def masked_attention(i: Inputs, backend: SDPBackend) -> Tensor:
    with sdpa_kernel(backend):
        return attention(i, i.leaf(2, 2, 16, 16))


CUDA_SAMPLES: tuple[Sample, ...] = (
    *[by_cudnn(sample, enabled) for sample in NORMS if "batch norm" in sample.name for enabled in (True, False)],
    *[by_cudnn(sample, False) for sample in CONVOLUTIONS],
    Sample("cudnn convolution frozen weight", lambda i: cudnn_conv(i.made(2, 4, 6, 5), i.frozen(4, 4, 3, 3))),
    Sample("cudnn convolution input without grad", lambda i: cudnn_conv(i.frozen(2, 4, 6, 5), i.leaf(4, 4, 3, 3))),
    Sample("attention flash", attention_by(SDPBackend.FLASH_ATTENTION), LOW),
    Sample("attention efficient", attention_by(SDPBackend.EFFICIENT_ATTENTION), (*LOW, torch.float32)),
    Sample("attention efficient mask", lambda i: masked_attention(i, SDPBackend.EFFICIENT_ATTENTION), LOW),
    Sample("attention cudnn", attention_by(SDPBackend.CUDNN_ATTENTION), LOW),
)
