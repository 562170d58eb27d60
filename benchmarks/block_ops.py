"""dW from blocks beside the dense product (cuBLAS) and `torch.sparse` BSR, over shapes, blocks and parts, in one run.

    python benchmarks/block_ops.py                                     # on the GPU if there is one
    python benchmarks/block_ops.py --shapes vit_fc1 --keep 0.1 0.3 --json out/block_ops.json --plot out/block_ops.png

Times are GPU times from cold caches (bandwidth.py). `pack` finds and gathers the blocks: norms, selection and values.
Its floor is a copy's time for the bytes it must move. `torch.sparse` multiplies the same blocks of X^T, as it holds
them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from bandwidth import describe, printed, seconds, written
from torch import Tensor

from slimgrad import kernels
from slimgrad.codecs import Blocks
from slimgrad.kernels import Grid


@dataclass(frozen=True)
class Shape:
    """A product: rows of activations, inputs and outputs."""

    rows: int
    inputs: int
    outputs: int

    @property
    def small(self) -> Shape:
        """For a CPU that only looks whether this runs."""
        return Shape(self.rows // 64, self.inputs // 4, self.outputs // 4)


VIT, GPT2, RESMLP = 128 * 197, 16 * 1024, 256 * 196
SHAPES = {
    "vit_qkv": Shape(VIT, 768, 2304),
    "vit_proj": Shape(VIT, 768, 768),
    "vit_fc1": Shape(VIT, 768, 3072),
    "vit_fc2": Shape(VIT, 3072, 768),
    "gpt2_qkv": Shape(GPT2, 768, 2304),
    "gpt2_proj": Shape(GPT2, 768, 768),
    "gpt2_fc1": Shape(GPT2, 768, 3072),
    "gpt2_fc2": Shape(GPT2, 3072, 768),
    "resmlp_fc1": Shape(RESMLP, 384, 1536),
    "resmlp_fc2": Shape(RESMLP, 1536, 384),
    "resmlp_tok": Shape(256 * 384, 196, 196),
}
"""ViT-B/16 with 128 images, GPT-2 with 16 x 1024 tokens, ResMLP-S24 with 256 images: its channel layers, and the one
across patches, whose 196 fill no block."""


@dataclass(frozen=True)
class Row:
    shape: str
    dtype: str
    block: str
    keep: float
    layout: str
    chosen: str
    """Whether blocks were drawn or the strongest, and from how many rows norms were taken."""
    dense_us: float
    product_us: float
    pack_us: float
    pack_floor_us: float
    put_us: float
    sparse_us: float | None
    """None where `torch.sparse` does not multiply it."""
    times_less: float
    """Bytes of the tensor over bytes kept."""

    @property
    def faster(self) -> float:
        return self.dense_us / self.product_us

    @property
    def faster_with_packing(self) -> float:
        return self.dense_us / (self.product_us + self.pack_us)


def rows(args: argparse.Namespace) -> Iterator[Row]:
    device = torch.device(args.device)
    for dtype in (getattr(torch, name) for name in args.dtypes):
        for name in args.shapes:
            shape = SHAPES[name].small if args.small else SHAPES[name]
            x = torch.randn(shape.rows, shape.inputs, device=device).to(dtype)
            dy = torch.randn(shape.rows, shape.outputs, device=device).to(dtype)
            dense_us = seconds(lambda x=x, dy=dy: dy.t() @ x, device, args.repeats) * 1e6
            copy_us = seconds(x.clone, device, args.repeats) * 1e6
            for layout in args.layouts:
                for block in args.blocks:
                    for keep in args.keep:
                        for unbiased, sample in args.choices:
                            codec = Blocks(keep=keep, block=block, layout=layout, unbiased=unbiased, sample=sample)
                            yield measured(name, x, dy, codec, dense_us, copy_us, args.repeats)


def measured(name: str, x: Tensor, dy: Tensor, codec: Blocks, dense_us: float, copy_us: float, repeats: int) -> Row:
    grid = codec.grid(x.shape)
    held = kernels.keep_blocks(x, grid)
    back = kernels.put_blocks_back(*held, x.shape, x.stride(), grid)
    kept = sum(part.nbytes for part in held)

    def us(call: object) -> float:
        return seconds(call, x.device, repeats) * 1e6  # type: ignore[arg-type]

    return Row(
        shape=name,
        dtype=str(x.dtype).removeprefix("torch."),
        block="x".join(map(str, codec.block)),
        keep=codec.keep,
        layout=codec.layout,
        chosen=("drawn" if codec.unbiased else "largest") + (f"/{codec.sample}" if codec.sample > 1 else ""),
        dense_us=dense_us,
        product_us=us(lambda: kernels.block_product(*held, dy, grid)),
        pack_us=us(lambda: kernels.keep_blocks(x, grid)),
        pack_floor_us=copy_us * (x.nbytes / codec.sample + 2 * kept) / (2 * x.nbytes),
        put_us=us(lambda: kernels.put_blocks_back(*held, x.shape, x.stride(), grid)),
        sparse_us=sparse_us(back, dy, grid, repeats),
        times_less=x.nbytes / kept,
    )


def sparse_us(x: Tensor, dy: Tensor, grid: Grid, repeats: int) -> float | None:
    below, beside = -x.shape[0] % grid.height, -x.shape[1] % grid.width
    try:
        padded = torch.nn.functional.pad(x, (0, beside, 0, below))
        matrix = padded.t().contiguous().to_sparse_bsr((grid.width, grid.height))
        other = torch.nn.functional.pad(dy, (0, 0, 0, below))
        return seconds(lambda: matrix @ other, x.device, max(3, repeats // 5)) * 1e6
    except RuntimeError as error:
        print(f"  torch.sparse: {str(error).splitlines()[0][:100]}")
        return None


def pair(text: str) -> tuple[int, int]:
    height, _, width = text.partition("x")
    return int(height), int(width)


def choice(text: str) -> tuple[bool, int]:
    """ "drawn/4" as (unbiased, sample)."""
    kind, _, sample = text.partition("/")
    if kind not in ("drawn", "largest"):
        raise argparse.ArgumentTypeError(f"expected drawn or largest, and /rows; found {text!r}")
    return kind == "drawn", int(sample or 1)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), metavar="SHAPE", help=", ".join(SHAPES)
    )
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--blocks", nargs="+", type=pair, default=[(64, 64), (64, 128)], metavar="ROWSxCOLUMNS")
    parser.add_argument("--keep", nargs="+", type=float, default=[0.1, 0.3])
    parser.add_argument("--layouts", nargs="+", default=["balanced"])
    parser.add_argument(
        "--choices",
        nargs="+",
        type=choice,
        default=[(True, 4)],
        help="drawn or largest, by the norms of all rows or of every so many-th: drawn/4 largest",
    )
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--small", action="store_true", help="small shapes: a smoke test and not a result")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--plot", type=Path, help="draw how much faster than the dense product")
    return parser.parse_args(words)


HEAD = (
    "shape",
    "block",
    "keep",
    "layout",
    "chosen",
    "dense",
    "product",
    "pack",
    "floor",
    "put",
    "sparse",
    "faster",
    "+ pack",
    "less",
)
LINE = "{:10} {:>7} {:>5} {:>8} {:>9} {:>7} {:>7} {:>6} {:>6} {:>6} {:>7} {:>6} {:>6} {:>6}"


def shown(row: Row) -> str:
    times = [f"{us:.1f}" for us in (row.dense_us, row.product_us, row.pack_us, row.pack_floor_us, row.put_us)]
    sparse = "-" if row.sparse_us is None else f"{row.sparse_us:.0f}"
    ratios = [f"{ratio:.2f}x" for ratio in (row.faster, row.faster_with_packing, row.times_less)]
    return LINE.format(row.shape, row.block, row.keep, row.layout, row.chosen, *times, sparse, *ratios)


def plotted(found: Sequence[Row], path: Path) -> Path:
    """How much faster than the dense product: one panel for each part, one bar for each block."""
    from matplotlib.figure import Figure
    from plots import COLOURS, GREY, saved

    keeps = sorted({row.keep for row in found})
    figure = Figure(figsize=(2 + 5 * len(keeps), 4.5), layout="constrained")
    for panel, keep in zip(figure.subplots(1, len(keeps), squeeze=False).flat, keeps, strict=True):
        mine = [row for row in found if row.keep == keep]
        names = list(dict.fromkeys(row.shape for row in mine))
        kinds = list(dict.fromkeys((row.block, row.layout, row.chosen) for row in mine))
        width = 0.8 / len(kinds)
        for number, (kind, colour) in enumerate(zip(kinds, COLOURS * len(kinds), strict=False)):
            bars = [row for row in mine if (row.block, row.layout, row.chosen) == kind]
            at = [names.index(row.shape) - 0.4 + (number + 0.5) * width for row in bars]
            panel.bar(at, [row.faster for row in bars], width, color=colour, alpha=0.4, label=" ".join(kind))
            panel.bar(at, [row.faster_with_packing for row in bars], width, color=colour, label="with packing")
            peers = [row.dense_us / row.sparse_us if row.sparse_us else math.nan for row in bars]
            panel.plot(at, peers, "kx", label=None if number else "torch.sparse")
        panel.axhline(1, color=GREY, linewidth=1)
        panel.set_ylim(top=1.3 * panel.get_ylim()[1])  # room for the legend
        panel.set_xticks(range(len(names)), names, rotation=45, ha="right")
        panel.set_title(f"{keep:g} kept", loc="left")
    figure.axes[0].set_ylabel("times faster than the dense dW")
    return saved(figure, path)


def main() -> None:
    args = arguments()
    print(f"{describe(args.device)}", LINE.format(*HEAD), sep="\n")
    found = printed(rows(args), shown)
    written(found, args.json)
    if args.plot:
        plotted([Row(**row) for row in found], args.plot)


if __name__ == "__main__":
    main()
