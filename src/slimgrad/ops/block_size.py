"""Which block size is the quickest for a layer, by a short measurement that is made once for each size of layer."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor, nn

from slimgrad import kernels
from slimgrad.codecs import Blocks

BlockSize = tuple[int, int]

CANDIDATES: tuple[BlockSize, ...] = ((64, 64), (64, 128), (128, 64), (128, 128))
ROWS = {"cuda": 16384, "cpu": 1024}
ROUNDS = 5
SLEEP_CYCLES = 4_000_000
"""Two milliseconds."""
SLACK = 1.05
"""A larger block must be at least as much quicker: it keeps less of what matters."""


def quickest_block(layer: nn.Module, codec: Blocks) -> BlockSize:
    """For a linear layer or a 1x1 convolution, under this codec with other blocks; the codec's own for others."""
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() < 2 or any(size != 1 for size in weight.shape[2:]):
        return codec.block
    as_torch_has_it = isinstance(layer, (nn.Linear, nn.modules.conv._ConvNd))  # outputs first
    outputs, inputs = weight.shape[:2] if as_torch_has_it else weight.shape[::-1]
    dtype = torch.bfloat16 if weight.is_cuda and weight.dtype == torch.float32 else weight.dtype
    return _quickest(inputs, outputs, codec, dtype, weight.device)


@lru_cache(maxsize=1024)
def _quickest(inputs: int, outputs: int, codec: Blocks, dtype: torch.dtype, device: torch.device) -> BlockSize:
    rows = ROWS.get(device.type, ROWS["cpu"])
    x = torch.ones(rows, inputs, dtype=dtype, device=device)
    dy = torch.ones(rows, outputs, dtype=dtype, device=device)
    found = CANDIDATES[0]
    least = _seconds(x, dy, replace(codec, block=found))
    for block in CANDIDATES[1:]:
        taken = _seconds(x, dy, replace(codec, block=block))
        if taken * SLACK < least:
            found, least = block, taken
    return found


def _seconds(x: Tensor, dy: Tensor, codec: Blocks) -> float:
    """Packing and multiplying, on average; compiled and warmed up before."""
    grid = codec.grid(x.shape)

    def call() -> None:
        values, index, *means = kernels.keep_blocks(x, grid)
        kernels.block_product(values, index, dy, grid, *means)

    call()
    return (_seconds_on_gpu if x.is_cuda else _seconds_on_cpu)(call) / ROUNDS


def _seconds_on_gpu(call: Callable[[], None]) -> float:
    """GPU time alone: it sleeps until the host has launched all, because a training's host is ahead too."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(SLEEP_CYCLES)
    start.record()
    for _ in range(ROUNDS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _seconds_on_cpu(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(ROUNDS):
        call()
    return time.perf_counter() - start
