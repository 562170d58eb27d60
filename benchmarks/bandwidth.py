"""How fast each kernel moves its bytes, beside a plain copy on the same device in the same run.

    python benchmarks/bandwidth.py                       # every kernel, on the GPU if there is one
    python benchmarks/bandwidth.py --sizes 4M 256M --dtypes bfloat16 --json out/kernels.json
    python benchmarks/bandwidth.py --force torch         # the references instead of the Triton twins

Bytes are those a kernel must move: what it reads plus what it writes, once. A kernel that reached the copy's bandwidth
would be as fast as the memory allows. A new kernel is one function here and one line in KERNELS.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.codecs.fewbit import FewBit, buckets_for
from slimgrad.kernels import Backend, Groups, Interval, Picks

RELU = Interval(-float("inf"), 0.0, closed=True, outside=True, nan=True)
NON_ZERO = Interval(0.0, 0.0, closed=True, outside=True, nan=True)
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}

CACHE_BYTES = 256 * 2**20
"""Written between two timings on a GPU, so that none finds its data in the cache (50 MB on an H200)."""
SLEEP_CYCLES = 2_000_000
"""A millisecond: a few-bit function takes a slow host 0.25 ms forward and backward."""


@dataclass(frozen=True)
class Job:
    """One thing to time, and the bytes it must move."""

    call: Callable[[], object]
    moved: int


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    kernel: str
    dtype: str
    elements: int
    backend: str
    microseconds: float
    gb_per_s: float
    copy_gb_per_s: float
    of_copy: float


@dataclass(frozen=True)
class Setting:
    """Where and how a kernel runs."""

    device: torch.device
    dtype: torch.dtype
    n: int
    force: Backend | None


def nbytes(*tensors: Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def data(at: Setting) -> Tensor:
    x = torch.randn(at.n, device=at.device, dtype=torch.bfloat16 if at.dtype == torch.bool else at.dtype)
    return x > 0 if at.dtype == torch.bool else x


def copy(at: Setting) -> Job:
    """A copy that allocates its output, as the kernels do; on a CPU fresh pages cost as much as the copying."""
    source = data(at)
    return Job(source.clone, 2 * nbytes(source))


def pack_bits(at: Setting) -> Job:
    x, rule = data(at), NON_ZERO if at.dtype == torch.bool else RELU
    packed = kernels.pack_bits(x, rule, force=at.force)
    return Job(lambda: kernels.pack_bits(x, rule, force=at.force), nbytes(x, packed))


def unpack_bits(at: Setting) -> Job:
    x, n, dtype = data(at), at.n, at.dtype
    packed = kernels.pack_bits(x, NON_ZERO, force=at.force)
    return Job(lambda: kernels.unpack_bits(packed, n, 1.0, 0.0, dtype, force=at.force), nbytes(x, packed))


def pooled(at: Setting, *, channels_last: bool) -> tuple[Tensor, kernels.Windows]:
    """About n indices of ResNet's first pool: 112 x 112 to 56 x 56."""
    images = max(1, at.n // (64 * 56 * 56))
    where = torch.randint(0, 112 * 112, (images, 64, 56, 56), device=at.device)  # any index will do for timing
    where = where.to(memory_format=torch.channels_last) if channels_last else where
    return where, kernels.Windows((112, 112), (3, 3), (2, 2), (1, 1), (1, 1))


def pack_window(at: Setting, *, channels_last: bool = False) -> Job:
    indices, geometry = pooled(at, channels_last=channels_last)
    codes = kernels.pack_window(indices, geometry, force=at.force)
    return Job(lambda: kernels.pack_window(indices, geometry, force=at.force), nbytes(indices, codes))


def unpack_window(at: Setting, *, channels_last: bool = False) -> Job:
    indices, geometry = pooled(at, channels_last=channels_last)
    codes = kernels.pack_window(indices, geometry, force=at.force) % 9
    return Job(lambda: kernels.unpack_window(codes, geometry, force=at.force), nbytes(indices, codes))


def packing(at: Setting, pack: Callable[..., Tensor], how: Any) -> Job:
    x = data(at).relu_() if isinstance(how, Groups) and how.zeros else data(at)
    packed = pack(x, how, force=at.force)
    return Job(lambda: pack(x, how, force=at.force), nbytes(x, packed))


def unpacking(at: Setting, pack: Callable[..., Tensor], unpack: Callable[..., Tensor], how: Any) -> Job:
    x = data(at)
    packed = pack(x, how, force=at.force)
    return Job(lambda: unpack(packed, x.shape, x.stride(), how, x.dtype, force=at.force), nbytes(x, packed))


def pick_largest(at: Setting) -> Job:
    """A tenth of all; the floor reads the tensor once."""
    x, picks = data(at), Picks.of(at.n, at.n // 10)
    held = kernels.pick_largest(x, picks, force=at.force)
    return Job(lambda: kernels.pick_largest(x, picks, force=at.force), nbytes(x, *held))


def put_back(at: Setting) -> Job:
    x, picks = data(at), Picks.of(at.n, at.n // 10)
    held = kernels.pick_largest(x, picks, force=at.force)
    return Job(lambda: kernels.put_back(*held, x.shape, x.stride(), picks, force=at.force), nbytes(x, *held))


FLOATS = (torch.float32, torch.bfloat16, torch.float16)
MASKS = (*FLOATS, torch.bool)
INDICES = (torch.int64,)

FORMATS = {
    "8": Groups(8, 128),
    "4": Groups(4, 128),
    "4 zeros": Groups(4, 128, zeros=True),
    "4 random": Groups(4, 128, stochastic=True),
    "3": Groups(3, 128),
    "2": Groups(2, 128),
}
"""By bits; with exact zeros, or with stochastic rounding."""
UNPACKED = {name: how for name, how in FORMATS.items() if not how.stochastic}  # the same bits as without

GELU = {bits: buckets_for(FewBit(bits=bits), "gelu", ()) for bits in (1, 2, 3, 4, 8)}
"""By bits."""


Entry = tuple[Callable[[Setting], Job], Sequence[torch.dtype]]


def packings(name: str, pack: Callable[..., Tensor], formats: Mapping[Any, Any]) -> dict[str, Entry]:
    return {f"{name} {label}": (partial(packing, pack=pack, how=how), FLOATS) for label, how in formats.items()}


def unpackings(
    name: str, pack: Callable[..., Tensor], unpack: Callable[..., Tensor], formats: Mapping[Any, Any]
) -> dict[str, Entry]:
    call = partial(unpacking, pack=pack, unpack=unpack)
    return {f"{name} {label}": (partial(call, how=how), FLOATS) for label, how in formats.items()}


KERNELS: dict[str, Entry] = {
    "pack_bits": (pack_bits, MASKS),
    "unpack_bits": (unpack_bits, MASKS),
    "pack_window": (pack_window, INDICES),
    "pack_window nhwc": (lambda at: pack_window(at, channels_last=True), INDICES),
    "unpack_window": (unpack_window, INDICES),
    "unpack_window nhwc": (lambda at: unpack_window(at, channels_last=True), INDICES),
    **packings("pack_groups", kernels.pack_groups, FORMATS),
    **unpackings("unpack_groups", kernels.pack_groups, kernels.unpack_groups, UNPACKED),
    **packings("pack_codes", kernels.pack_codes, GELU),
    **unpackings("unpack_codes", kernels.pack_codes, kernels.unpack_codes, GELU),
    "pick_largest": (pick_largest, FLOATS),
    "put_back": (put_back, FLOATS),
}


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Median time of one call; compiled and warmed up before."""
    for _ in range(3):
        call()
    timed = seconds_on_gpu if device.type == "cuda" else seconds_on_cpu
    return statistics.median(timed(call, repeats))


def seconds_on_cpu(call: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def seconds_on_gpu(call: Callable[[], object], repeats: int) -> list[float]:
    """By events on the stream: GPU time, without what the host takes to launch, which hides behind other work or not.

    The GPU sleeps until the host is done: it would wait for a slow host within what is timed otherwise.
    """
    cache = torch.empty(CACHE_BYTES, dtype=torch.int8, device="cuda")
    pairs = []
    for _ in range(repeats):
        cache.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(SLEEP_CYCLES)
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1e3 for start, end in pairs]


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """One row per kernel, dtype and size. The copy beside it is of the same dtype and size."""
    device = torch.device(args.device)
    for name, (prepare, dtypes) in KERNELS.items():
        for dtype in dtypes:
            label = str(dtype).removeprefix("torch.")
            if not selected(name, args.kernels) or not selected(label, args.dtypes):
                continue
            for n in args.sizes:
                yield measured(name, label, prepare, Setting(device, dtype, n, args.force), args.repeats)


def selected(name: str, wanted: Sequence[str] | None) -> bool:
    return wanted is None or any(name.startswith(prefix) for prefix in wanted)


def measured(name: str, label: str, prepare: Callable[[Setting], Job], at: Setting, repeats: int) -> Row:
    reached, took = speed(prepare(at), at, repeats)
    copied, _ = speed(copy(as_copied(at)), at, repeats)
    used = kernels.backend(at.device, at.force)
    return Row(name, label, at.n, used, took * 1e6, reached, copied, reached / copied)


def as_copied(at: Setting) -> Setting:
    """int64 has no random normals; float64 moves the same bytes."""
    dtype = torch.float64 if at.dtype == torch.int64 else at.dtype
    return Setting(at.device, dtype, at.n, at.force)


def speed(job: Job, at: Setting, repeats: int) -> tuple[float, float]:
    """(GB/s, seconds)"""
    took = seconds(job.call, at.device, repeats)
    return job.moved / took / 1e9, took


def count(text: str) -> int:
    """'4M' as 4 * 2**20."""
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def arguments() -> argparse.Namespace:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if gpu else "cpu")
    parser.add_argument("--sizes", nargs="+", type=count, help="elements; K, M and G are powers of 1024")
    parser.add_argument("--dtypes", nargs="+", help="only these, such as float32 or bool")
    parser.add_argument("--kernels", nargs="+", help="only those whose names begin so")
    parser.add_argument("--force", choices=("triton", "torch"), help="which twin; by default the device's own")
    parser.add_argument("--repeats", type=int, default=50 if gpu else 9)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    args = parser.parse_args()
    args.sizes = args.sizes or [count(s) for s in (("4M", "64M", "512M") if args.device != "cpu" else ("1M", "16M"))]
    return args


def describe(device: str) -> str:
    name = (
        torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {torch.get_num_threads()} threads"
    )
    return f"{name}; torch {torch.__version__}"


def shown(row: Row) -> str:
    return (
        f"{row.kernel:22} {row.dtype:9} {row.elements:11d} {row.backend:7} {row.microseconds:10.1f} "
        f"{row.gb_per_s:8.1f} {row.copy_gb_per_s:8.1f} {row.of_copy:8.1%}"
    )


def printed(rows: Iterator[Any], shown: Callable[[Any], str]) -> list[dict[str, Any]]:
    """Print each row when it is there; all of them, for a file."""
    found = []
    for row in rows:
        found.append(asdict(row))
        print(shown(row), flush=True)
    return found


def written(content: Any, path: Path | None) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    args = arguments()
    print(describe(args.device))
    print(f"{'kernel':22} {'dtype':9} {'elements':>11} {'twin':7} {'us':>10} {'GB/s':>8} {'copy':>8} {'of copy':>8}")
    written({"device": describe(args.device), "rows": printed(rows(args), shown)}, args.json)


if __name__ == "__main__":
    main()
