"""Picking the largest elements in Triton: the twin of reference_picks. See pick_threshold.py for how they are found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from slimgrad.kernels import reference_picks
from slimgrad.kernels.geometry import PATTERNS, Layout, check_dense
from slimgrad.kernels.halves import is_native
from slimgrad.kernels.launch import Launch, multiprocessors
from slimgrad.kernels.pick_threshold import COPIES, SAMPLE, STATE, round_kernel, window_kernel
from slimgrad.kernels.pick_write import put_bits_kernel, put_kernel, write_kernel
from slimgrad.kernels.picks import TILE, Kind, Picks, check_picks
from slimgrad.kernels.rows import DEPTH, LANES, ROW
from slimgrad.kernels.signs import NAMES, signs_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SIGMAS = 6.0
WARPS, WINDOW_WARPS = 8, 4
ROWS = LANES.value * WARPS
CHUNK = ROWS * ROW.value * DEPTH.value // TILE
"""Tiles that are written at once: programs have multiples of them, because what is left over takes longer."""
REGISTERS = 64
"""For each thread, so that a multiprocessor has room for 4 programs; with fewer, they spill."""
PUT_REGISTERS = {False: 32, True: 48}
"""Room for 8, where only what puts back the last tile spills; and for 5 where signs are read."""


class Tuning(NamedTuple):
    """What differs with the size of an element; measured with 64 Mi of them on an H200."""

    rounds: int
    bins: int
    programs: int
    """Per multiprocessor at most. Writing wants many, so that some begin when others end; counting wants few."""
    least_span: int
    """Elements that a program has at least, lest all rows together take more than a sixteenth of the tensor."""


TUNING = {
    2: Tuning(rounds=2, bins=512, programs=24, least_span=16384),
    4: Tuning(rounds=3, bins=2048, programs=3, least_span=32768),
}
"""By the bytes of an element."""


def pick_largest(x: Tensor, picks: Picks) -> tuple[Tensor, ...]:
    check_dense("pick_largest", x)
    made = packer(Layout(x.shape, x.stride(), x.dtype, x.device), picks)
    return reference_picks.pick_largest(x, picks) if made is None else made.pick(x)


def put_back(
    values: Tensor,
    places: Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    picks: Picks,
    signs: Tensor | None = None,
) -> Tensor:
    check_picks(values, places, picks, signs)
    layout = Layout(torch.Size(shape), tuple(stride), values.dtype, values.device)
    made = packer(layout, picks)
    if made is None:
        return reference_picks.put_back(values, places, shape, stride, picks, signs)
    return made.put_back(values, places, signs)


@lru_cache(maxsize=4096)
def packer(layout: Layout, picks: Picks) -> Picker | None:
    return Picker(layout, picks) if layout.dtype in DTYPES and picks.k and picks.n < 2**31 else None


class Finding(NamedTuple):
    """The launches that pick, once the window is known, in their order."""

    rounds: tuple[Launch, ...]
    writing: Launch
    signing: Launch | None


class Picker:
    """All launches for one layout."""

    __slots__ = ("findings", "layout", "picks", "putting", "window", "work")

    def __init__(self, layout: Layout, picks: Picks) -> None:
        n, tiles, size, native = picks.n, picks.tiles, layout.dtype.itemsize, is_native(layout.device)
        tuning = TUNING[size]
        most = min(tuning.programs * multiprocessors(layout.device), math.ceil(n / tuning.least_span))
        each = math.ceil(tiles / most / CHUNK) * CHUNK
        programs = math.ceil(tiles / each)
        room = triton.next_power_of_2(programs)
        spans = (n, each, programs, room)
        kind, block = picks.kind.name, picks.kind.block
        reads: dict[str, Any] = {"reads": PATTERNS[size]}
        both = {**reads, "writes": PATTERNS[size], "num_warps": WARPS}
        counting = {**reads, "num_warps": WARPS, "maxnreg": REGISTERS}

        def finding(aligned: bool) -> Finding:
            count, how = (*spans, tuning.rounds, tuning.bins), (ROWS, aligned, native)
            rounds = [
                Launch(round_kernel, programs, *count, number, *how, **counting) for number in range(tuning.rounds)
            ]
            writing = Launch(write_kernel, programs, *spans, kind, block, *how, **both, maxnreg=REGISTERS)
            signed = (n, ROWS, NAMES[layout.dtype], aligned)
            signing = Launch(signs_kernel, math.ceil(tiles / CHUNK), *signed, **counting) if picks.signed else None
            return Finding(tuple(rounds), writing, signing)

        sample = (n, picks.k, *_ranks(n, picks.k), room, tuning.rounds, tuning.bins, n <= SAMPLE.value)
        self.layout = layout
        self.picks = picks
        self.work = STATE.value + 2 * room + (tuning.rounds * COPIES.value + programs) * tuning.bins
        self.window = Launch(window_kernel, 1, *sample, **reads, num_warps=WINDOW_WARPS)
        self.findings = (finding(False), finding(True))
        """For memory that begins anywhere, and for memory that can be read by 16 bytes."""
        if picks.kind is Kind.BITS:
            self.putting = Launch(put_bits_kernel, tiles, n, picks.signed, **both)
        else:
            how = (kind, block, picks.signed, native)
            self.putting = Launch(put_kernel, tiles, n, *how, **both, maxnreg=PUT_REGISTERS[picks.signed])

    def pick(self, x: Tensor) -> tuple[Tensor, ...]:
        picks, device = self.picks, self.layout.device
        places = torch.empty(picks.nbytes, dtype=torch.uint8, device=device)
        values = torch.empty(picks.k, dtype=self.layout.dtype, device=device)
        work = torch.empty(self.work, dtype=torch.int32, device=device)
        finding = self.findings[x.data_ptr() % 16 == 0]
        self.window(x, work)
        for count in finding.rounds:
            count(x, work)
        finding.writing(x, values, work, places)
        if finding.signing is None:
            return values, places
        signs = torch.empty(picks.sign_bytes(values.itemsize), dtype=torch.uint8, device=device)
        finding.signing(x, signs, work)
        return values, places, signs

    def put_back(self, values: Tensor, places: Tensor, signs: Tensor | None = None) -> Tensor:
        out = self.layout.empty()
        self.putting(values, out, places, places if signs is None else signs)
        return out


def _ranks(n: int, k: int) -> tuple[int, int]:
    """Which of the sampled elements, from the largest, bound the window in which the k-th largest of all must lie."""
    taken = min(n, SAMPLE.value)
    expected, part = (taken * k / n, k / n) if n else (0.0, 0.0)
    off = SIGMAS * math.sqrt(taken * part * (1 - part)) + 2 if n > taken else 0
    return math.floor(expected - off), math.ceil(expected + off)
