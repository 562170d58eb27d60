"""Picking the largest elements and putting them back, beside `torch.topk` with a gather and beside a copy, in one run.

    python benchmarks/picking.py                                  # on the GPU if there is one
    python benchmarks/picking.py --sizes 64M --keep 0.1 0.05 --dtypes bfloat16 --json out/picking.json

Times are GPU times (bandwidth.py). Temporaries are what the allocator held at its peak beside the input and the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bandwidth import UNITS, count, describe, printed, seconds, written
from torch import Tensor

from slimgrad import kernels
from slimgrad.codecs import TopK
from slimgrad.kernels import Layout


@dataclass(frozen=True)
class Row:
    dtype: str
    elements: int
    keep: float
    signs: bool
    places: str
    pick_us: float
    put_us: float
    topk_us: float
    copy_us: float
    times_less: float
    """Bytes of the tensor over bytes kept."""
    temporaries: float | None
    """Of the tensor's bytes; None where there is no allocator to ask."""
    topk_temporaries: float | None

    @property
    def speedup(self) -> float:
        return self.topk_us / self.pick_us


def rows(args: argparse.Namespace) -> Iterator[Row]:
    device = torch.device(args.device)
    for dtype in (getattr(torch, name) for name in args.dtypes):
        for n in args.sizes:
            x = torch.randn(n, device=device).to(dtype)
            copy_us = seconds(x.clone, device, args.repeats) * 1e6
            for keep in args.keep:
                yield measured(x, TopK(keep=keep), copy_us, args.repeats)
            for keep in args.signs:
                yield measured(x, TopK(keep=keep, signs=True), copy_us, args.repeats)


def measured(x: Tensor, codec: TopK, copy_us: float, repeats: int) -> Row:
    picks = codec.picks(x.shape)
    picker = kernels.picker(Layout.of(x), picks)
    held = picker.pick(x)

    def stock() -> tuple[Tensor, Tensor]:
        index = x.abs().topk(picks.k, sorted=False).indices
        return x[index], index

    return Row(
        dtype=str(x.dtype).removeprefix("torch."),
        elements=x.numel(),
        keep=codec.keep,
        signs=codec.signs,
        places=picks.kind.name,
        pick_us=seconds(lambda: picker.pick(x), x.device, repeats) * 1e6,
        put_us=seconds(lambda: picker.put_back(*held), x.device, repeats) * 1e6,
        topk_us=seconds(stock, x.device, max(3, repeats // 5)) * 1e6,
        copy_us=copy_us,
        times_less=x.nbytes / sum(part.nbytes for part in held),
        temporaries=temporaries(lambda: picker.pick(x), x),
        topk_temporaries=temporaries(stock, x),
    )


def temporaries(call: Callable[[], Sequence[Tensor]], x: Tensor) -> float | None:
    if x.device.type != "cuda":
        return None
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = call()
    held = torch.cuda.memory_allocated() - before
    peak = torch.cuda.max_memory_allocated() - before
    del result
    return (peak - held) / x.nbytes


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", nargs="+", type=count, default=None, help="elements; K, M and G are powers of 1024")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--keep", nargs="+", type=float, default=[0.1])
    parser.add_argument("--signs", nargs="*", type=float, default=[0.05], help="parts with the signs of the others")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args(words)
    args.sizes = args.sizes or [64 * UNITS["M"] if args.device.startswith("cuda") else UNITS["M"]]
    return args


HEAD = (
    "dtype",
    "elements",
    "keep",
    "places",
    "pick us",
    "put us",
    "topk us",
    "copy us",
    "faster",
    "less",
    "temp",
    "its",
)
LINE = "{:9} {:>10} {:>5} {:>11} {:>8} {:>7} {:>8} {:>8} {:>6} {:>6} {:>6} {:>6}"


def shown(row: Row) -> str:
    times = [f"{us:.0f}" for us in (row.pick_us, row.put_us, row.topk_us, row.copy_us)]
    held = ["-" if part is None else f"{part:.3f}" for part in (row.temporaries, row.topk_temporaries)]
    ratios = (f"{row.speedup:.1f}x", f"{row.times_less:.2f}x")
    places = row.places + "+signs" * row.signs
    return LINE.format(row.dtype, row.elements, row.keep, places, *times, *ratios, *held)


def main() -> None:
    args = arguments()
    print(f"{describe(args.device)}", LINE.format(*HEAD), sep="\n")
    written(printed(rows(args), shown), args.json)


if __name__ == "__main__":
    main()
