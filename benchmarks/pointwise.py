"""Few-bit functions beside stock ones: time of forward and backward, and bytes kept, in one run as ratios.

    python benchmarks/pointwise.py                                   # on the GPU if there is one
    python benchmarks/pointwise.py --sizes 64M --bits 3 --dtypes bfloat16 --json out/pointwise.json

The floor is what a copy would take for the bytes a few-bit function must move: x, y and codes forward; codes, dY and dX
backward. Stock autograd moves x once more. "gelu of x" is the op of `Quant(fused=True)`, which keeps x in groups in the
place of codes. Gated units f(a) * b follow, without codes: a, b and y forward; a, b, dY, dA and dB backward.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from bandwidth import UNITS, count, describe, printed, seconds, written
from torch import Tensor

import slimgrad as sg
from slimgrad.kernels import Groups
from slimgrad.kernels.chains import DERIVATIVES
from slimgrad.kernels.groups import PLANES
from slimgrad.ops.grouped import GroupedFunction

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

            def took(f: Callable[..., Tensor], inputs: int, n: int = n, dtype: torch.dtype = dtype) -> float:
                return seconds(both_ways(f, inputs, n, dtype, device), device, args.repeats)

            for name in args.functions:
                stock = took(STOCK[name], 1)
                for bits in args.bits:
                    moved, kept = n * (4 * dtype.itemsize + bits / 4), dtype.itemsize * 8 / bits
                    ours = took(sg.fewbit_function(name, bits), 1)
                    yield row(name, bits, dtype, n, stock, ours, copied * moved, kept)
            for name in (name for name in args.functions if name in DERIVATIVES):
                stock = took(STOCK[name], 1)
                for bits in (bits for bits in args.bits if bits in PLANES):
                    groups = Groups(bits, 128)
                    moved, held = n * 4 * dtype.itemsize + 2 * groups.nbytes(n), groups.nbytes(n)
                    ours = took(GroupedFunction(name, groups), 1)
                    yield row(f"{name} of x", bits, dtype, n, stock, ours, copied * moved, n * dtype.itemsize / held)
            for name in (name for name in args.functions if name in GATED):
                stock, ours = took(GATED[name], 2), took(sg.gated_function(name), 2)
                yield row(f"{name} * b", None, dtype, n, stock, ours, copied * n * 8 * dtype.itemsize, 3 / 2)


def row(
    name: str, bits: int | None, dtype: torch.dtype, n: int, stock: float, ours: float, floor: float, kept: float
) -> Row:
    label = str(dtype).removeprefix("torch.")
    return Row(name, bits, label, n, stock * 1e6, ours * 1e6, ours / stock, floor / stock, kept)


def copying(n: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    source, target = (torch.empty(n, dtype=dtype, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def both_ways(
    f: Callable[..., Tensor], inputs: int, n: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    given = [torch.randn(n, device=device).to(dtype).requires_grad_() for _ in range(inputs)]
    dy = torch.randn(n, device=device).to(dtype)
    return lambda: torch.autograd.grad(f(*given), given, dy)


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
    print(f"{describe(args.device)}; forward and backward together", LINE.format(*HEAD), sep="\n")
    written(printed(rows(args), shown), args.json)


if __name__ == "__main__":
    main()
