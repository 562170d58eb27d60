"""Calibration: how fast this device copies, multiplies, packs and unpacks. Measured once, then remembered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slimgrad import kernels
from slimgrad.codecs import Blocks, Bounded, Codec, Demand, FewBit, Lossless, Offload, Quant, TopK
from slimgrad.errors import SpecError
from slimgrad.kernels import Chain, Layout, Step
from slimgrad.kernels.codes import code_bytes
from slimgrad.kernels.groups import Groups
from slimgrad.ops import fewbit_function
from slimgrad.ops.grouped import GroupedFunction
from slimgrad.profiler.meter import measured_step
from slimgrad.spec import Need, Value
from slimgrad.tables.store import remembered

Progress = Callable[[int, int, str], None]
"""Steps done, steps in all, and what is next."""

SIZES = {"cpu": (2**12, 2**20), "cuda": (2**23, 2**25)}
"""Elements of the tensors that are timed, by device: what a call costs by itself shows in the small one. On a GPU that
one takes longer than its launch takes the host, which a step hides behind what the GPU computes."""

QUICK = 0.2
"""Of the timed calls, the share that was faster than what is told: a machine shared with others is slow now and then,
and never too fast."""

LINK = 2e10
"""Bytes per second to the host and back where that was not measured: what PCIe 4 carries, and pinned memory takes."""

FUSED, GROUPED = "fused", "grouped"
"""The keys of the rates of ops that compute a nonlinearity: one keeps a derivative, the other what it is given."""

CHAINED = "chained"
"""The key of the rate at which a norm is made of groups."""

TOGETHER, MOST_TOGETHER = 2e-3, 100
"""Seconds of work that a device which runs behind the host is given before it is waited for, and calls at the most."""

ROW = 1024
"""Elements of a row of what is normed."""

SPARE_BYTES = 256
"""Of a temporary that is not worth telling."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Rate(Value):
    """What one codec costs for one need: seconds per call and per byte, and temporaries per byte."""

    call: float
    pack: float
    unpack: float
    pack_scratch: float = 0.0
    """Bytes alive for a moment while it packs, besides what is packed, per byte of the tensor."""
    unpack_scratch: float = 0.0

    def seconds(self, size: int, reads: int) -> float:
        """To pack a tensor of so many bytes once, and to unpack it for so many readers."""
        return self.call * (1 + reads) + size * (self.pack + reads * self.unpack)


@dataclass(frozen=True, kw_only=True, repr=False)
class OperatorCost(Value):
    """What one kind of operator takes."""

    seconds: float
    scratch: int = 0
    """Bytes alive while it runs, besides what it is given and what it returns: workspaces of convolutions."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Calibration(Value):
    """Speeds of one device."""

    device: str
    torch: str
    copy: float
    """Bytes per second that an elementwise op reads and writes."""
    flops: Mapping[str, float]
    """Floating-point operations per second of matrix products, by dtype."""
    launch: float
    """Seconds that an op takes at the least."""
    rates: Mapping[str, Rate]
    """By `rate_key`."""
    operators: Mapping[str, OperatorCost] = field(default_factory=dict)
    """Of a model's own operators, as Timeline.operators has them, those that were timed."""

    def rate(self, codec: Codec, need: Need) -> Rate:
        found = self.rates.get(rate_key(codec, need))
        guessed = 1 / LINK if isinstance(codec, Offload) else 3 / self.copy
        return found or Rate(call=10 * self.launch, pack=guessed, unpack=guessed)

    def op_rate(self, op: Codec) -> Rate:
        """Of a nonlinearity that a fused op computes: `pack` is its forward, `unpack` its backward."""
        found = self.rates.get(GROUPED if isinstance(op, Quant) else FUSED)
        return found or Rate(call=4 * self.launch, pack=2.2 / self.copy, unpack=2.2 / self.copy)

    @property
    def chained(self) -> Rate:
        """Of what is made of groups by one kernel, per byte of the result: `unpack`."""
        return self.rates.get(CHAINED) or Rate(call=4 * self.launch, pack=0.0, unpack=1.5 / self.copy)

    def op_seconds(self, flops: int, moved: int, dtype: str) -> float:
        """Of an op that was not timed, by what limits it."""
        speed = self.flops.get(dtype) or self.flops["float32"]
        return max(self.launch, flops / speed, moved / self.copy)


def rate_key(codec: Codec, need: Need) -> str:
    """Codecs of one class cost the same but for their bits; a mask costs other than an index."""
    bits = getattr(codec, "bits", None)
    name = type(codec).__name__ if bits is None else f"{type(codec).__name__}({bits})"
    return f"{name} {need}" if isinstance(codec, Lossless) else name


@dataclass(frozen=True)
class Case:
    """What is timed under one key."""

    codec: Codec
    demand: Demand
    make: Callable[[int, torch.device], Tensor]


def _values(n: int, device: torch.device) -> Tensor:
    return torch.randn(n, device=device)


def _indices(n: int, device: torch.device) -> Tensor:
    """Of pools that took the first element of each window in planes of 16 by 16."""
    steps = 2 * torch.arange(8, device=device)
    return (16 * steps[:, None] + steps).repeat(n // 64, 1, 1)


def _rows(n: int, device: torch.device) -> Tensor:
    return torch.randn(n // 64, 64, device=device)


WINDOWS = {"input_size": (16, 16), "kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)}

CASES = (
    Case(Lossless(), Demand(need=Need.MASK, fn="relu"), _values),
    Case(Lossless(), Demand(need=Need.INDEX, fn="window", detail=WINDOWS), _indices),
    *(Case(Quant(bits=bits), Demand(need=Need.VALUES), _values) for bits in (8, 4, 3, 2)),
    Case(FewBit(bits=3), Demand(need=Need.DERIVATIVE, fn="silu"), _values),
    Case(TopK(keep=0.1), Demand(need=Need.OPERAND), _values),
    Case(Bounded(bound=0.01, relative=True), Demand(need=Need.VALUES), _values),
    Case(Blocks(keep=0.5, means=16, unbiased=True), Demand(need=Need.OPERAND), _rows),
    Case(Offload(), Demand(need=Need.VALUES), _values),
)


FOUR = Groups(4, 128)


def _fused_ops() -> dict[str, tuple[Callable[[Tensor], Tensor], Callable[[int], int]]]:
    """Each with the bytes that it holds of so many elements."""
    few = fewbit_function("gelu", 3), lambda size: code_bytes(size, 3)
    return {FUSED: few, GROUPED: (GroupedFunction("gelu", FOUR), FOUR.nbytes)}


def cases_for(device: torch.device) -> list[Case]:
    """Those that free anything there."""
    return [case for case in CASES if case.codec.works_on(device)]


def speeds_of(device: torch.device, progress: Progress) -> Calibration:
    """Measured in seconds, and then remembered for this device and version of torch."""
    return remembered(f"calibration 8: {place_of(device)}", Calibration, lambda: measure(device, progress))


def place_of(device: torch.device) -> str:
    """What speeds depend on."""
    return f"{device_name(device)}, {torch.__version__}, {torch.get_num_threads()} threads"


def usable(device: torch.device | str) -> torch.device:
    try:
        place = torch.device(device)
        if torch.empty(1, device=place).is_meta:
            raise SpecError("calibrate: nothing is computed on 'meta', so that it has no speed; try 'cpu' or 'cuda:0'")
    except (RuntimeError, AssertionError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise SpecError(
            f"calibrate: expected a device that is here, such as 'cpu' or 'cuda:0'; found {device!r} ({why})"
        ) from error
    return place


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def measure(device: torch.device, progress: Progress) -> Calibration:
    """Measure now, whatever is remembered."""
    cases = cases_for(device)
    steps = len(cases) + 5
    progress(0, steps, "copying")
    copy, launch = _copy_speed(device)
    progress(1, steps, "multiplying")
    flops = {str(d).removeprefix("torch."): _flops(device, d) for d in (torch.float32, torch.bfloat16)}
    rates = {}
    for number, case in enumerate(cases):
        progress(2 + number, steps, rate_key(case.codec, case.demand.need))
        rates[rate_key(case.codec, case.demand.need)] = _rate(case, device)
    for number, (key, (op, held)) in enumerate(_fused_ops().items()):
        progress(steps - 3 + number, steps, key)
        rates[key] = _fitted(*(_Costs.of_op(op, held(size), size, device) for size in _sizes(device)))
    progress(steps - 1, steps, CHAINED)
    rates[CHAINED] = _fitted(*(_Costs.of_chain(size, device) for size in _sizes(device)))
    progress(steps, steps, "done")
    return Calibration(
        device=device_name(device), torch=torch.__version__, copy=copy, flops=flops, launch=launch, rates=rates
    )


def _copy_speed(device: torch.device) -> tuple[float, float]:
    # Of the size at which codecs are timed: what fits a CPU's caches moves several times as fast as what does not.
    large, small = (torch.randn(size, device=device) for size in (_sizes(device)[1], 64))
    seconds, launch = seconds_of(lambda: large + 1, device), seconds_of(lambda: small + 1, device)
    return 2 * large.nbytes / seconds, launch


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    size = 4096 if device.type == "cuda" else 512
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / seconds_of(lambda: a @ a, device)


def _rate(case: Case, device: torch.device) -> Rate:
    return _fitted(*(_Costs.of(case, size, device) for size in _sizes(device)))


def _sizes(device: torch.device) -> tuple[int, int]:
    return SIZES.get(device.type, SIZES["cuda"])


def _fitted(small: _Costs, large: _Costs) -> Rate:
    more = large.bytes - small.bytes
    pack, unpack = max(0.0, large.pack - small.pack) / more, max(0.0, large.unpack - small.unpack) / more
    call = max(0.0, small.pack + small.unpack - small.bytes * (pack + unpack)) / (2 if small.pack else 1)
    return Rate(
        call=call, pack=pack, unpack=unpack, pack_scratch=large.pack_scratch, unpack_scratch=large.unpack_scratch
    )


@dataclass(frozen=True)
class _Costs:
    """Of one tensor: seconds, and temporaries per byte."""

    bytes: int
    pack: float
    unpack: float
    pack_scratch: float = 0.0
    unpack_scratch: float = 0.0

    @classmethod
    def of(cls, case: Case, size: int, device: torch.device) -> _Costs:
        x = case.make(size, device)
        packed = case.codec.pack(x, case.demand)

        def pack() -> Any:
            return case.codec.pack(x, case.demand)

        def unpack() -> Any:
            return case.codec.unpack(packed)

        scratch = (
            max(0, measured_step(step, device).peak - left - SPARE_BYTES) / x.nbytes
            for step, left in ((pack, packed.nbytes), (unpack, x.nbytes))
        )
        return cls(x.nbytes, seconds_of(pack, device), seconds_of(unpack, device), *scratch)

    @classmethod
    def of_chain(cls, size: int, device: torch.device) -> _Costs:
        """A layer norm in bf16, of what is kept in 4 bits: per byte of the result, all of it for unpacking."""
        shape = (size // ROW, ROW)
        packed = kernels.pack_groups(torch.randn(shape, device=device), FOUR)
        by_row, by_column = ("spread", ROW, 0), ("spread", 1, ROW)
        steps = (Step("sub", *by_row), Step("mul", *by_row), Step("mul", *by_column), Step("add", *by_column))
        chain, operands = Chain(FOUR, steps), [torch.ones(step.period or shape[0], device=device) for step in steps]
        layout = Layout(torch.Size(shape), (ROW, 1), torch.bfloat16, device)
        chainer = kernels.chainer(layout, chain, tuple(operand.dtype for operand in operands))
        return cls(2 * size, 0.0, seconds_of(lambda: chainer.unpack(packed, operands), device))

    @classmethod
    def of_op(cls, op: Callable[[Tensor], Tensor], held: int, size: int, device: torch.device) -> _Costs:
        """Forward of a fused op, which holds so many bytes, for packing, and its backward for unpacking."""
        x = _values(size, device).requires_grad_()
        with torch.enable_grad():
            y = op(x)
        dy = torch.ones_like(y)

        def forward() -> Any:
            return op(x)

        def backward() -> Any:
            return torch.autograd.grad(y, x, dy, retain_graph=True)

        scratch = (  # beside what is returned, and held
            max(0, measured_step(step, device).peak - x.nbytes - left - SPARE_BYTES) / x.nbytes
            for step, left in ((forward, held), (backward, 0))
        )
        return cls(x.nbytes, seconds_of(forward, device), seconds_of(backward, device), *scratch)


def seconds_of(run: Callable[[], Any], device: torch.device, *, budget: float = 0.1) -> float:
    """Over as many calls as fit the budget, at least five, after two to warm up.

    A device that runs behind the host is given several at once: in a step nobody waits after each.
    """
    once = max(min(_timed(run, 2, 1, device)), 1e-7)
    together = 1 if device.type == "cpu" else max(1, min(MOST_TOGETHER, math.ceil(TOGETHER / once)))
    found = sorted(_timed(run, max(5, min(200, math.ceil(budget / once / together))), together, device))
    return found[int(QUICK * len(found))]


def _timed(run: Callable[[], Any], times: int, together: int, device: torch.device) -> list[float]:
    """Seconds per call, so many times; the device is waited for after so many calls together."""
    found = []
    for _ in range(times):
        _wait(device)
        start = time.perf_counter()
        for _ in range(together):
            run()
        _wait(device)
        found.append((time.perf_counter() - start) / together)
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
