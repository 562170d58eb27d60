"""Values within a bound beside SZ3 and zfp, at equal bounds, on the real inputs of trained layers.

    python benchmarks/bounded.py                                     # ResNet-18 and the ViT of accuracy.py
    python benchmarks/bounded.py --tasks resnet18 --bounds 0.1 --json out/bounded.json --plot out/bounded.png
    python benchmarks/bounded.py --synthetic --bounds 0.1            # made data, of which the limits are known
    python benchmarks/bounded.py --small                             # a few steps, few layers: does it run?

A model is trained for some steps on real images (--data, as in accuracy.py); then the inputs of its linear layers and
convolutions in one batch are packed, each within a bound that is a part of its standard deviation. Ratios are of all
bytes, from float32. `entropy` is that of the integers themselves (twice the bound apart, each told for itself), which
no code without prediction can beat. SZ3 (`pip install pysz`) and zfp (`pip install zfpy`) run on the CPU, on one
thread, where they are installed. On a GPU packing and unpacking are timed beside a copy of the same tensors.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bandwidth import describe, printed, seconds, written
from tasks import ALL_TASKS
from tasks.base import Places
from tasks.training import loaded, stepped
from torch import Tensor, nn

import slimgrad as sg
from slimgrad.codecs import Demand
from slimgrad.codecs.base import ITSELF
from slimgrad.recipes.pruning import products

STEPS, SMALL_STEPS = 60, 2
BATCH = 64
SMALL_LAYERS = 3

OURS = {
    "none": lambda bound: sg.Bounded(bound=bound, predict="none"),
    "auto": lambda bound: sg.Bounded(bound=bound),
    "dithered": lambda bound: sg.Bounded(bound=bound, dither=True),
}


@dataclass(frozen=True)
class Row:
    """One way to tell all inputs of a model."""

    model: str
    bound: float
    """As a part of each tensor's standard deviation."""
    way: str
    ratio: float
    pack_gbs: float | None
    """Of dense bytes in a second; None for a limit."""
    unpack_gbs: float | None
    copy_gbs: float | None
    """What a copy of the same tensors reaches, counted alike; on a GPU."""
    dtype: str = "float32"


def inputs_of(task: str, args: argparse.Namespace) -> dict[str, Tensor]:
    """What the products of a model read, after some steps of training."""
    places = Places(args.data, args.cache)
    source = ALL_TASKS[task].source(places)
    if source is None:
        raise SystemExit(f"{task}: its files are not in {args.data}; see accuracy.py --help")
    device = torch.device(args.device)
    data = loaded(source, places, device)
    torch.manual_seed(0)
    model = ALL_TASKS[task].build(places).to(device)
    recipe = replace(ALL_TASKS[task].recipe, steps=SMALL_STEPS if args.small else STEPS, batch=BATCH)
    for _ in stepped(model, data, recipe, 0, device):
        pass
    found: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(path).register_forward_hook(_kept(found, path)) for path in products(model)[1:]
    ]  # the first reads images, which nobody packs
    (batch,) = data.batches(1, 1, BATCH)
    with torch.no_grad():
        model(*batch[0])
    for handle in handles:
        handle.remove()
    return dict(list(found.items())[:SMALL_LAYERS]) if args.small else found


def _kept(found: dict[str, Tensor], path: str) -> Callable[..., None]:
    def look(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found[path] = inputs[0].detach().float().contiguous()

    return look


def rows(args: argparse.Namespace) -> Iterator[Row]:
    for task in args.tasks:
        tensors = list(inputs_of(task, args).values())
        for part in args.bounds:
            bounds = [max(part * float(x.std()), 1e-12) for x in tensors]
            for way, codec in OURS.items():
                yield ours(ALL_TASKS[task].model, part, way, [codec(bound) for bound in bounds], tensors, args.repeats)
            yield entropy(ALL_TASKS[task].model, part, bounds, tensors)
            for peer, ways in PEERS.items():
                if importlib.util.find_spec(peer) is not None:
                    yield theirs(ALL_TASKS[task].model, part, ways, bounds, tensors)


def ours(
    model: str,
    part: float,
    way: str,
    codecs: Sequence[sg.Bounded],
    tensors: Sequence[Tensor],
    repeats: int,
    demand: Demand = ITSELF,
) -> Row:
    device, dense = tensors[0].device, sum(x.nbytes for x in tensors)
    kept = [codec.pack(x, demand) for codec, x in zip(codecs, tensors, strict=True)]

    def rate(call: Callable[[], Any]) -> float:
        return dense / seconds(call, device, repeats) / 1e9

    return Row(
        model=model,
        bound=part,
        way=f"Bounded {way}",
        ratio=dense / sum(packed.nbytes for packed in kept),
        pack_gbs=rate(lambda: [codec.start(x, demand) for codec, x in zip(codecs, tensors, strict=True)]),
        unpack_gbs=rate(lambda: [codec.unpack(packed) for codec, packed in zip(codecs, kept, strict=True)]),
        copy_gbs=rate(lambda: [x.clone() for x in tensors]) if device.type == "cuda" else None,
        dtype=str(tensors[0].dtype).removeprefix("torch."),
    )


def entropy(model: str, part: float, bounds: Sequence[float], tensors: Sequence[Tensor]) -> Row:
    """Of order 0, tensor by tensor."""
    bits = sum(bits_within(x, bound) for bound, x in zip(bounds, tensors, strict=True))
    dense = sum(x.nbytes for x in tensors)
    return Row(model, part, "entropy", dense * 8 / max(bits, 1.0), None, None, None)


def bits_within(x: Tensor, bound: float) -> float:
    """Of a tensor's elements in steps of twice the bound, each told for itself."""
    return bits_of((x / (2 * bound)).round())


def bits_of(numbers: Tensor) -> float:
    counts = numbers.flatten().unique(return_counts=True)[1].double()
    shares = counts / counts.sum()
    return -float((shares * shares.log2()).sum()) * numbers.numel()


# --- made data ---

CHAIN = 1024
"""Elements that depend on each other, whole chunks of the codec."""
MASK = Demand(need=sg.Need.OPERAND, zeros=True)


@dataclass(frozen=True)
class Way:
    """Of telling made data."""

    data: str
    name: str
    codec: Callable[[float], sg.Bounded]
    demand: Demand = ITSELF
    numbers: Callable[[Tensor], Tensor] = torch.round
    """Of values in steps, for the limit."""


def apart(steps: Tensor) -> Tensor:
    """Zero for itself."""
    return steps.abs().ceil() * steps.sign()


def differences(steps: Tensor) -> Tensor:
    return steps.round().view(-1, CHAIN).diff(prepend=steps.new_zeros(1, 1).expand(len(steps) // CHAIN, 1))


WAYS = (
    Way("white, ReLU", "none", OURS["none"]),
    Way("white, ReLU", "mask", OURS["none"], MASK, apart),
    Way("white, ReLU", "dithered", OURS["dithered"], ITSELF, apart),
    Way("AR(0.9), ReLU", "none", OURS["none"]),
    Way("AR(0.9), ReLU", "lorenzo", lambda bound: sg.Bounded(bound=bound, predict="lorenzo"), ITSELF, differences),
    Way("AR(0.9), ReLU", "dithered", OURS["dithered"], ITSELF, apart),
    Way("white", "none", OURS["none"]),
    Way("white", "dithered", OURS["dithered"], ITSELF, apart),
)


def correlated(n: int, keep: float) -> Tensor:
    """Chains of x_t = keep x_(t-1) + noise, of variance 1."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(CHAIN, n // CHAIN, generator=generator)
    for before, now in pairwise(noise):
        now.mul_(math.sqrt(1 - keep**2)).add_(before, alpha=keep)
    return noise.t().flatten()


def made(name: str, n: int) -> Tensor:
    x = correlated(n, 0.9 if name.startswith("AR") else 0.0)
    return x.relu() if name.endswith("ReLU") else x


def synthetic(args: argparse.Namespace) -> Iterator[Row]:
    for dtype in (torch.float32, torch.bfloat16):
        for way in WAYS:
            x = made(way.data, args.elements).to(args.device, dtype)
            for part in args.bounds:
                row = ours(way.data, part, way.name, [way.codec(part)], [x], args.repeats, way.demand)
                limit = x.nbytes * 8 / bits_of(way.numbers(x.float() / (2 * part)))
                yield row
                yield replace(row, way="entropy", ratio=limit, pack_gbs=None, unpack_gbs=None, copy_gbs=None)


# --- others ---


@dataclass(frozen=True)
class Peer:
    """A compressor of arrays within an absolute bound."""

    name: str
    compress: Callable[[Any, float], Any]
    decompress: Callable[[Any, Any], Any]


def _sz3(array: Any, bound: float) -> Any:
    import pysz

    config = pysz.szConfig(*array.shape)
    config.errorBoundMode = pysz.szErrorBoundMode.ABS
    config.absErrorBound = bound
    return pysz.sz.compress(array, config)[0]


def _from_sz3(stream: Any, like: Any) -> Any:
    import pysz

    return pysz.sz.decompress(stream, like.dtype, like.shape)[0]


def _zfp(array: Any, bound: float) -> Any:
    import zfpy

    return zfpy.compress_numpy(array, tolerance=bound)


def _from_zfp(stream: Any, like: Any) -> Any:
    import zfpy

    return zfpy.decompress_numpy(stream)


PEERS = {"pysz": Peer("SZ3", _sz3, _from_sz3), "zfpy": Peer("zfp", _zfp, _from_zfp)}


def theirs(model: str, part: float, peer: Peer, bounds: Sequence[float], tensors: Sequence[Tensor]) -> Row:
    arrays = [x.cpu().numpy() for x in tensors]
    dense = sum(array.nbytes for array in arrays)
    began = time.perf_counter()
    streams = [peer.compress(array, bound) for array, bound in zip(arrays, bounds, strict=True)]
    packed = time.perf_counter()
    back = [peer.decompress(stream, array) for stream, array in zip(streams, arrays, strict=True)]
    ended = time.perf_counter()
    for found, array, bound in zip(back, arrays, bounds, strict=True):
        off = abs(found.reshape(array.shape) - array).max()
        assert off <= bound * (1 + 1e-5), f"{peer.name} is off by {off}, more than {bound}"
    ratio = dense / sum(len(memoryview(stream).cast("B")) for stream in streams)
    return Row(model, part, peer.name, ratio, dense / (packed - began) / 1e9, dense / (ended - packed) / 1e9, None)


HEAD = ("model", "dtype", "bound", "way", "ratio", "pack GB/s", "unpack GB/s", "of copy")
LINE = "{:13} {:8} {:>6} {:18} {:>7} {:>10} {:>12} {:>14}"


def shown(row: Row) -> str:
    rates = ["-" if rate is None else f"{rate:.3g}" for rate in (row.pack_gbs, row.unpack_gbs)]
    of_copy = "-"
    if row.copy_gbs and row.pack_gbs and row.unpack_gbs:
        of_copy = f"{row.pack_gbs / row.copy_gbs:.0%}, {row.unpack_gbs / row.copy_gbs:.0%}"
    return LINE.format(row.model, row.dtype, row.bound, row.way, f"{row.ratio:.2f}x", *rates, of_copy)


def plotted(found: Sequence[Row], path: Path) -> Path:
    """Ratios over bounds, one panel for each model."""
    from matplotlib.figure import Figure
    from plots import COLOURS, saved

    models = list(dict.fromkeys(row.model for row in found))
    ways = list(dict.fromkeys(row.way for row in found))
    figure = Figure(figsize=(1 + 4.5 * len(models), 4), layout="constrained")
    for panel, model in zip(figure.subplots(1, len(models), squeeze=False).flat, models, strict=True):
        for number, way in enumerate(ways):
            line = sorted((row.bound, row.ratio) for row in found if (row.model, row.way) == (model, way))
            style = "k--" if way == "entropy" else "o-"
            colour = {} if way == "entropy" else {"color": COLOURS[number % len(COLOURS)]}
            panel.plot(*zip(*line, strict=True), style, label=way, **colour)
        panel.set_xscale("log")
        panel.set_xticks(sorted({row.bound for row in found}), [f"{b:g}" for b in sorted({row.bound for row in found})])
        panel.set_xlabel("bound, of the standard deviation")
        panel.set_title(model, loc="left")
    figure.axes[0].set_ylabel("times fewer bytes than fp32")
    figure.axes[0].legend(frameon=False)
    return saved(figure, path)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tasks", nargs="+", choices=ALL_TASKS, default=["resnet18", "vit"], metavar="TASK")
    parser.add_argument("--bounds", nargs="+", type=float, default=[0.03, 0.1, 0.3], help="parts of the deviation")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("SLIMGRAD_DATA", "data")))
    parser.add_argument("--cache", type=Path, default=Path("out/cache"))
    parser.add_argument("--synthetic", action="store_true", help="made data instead of tasks")
    parser.add_argument("--elements", type=int, default=2**22, help="of made data, whole thousands (1024)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="a smoke test and not a result")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--plot", type=Path, help="draw the ratios")
    args = parser.parse_args(words)
    if any(not 0 < bound < math.inf for bound in args.bounds):
        parser.error("--bounds must be positive")
    if args.elements < CHAIN or args.elements % CHAIN:
        parser.error(f"--elements must be a multiple of {CHAIN}")
    if args.synthetic and args.plot:
        parser.error("--plot draws tasks")
    return args


def main() -> None:
    args = arguments()
    print(describe(args.device), LINE.format(*HEAD), sep="\n")
    found = printed(synthetic(args) if args.synthetic else rows(args), shown)
    written(found, args.json)
    if args.plot:
        plotted([Row(**row) for row in found], args.plot)


if __name__ == "__main__":
    main()
