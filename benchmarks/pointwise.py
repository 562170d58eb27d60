"""Few-bit functions beside stock ones: time of forward and backward, and bytes kept, in one run as ratios.

    python benchmarks/pointwise.py                                   # on the GPU if there is one
    python benchmarks/pointwise.py --sizes 64M --bits 3 --dtypes bfloat16 --json out/pointwise.json

The floor is what a copy would take for the bytes a few-bit function must move: x, y and codes forward; codes, dY and dX
backward. Stock autograd moves x once more. Gated units f(a) * b follow, without codes: a, b and y forward; a, b, dY, dA
and dB backward.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from kernels import UNITS, count, seconds
from torch import Tensor

import slimgrad as sg

STOCK: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "silu": F.silu,
    "mish": F.mish,
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
}


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda a, b: F.silu(a) * b,
    "gelu": lambda a, b: F.gelu(a) * b,
}


@dataclass(frozen=True)
class Row:
    function: str
    bits: int | None
    """None for a gated unit, which has no codes."""
    dtype: str
    elements: int
    stock_us: float
    fewbit_us: float
    time_ratio: float
    floor_ratio: float
    """What the bytes alone would take, over stock."""
    kept_ratio: float
    """Stock bytes over ours."""


def rows(args: argparse.Namespace) -> Iterator[Row]:
    device = torch.device(args.device)
    for dtype in (getattr(torch, name) for name in args.dtypes):
        for n in args.sizes:
            copied = seconds(copying(n, dtype, device), device, args.repeats) / (2 * n * dtype.itemsize)  # per byte
            for name in args.functions:
                stock = seconds(both_ways(STOCK[name], n, dtype, device), device, args.repeats)
                for bits in args.bits:
                    fewbit = both_ways(sg.fewbit_function(name, bits), n, dtype, device)
                    took = seconds(fewbit, device, args.repeats)
                    floor = copied * n * (4 * dtype.itemsize + bits / 4)
                    kept = n * dtype.itemsize / (n * bits / 8)
                    label = str(dtype).removeprefix("torch.")
                    yield Row(name, bits, label, n, stock * 1e6, took * 1e6, took / stock, floor / stock, kept)


def gated_rows(args: argparse.Namespace) -> Iterator[Row]:
    device = torch.device(args.device)
    for dtype in (getattr(torch, name) for name in args.dtypes):
        for n in args.sizes:
            copied = seconds(copying(n, dtype, device), device, args.repeats) / (2 * n * dtype.itemsize)
            for name in (name for name in args.functions if name in GATED):
                stock = seconds(gated_both_ways(GATED[name], n, dtype, device), device, args.repeats)
                took = seconds(gated_both_ways(sg.gated_function(name), n, dtype, device), device, args.repeats)
                floor = copied * n * 8 * dtype.itemsize
                label = str(dtype).removeprefix("torch.")
                yield Row(f"{name} * b", None, label, n, stock * 1e6, took * 1e6, took / stock, floor / stock, 3 / 2)


def gated_both_ways(
    f: Callable[[Tensor, Tensor], Tensor], n: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    a, b = (torch.randn(n, device=device).to(dtype).requires_grad_() for _ in range(2))
    dy = torch.randn(n, device=device).to(dtype)
    return lambda: torch.autograd.grad(f(a, b), (a, b), dy)


def copying(n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    source, target = (torch.empty(n, dtype=dtype, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def both_ways(f: Callable[[Tensor], Tensor], n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    x = torch.randn(n, device=device).to(dtype).requires_grad_()
    dy = torch.randn(n, device=device).to(dtype)
    return lambda: torch.autograd.grad(f(x), x, dy)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--functions", nargs="+", choices=STOCK, default=list(STOCK), metavar="NAME")
    parser.add_argument("--bits", nargs="+", type=int, default=[2, 3, 4])
    parser.add_argument("--sizes", nargs="+", type=count, default=None, help="elements; K, M and G are powers of 1024")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args(words)
    args.sizes = args.sizes or [64 * UNITS["M"] if args.device.startswith("cuda") else UNITS["M"]]
    return args


HEAD = ("function", "bits", "dtype", "elements", "stock us", "ours us", "time x", "floor x", "kept /")
LINE = "{:10} {:>4} {:9} {:>10} {:>9} {:>9} {:>7} {:>8} {:>7}"


def shown(row: Row) -> str:
    times = (f"{row.stock_us:.1f}", f"{row.fewbit_us:.1f}", f"{row.time_ratio:.3f}", f"{row.floor_ratio:.3f}")
    return LINE.format(row.function, row.bits or "", row.dtype, row.elements, *times, f"{row.kept_ratio:.1f}")


def main() -> None:
    args = arguments()
    on_gpu = args.device.startswith("cuda")
    where = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}; torch {torch.__version__}; forward and backward together", LINE.format(*HEAD), sep="\n")
    found = []
    for row in itertools.chain(rows(args), gated_rows(args)):
        found.append(row)
        print(shown(row), flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps([asdict(row) for row in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
