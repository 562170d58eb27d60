"""The cases that the reference and its Triton twins are both held to."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from slimgrad import kernels
from slimgrad.kernels import Buckets, Chain, Groups, Interval, Step, Windows

INF = float("inf")

SIZES = (0, 1, 7, 8, 9, 1023, 1024, 1025, 5000)  # around a byte and around a block; 5000 is a block and a ragged one
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INTEGERS = (torch.uint8, torch.bool, torch.int8, torch.int64)

BOUNDS = ((-INF, 0.0), (0.0, INF), (-INF, INF), (-1.0, 1.0), (0.0, 0.0), (1.0, -1.0), (0.0, 6.0))
RULES = tuple(Interval(lo, hi, *flags) for lo, hi in BOUNDS for flags in itertools.product((False, True), repeat=3))

LEVELS = ((1.0, 0.0), (INF, -INF), (-0.0, 0.0), (1 / 3, 0.01), (1.00390625 + 1e-9, 65504.0))
"""(on, off) pairs. The last `on` lies just above the middle of two bf16 numbers, by less than float32 can tell."""


FORMATS = (
    *(Groups(bits, 128) for bits in (8, 4, 3, 2)),
    *(Groups(bits, 128, zeros=True) for bits in (8, 4, 3, 2)),
    *(Groups(bits, 128, stochastic=True, seed=7) for bits in (4, 3)),
    Groups(2, 128, zeros=True, stochastic=True, seed=7),
    *(Groups(4, group) for group in (32, 64, 256, 512, 1024)),
)
"""How tensors are quantized."""


def awkward(dtype: torch.dtype) -> Tensor:
    """Every kind of number at which a comparison can go wrong."""
    if not dtype.is_floating_point:
        return torch.tensor([0, 1, 2, 5, 6, 7, 127, 255]).to(dtype)
    info = torch.finfo(dtype)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    least = torch.tensor([1], dtype=bits).view(dtype)  # the smallest subnormal
    around_one = torch.tensor([1 - info.eps / 2, 1.0, 1 + info.eps], dtype=dtype)
    plain = torch.tensor([0.0, INF, info.max, info.tiny, info.tiny / 2, 6.0, 0.5], dtype=dtype)
    positive = torch.cat([least, around_one, plain])
    return torch.cat([positive, -positive, torch.tensor([float("nan"), -float("nan")], dtype=dtype)])


def sample(n: int, dtype: torch.dtype) -> Tensor:
    """n elements: random, with the awkward ones strewn in from the first on."""
    generator = torch.Generator().manual_seed(n)
    x = (torch.randn(n, generator=generator, dtype=torch.float64) * 2).to(dtype)
    special = awkward(dtype)
    places = torch.arange(0, n, 3)
    x[places] = special[(places // 3) % len(special)]
    return x


def buckets(bits: int, *, absolute: bool = False) -> Buckets:
    """Evenly spaced borders; the values are the codes themselves."""
    count = 2**bits
    borders = torch.linspace(0.1 if absolute else -2.0, 2.0, count - 1) if count > 2 else torch.tensor([0.25])
    return Buckets(tuple(borders.tolist()), tuple(float(v) for v in range(count)), 0.5 if absolute else 0.0, absolute)


def quantizable(n: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """n elements of every kind that takes a way of its own: tame and wild groups, zeros, tiny and huge numbers."""
    plain = (torch.randn(n, generator=torch.Generator().manual_seed(n)) * 2).to(dtype)
    some_wild = plain.clone()
    some_wild[n // 2 :: 37], some_wild[n // 2 + 5 :: 41], some_wild[n // 2 + 7 :: 43] = float("nan"), INF, -INF
    zeros = torch.where(plain > 0.5, plain, torch.where(plain > 0, 0.0, -0.0).to(dtype))
    return {
        "plain": plain,
        "rectified": plain.relu(),
        "some wild": some_wild,
        "awkward": sample(n, dtype),
        "both zeros": zeros,
        "tiny": plain * 1e-39,
        "huge": (plain.float() * 1e38).to(dtype),
    }


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit: unlike torch.equal, -0.0 is not 0.0 and NaN is itself."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@dataclass(frozen=True)
class Pool:
    """One max-pool of torch's own; numbers stand for the same number in every dimension."""

    shape: tuple[int, ...]
    kernel: int | tuple[int, ...]
    stride: int | tuple[int, ...]
    padding: int | tuple[int, ...] = 0
    dilation: int | tuple[int, ...] = 1
    ceil: bool = False
    rank: int = 2
    channels_last: bool = False

    def geometry(self) -> Windows:
        fields = (self.kernel, self.stride, self.padding, self.dilation)
        each = (field if isinstance(field, tuple) else (field,) * self.rank for field in fields)
        return Windows(self.shape[-self.rank :], *each)

    def indices(self, device: Any = "cpu") -> Tensor:
        x = torch.randn(self.shape, generator=torch.Generator().manual_seed(0)).to(device)
        x.view(-1)[:: max(1, x.numel() // 7)] = float("nan")
        x.view(-1)[1 :: max(1, x.numel() // 5)] = -INF
        if self.channels_last:
            x = x.to(memory_format=torch.channels_last if self.rank == 2 else torch.channels_last_3d)
        pool = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[self.rank]
        _, *geometry = self.geometry()
        return pool(x, *geometry, ceil_mode=self.ceil, return_indices=True)[1]


_SWEEP = itertools.product((1, 2, 3), ((1, 1), (2, 2), (3, 2), (3, 1), (5, 3)), (0, 1), (1, 2, 3), (False, True))

POOLS = (
    *(
        Pool((2, 3, 11, 13, 12)[: 2 + rank], kernel, stride, padding, dilation, ceil, rank)
        for rank, (kernel, stride), padding, dilation, ceil in _SWEEP
        if padding <= kernel // 2 and (kernel - 1) * dilation < 11 + 2 * padding
    ),
    Pool((2, 3, 9, 14), (2, 3), (3, 2), (1, 0), (2, 1)),
    Pool((1, 2, 9, 8, 7), (3, 1, 2), (2, 1, 2), (1, 0, 1), (1, 1, 2), rank=3),
    Pool((4, 10, 10), 3, 2, 1),  # no batch
    Pool((6, 20), 4, 3, 2, 1, True, rank=1),
    Pool((2, 2, 1, 1), 3, 2, 1),  # a window larger than its input
    Pool((1, 2, 2, 40), (2, 5), (1, 2), (1, 2), (2, 3)),  # as high as its dilation
    Pool((1, 1, 40, 40), (15, 17), 8),  # 255 positions, all that a byte can name
    Pool((2, 5, 12, 12), 3, 2, 1, channels_last=True),
    Pool((3, 4, 7, 9), 2, 1, 1, 2, True, channels_last=True),
    Pool((2, 3, 6, 7, 8), 3, 2, 1, rank=3, channels_last=True),
    Pool((2, 64, 33, 31), 3, 2, 1),  # several blocks
    Pool((2, 64, 33, 31), 3, 2, 1, channels_last=True),
)


@dataclass(frozen=True)
class ChainCase:
    """Elementwise steps behind the unpacking of n elements."""

    chain: Chain
    n: int

    def __str__(self) -> str:
        how = self.chain.how
        steps = "-".join(" ".join(str(word) for word in step if word) for step in self.chain.steps)
        return f"{self.n}-{how.bits}-{how.group}{'-zeros' * how.zeros}-{steps}"

    def made(self) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What is unpacked in float32, the packed tensor, and operands."""
        torch.manual_seed(self.n)
        n, how = self.n, self.chain.how
        x = torch.randn(n) * 2
        packed = kernels.pack_groups(x.relu() if how.zeros else x, how)
        values = kernels.unpack_groups(packed, (n,), (1,), how, torch.float32)
        operands = [
            kernels.pack_groups(torch.randn(n).relu(), how)
            if step.operand == "packed"
            else (torch.rand(step.period or n // max(1, step.run)) + 0.5).to(
                torch.bfloat16 if place % 2 else torch.float32
            )
            for place, step in enumerate(self.chain.steps)
            if step.operand
        ]
        return values, packed, operands

    def expected(self, values: Tensor, operands: list[Tensor]) -> Tensor:
        """The steps in torch, in double precision."""
        x, given = values.double(), iter(operands)
        for step in self.chain.steps:
            x = self._done(step, x, next(given)) if step.operand else FUNCTIONS[step.op](x)
        return x

    def _done(self, step: Step, x: Tensor, operand: Tensor) -> Tensor:
        if step.operand == "packed":
            operand = kernels.unpack_groups(operand, x.shape, x.stride(), self.chain.how, torch.float32)
        if step.operand == "spread":
            operand = operand.repeat_interleave(step.run).repeat(self.n // (step.run * (step.period or len(operand))))
        found: Tensor = getattr(torch, step.op)(x, operand.double())
        return found


def slope_of(name: str, x: Tensor) -> Tensor:
    """By autograd."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(FUNCTIONS[name](x).sum(), x)
    return slope


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    **{f"d_{name}": partial(slope_of, name) for name in ("gelu", "gelu_tanh", "silu")},
}


def layer_norm(inner: int) -> tuple[Step, ...]:
    rows, columns = ("spread", inner, 0), ("spread", 1, inner)
    return Step("sub", *rows), Step("mul", *rows), Step("mul", *columns), Step("add", *columns)


def channels(plane: int, count: int) -> tuple[Step, ...]:
    """As batch norms have them."""
    return Step("mul", "spread", plane, count), Step("add", "spread", plane, count), Step("relu")


FOUR = Groups(4, 128)

CHAINS = (
    *(ChainCase(Chain(Groups(bits, 128), layer_norm(72)), 30 * 72) for bits in (8, 4, 3, 2)),
    *(ChainCase(Chain(FOUR, layer_norm(inner)), n) for inner, n in ((8, 8), (8, 2400), (1024, 3072), (7, 2100))),
    *(ChainCase(Chain(FOUR, channels(p, c)), 9 * p * c) for p, c in ((49, 10), (16, 5), (1, 700), (1, 40), (8, 33))),
    ChainCase(Chain(Groups(4, 64), layer_norm(2048)[1:3]), 5 * 2048),
    ChainCase(Chain(FOUR, (Step("silu"), Step("mul", "packed"))), 3081),
    ChainCase(Chain(Groups(4, 128, zeros=True), (Step("add", "packed"), Step("relu"))), 3081),
    ChainCase(Chain(FOUR, (Step("add", "same"), Step("div", "same"))), 2067),
    ChainCase(Chain(FOUR, (Step("mul", "spread", 2067),)), 2067),
    *(ChainCase(Chain(FOUR, (Step(name),)), 1041) for name in FUNCTIONS),
)
