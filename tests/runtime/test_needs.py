"""The needs table against torch itself: backward gets only what the table says it reads, and must not notice."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from slimgrad.codecs import Demand, Lossless, Packed
from slimgrad.runtime import needs
from slimgrad.runtime.frame import ROOT
from slimgrad.runtime.graph import nodes_from, reveal
from slimgrad.runtime.lesson import Owners, lesson
from slimgrad.runtime.tickets import Held, Kept, Reader, sized
from slimgrad.runtime.watch import WatchFrame
from slimgrad.spec import Need
from tests.runtime.samples import BITS, CPU_SAMPLES, CUDA_SAMPLES, DTYPES, NAN, SAMPLES, Sample

CHEAP = (Need.NOTHING, Need.MASK, Need.INDEX)
"""Needs for which a reconstruction must give the same gradients, bit for bit."""

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ON_CPU, ON_CUDA = (*SAMPLES, *CPU_SAMPLES), (*SAMPLES, *CUDA_SAMPLES)
BY_NAME = {sample.name: sample for sample in (*ON_CPU, *CUDA_SAMPLES)}

OTHER_BACKENDS = {
    "LinearBackward0": "nested tensors and MPS; CPU and CUDA take linear apart into addmm or mm",
    "MiopenBatchNormBackward0": "ROCm",
    "ScaledDotProductFusedAttentionOverrideableBackward0": "backends outside torch",
}
"""Nodes of the table that no dense tensor on a CPU or on CUDA meets, and who does."""

CPU_ONLY = {
    "MkldnnConvolutionBackward0",
    "ScaledDotProductFlashAttentionForCpuBackward0",
    # under deterministic algorithms, which the walk needs, CUDA pads by indexing instead
    "ReplicationPad1DBackward0",
    "ReplicationPad2DBackward0",
    "ReplicationPad3DBackward0",
}
CUDA_ONLY = {
    "CudnnBatchNormBackward0",
    "CudnnConvolutionBackward0",
    "FusedRmsNormBackward0",
    "ScaledDotProductCudnnAttentionBackward0",
    "ScaledDotProductEfficientAttentionBackward0",
    "ScaledDotProductFlashAttentionBackward0",
}
"""Nodes of the table that only one kind of device makes."""

SAVED_ONLY_IF_READ = {
    "AddmmBackward0",
    "MmBackward0",
    "BmmBackward0",
    "BaddbmmBackward0",
    "AddbmmBackward0",
    "MvBackward0",
    "AddmvBackward0",
    "DotBackward0",
}
"""Products that save a factor only when its partner wants a gradient, so that their NOTHING never comes up."""

NOT_TWICE = {("PreluKernelBackward0", "self"): "the second order asks x >= 0 where the first asked x > 0"}
"""Slots whose second-order gradient needs more than the first one, and what."""


# --- looking at what a call saves -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Saved:
    """One tensor that a call saves."""

    node: str
    slot: str
    demand: Demand
    shape: torch.Size
    dtype: torch.dtype

    @property
    def need(self) -> Need:
        return self.demand.need

    @property
    def served(self) -> bool:
        """Whether a reconstruction can be handed to backward instead."""
        return self.need in CHEAP and Lossless().serves(self.demand, self.dtype)

    @property
    def key(self) -> tuple[str, str]:
        return self.node, self.slot


class All:
    """The set of everything."""

    def __contains__(self, item: object) -> bool:
        return True


def look(sample: Sample, device: torch.device, dtype: torch.dtype) -> dict[int, Saved]:
    """What the call saves, by the order of saving: read from the whole graph, without the gate's shortcuts."""
    reader, tickets = Reader(), []

    def pack(tensor: Tensor) -> Held:
        tickets.append(Held(Kept(tensor), reader))
        return tickets[-1]

    with saved_tensors_hooks(pack, lambda held: held.open()):
        outs = sample.run(device, dtype)
    found = list(reveal([out.grad_fn for out in outs], 0, All(), reader))  # type: ignore[arg-type]
    shapes = {(node, slot): held.ticket.tensor.shape for held, node, slot in found}
    saved: dict[int, Saved] = {}
    for held, node, slot in found:
        answer = needs.answer_in_module(node, slot, sample.module, device.type)
        demand = Demand(need=answer.need, fn=answer.fn, detail=answer.detail)
        if answer.sibling is not None:
            demand = sized(demand, node.name(), shapes[node, answer.sibling])
        tensor = held.ticket.tensor
        saved[tickets.index(held)] = Saved(node.name(), slot, demand, tensor.shape, tensor.dtype)
    return saved


def spoil(tensor: Tensor) -> Tensor:
    """Fill with what would show in any gradient that reads it."""
    return tensor.fill_(NAN if tensor.is_floating_point() else 1 << (8 * tensor.itemsize - 3))


class Reconstruct:
    """Saved-tensor hooks that keep, of the tensors in `slots`, only what Lossless keeps."""

    def __init__(self, slots: Mapping[int, Saved]) -> None:
        self.slots = slots
        self.count = 0
        self.bytes: dict[int, int] = {}
        self.unpacked: set[int] = set()

    def __enter__(self) -> Reconstruct:
        self.hooks = saved_tensors_hooks(self.pack, self.unpack)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.hooks.__exit__(*error)

    def pack(self, tensor: Tensor) -> Tensor | tuple[int, Packed]:
        number, self.count = self.count, self.count + 1
        saved = self.slots.get(number)
        if saved is None:
            return tensor.detach()
        assert (tensor.shape, tensor.dtype) == (saved.shape, saved.dtype)
        packed = Lossless().pack(tensor, saved.demand)
        self.bytes[number] = packed.nbytes
        return number, packed

    def unpack(self, kept: Tensor | tuple[int, Packed]) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        number, packed = kept
        self.unpacked.add(number)
        tensor = Lossless().unpack(packed)
        return spoil(tensor) if packed.demand.need is Need.NOTHING else tensor


def promised(saved: Saved) -> int:
    """What a tensor may cost: nothing, a bit per element, or the smallest integer that can name the winner."""
    count = math.prod(saved.shape)
    if saved.need is Need.NOTHING:
        return 0
    if saved.need is Need.MASK:
        return -(-count // 8)
    if math.prod(saved.demand.detail.get("kernel_size", [math.inf])) <= 255:
        return count
    plane = math.prod(saved.demand.detail["input_size"])
    return count * (1 if plane <= 256 else 2 if plane <= 32768 else 4)


# --- gradients ------------------------------------------------------------------------------------------------------

Gradients = list[Tensor | None]


def leaves(outs: Sequence[Tensor]) -> list[Tensor]:
    """The leaves behind `outs`, in an order that depends on the graph alone."""
    return [node.variable for node in nodes_from([out.grad_fn for out in outs], 0) if hasattr(node, "variable")]


def once(sample: Sample, outs: Sequence[Tensor]) -> Gradients:
    return list(torch.autograd.grad(outs, leaves(outs), [sample.arriving(out) for out in outs], allow_unused=True))


def twice(sample: Sample, outs: Sequence[Tensor]) -> Gradients:
    """The first gradients and those of the first gradients, for all leaves and for what arrives."""
    inputs, arriving = leaves(outs), [sample.arriving(out).requires_grad_() for out in outs]
    first = torch.autograd.grad(outs, inputs, arriving, create_graph=True, allow_unused=True)
    roots = [gradient for gradient in first if gradient is not None and gradient.requires_grad]
    seeds = [sample.arriving(root).flip(0) if root.dim() else sample.arriving(root) for root in roots]
    second = torch.autograd.grad(roots, [*inputs, *arriving], seeds, allow_unused=True)
    return [*first, *second]


def same_bits(left: Gradients, right: Gradients) -> bool:
    assert len(left) == len(right)
    return all(_same(a, b) for a, b in zip(left, right, strict=True))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    kind = BITS[a.dtype]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@pytest.fixture(autouse=True)
def reproducible() -> Iterator[None]:
    """The same kernels in every run, on a GPU too; where torch has none, it warns, and exact sums make up for it."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*deterministic")
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(before)


# --- the walk -------------------------------------------------------------------------------------------------------


def cases(dtypes: Sequence[torch.dtype]) -> list[Any]:
    """Every sample on every device, in those of its dtypes that are in `dtypes`."""
    return [
        pytest.param(
            device, sample, dtype, id=f"{device}-{sample}-{name}", marks=[] if device == CPU else [pytest.mark.gpu]
        )
        for device, samples in ((CPU, ON_CPU), (CUDA, ON_CUDA))
        for sample in samples
        for dtype in sample.dtypes
        for name in [str(dtype).removeprefix("torch.")]
        if dtype in dtypes
    ]


def served(sample: Sample, device: torch.device, dtype: torch.dtype) -> dict[int, Saved]:
    return {number: saved for number, saved in look(sample, device, dtype).items() if saved.served}


@pytest.mark.parametrize(("device", "sample", "dtype"), cases(DTYPES))
def test_backward_does_not_notice_that_it_gets_only_what_the_table_says_it_reads(
    device: torch.device, sample: Sample, dtype: torch.dtype
) -> None:
    slots = served(sample, device, dtype)
    if not slots:  # all that is saved is needed as it is
        return
    stock = once(sample, sample.run(device, dtype))
    with Reconstruct(slots) as hooks:
        outs = sample.run(device, dtype)
    assert same_bits(stock, once(sample, outs)), [saved.key for saved in slots.values()]
    assert hooks.unpacked == set(slots)
    assert hooks.bytes == {number: promised(saved) for number, saved in slots.items()}
    for saved in slots.values():
        assert Lossless().promised(saved.shape, saved.dtype, saved.demand) == promised(saved)


# --- second order ---------------------------------------------------------------------------------------------------

TWICE = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(("device", "sample", "dtype"), cases(TWICE))
def test_the_gradient_of_the_gradient_does_not_notice_either(
    device: torch.device, sample: Sample, dtype: torch.dtype
) -> None:
    slots = {number: saved for number, saved in served(sample, device, dtype).items() if saved.key not in NOT_TWICE}
    if not slots:
        return
    try:
        stock = twice(sample, sample.run(device, dtype))
    except RuntimeError as error:
        assert "not implemented" in str(error), error  # noqa: PT017  (stock torch cannot: nothing to compare with)
        return
    with Reconstruct(slots):
        outs = sample.run(device, dtype)
    assert same_bits(stock, twice(sample, outs)), [saved.key for saved in slots.values()]


@pytest.mark.parametrize("key", NOT_TWICE, ids=".".join)
def test_slots_listed_as_not_fit_for_second_order_are_not(key: tuple[str, str]) -> None:
    assert any(_differs_twice(sample, key) for sample in ON_CPU)


def _differs_twice(sample: Sample, key: tuple[str, str]) -> bool:
    slots = {number: saved for number, saved in served(sample, CPU, torch.float32).items() if saved.key == key}
    if not slots:
        return False
    with Reconstruct(slots):
        outs = sample.run(CPU, torch.float32)
    return not same_bits(twice(sample, sample.run(CPU, torch.float32)), twice(sample, outs))


# --- is the table complete, and is everything in it real? -----------------------------------------------------------


@pytest.mark.parametrize("node", needs.TABLE)
def test_every_node_and_slot_of_the_table_exists_in_torch(node: str) -> None:
    kind = getattr(torch._C._functions, node)
    assert [slot for slot in needs.TABLE[node] if not hasattr(kind, f"_saved_{slot}")] == []


@dataclass
class Pretended:
    """A backward node in some circumstance."""

    edge: Any
    training: bool
    next_functions: tuple[tuple[Any, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.next_functions = ((self.edge, 0),) * 3

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_saved_"):
            raise AttributeError(name)
        return self.training if name == "_saved_training" else 1


LEAF = SimpleNamespace(name=lambda: "torch::autograd::AccumulateGrad", variable=torch.empty(0))
COMPUTED = SimpleNamespace(name=lambda: "MulBackward0")


def possible(row: needs.Row) -> set[Need]:
    """Every need that a row may answer."""
    if isinstance(row, needs.Answer):
        return {row.need}
    return {row(Pretended(edge, mode)).need for edge in (None, LEAF, COMPUTED) for mode in (True, False)}  # type: ignore[arg-type]


@cache
def seen(device: torch.device) -> frozenset[tuple[str, str, Need]]:
    """All that the samples save on this device; cheap needs only where the walk above has put them to the test."""
    samples = ON_CUDA if device == CUDA else ON_CPU
    found = [saved for sample in samples for saved in look(sample, device, sample.dtypes[0]).values()]
    return frozenset((*saved.key, saved.need) for saved in found if saved.served or saved.need not in CHEAP)


def elsewhere(device: torch.device) -> set[str]:
    """Nodes of the table that this device does not make."""
    return {*OTHER_BACKENDS, *(CPU_ONLY if device == CUDA else CUDA_ONLY)}


def test_every_node_of_the_table_is_met_by_a_sample_or_known_to_live_elsewhere(device: torch.device) -> None:
    assert set(needs.TABLE) - {node for node, _, _ in seen(device)} == elsewhere(device)


def test_every_row_that_may_need_less_than_the_tensor_is_put_to_the_test(device: torch.device) -> None:
    wanted = {
        (node, slot, need)
        for node, rows in needs.TABLE.items()
        for slot, row in rows.items()
        for need in possible(row).intersection(CHEAP)
        if node not in elsewhere(device) and not (node in SAVED_ONLY_IF_READ and need is Need.NOTHING)
    }
    assert wanted - seen(device) == set()


# --- needs that depend on the node ----------------------------------------------------------------------------------

CONV, BN = "ConvolutionBackward0", "NativeBatchNormBackward0"

EXPECTED: dict[str, dict[str, Need]] = {
    "linear 2d": {"AddmmBackward0.mat1": Need.OPERAND, "AddmmBackward0.mat2": Need.VALUES},
    "linear 2d no bias": {"MmBackward0.self": Need.OPERAND, "MmBackward0.mat2": Need.VALUES},
    "linear 3d": {"AddmmBackward0.mat1": Need.OPERAND, "AddmmBackward0.mat2": Need.VALUES},
    "linear 3d no bias": {"MmBackward0.self": Need.OPERAND, "MmBackward0.mat2": Need.VALUES},
    "linear frozen weight": {"AddmmBackward0.mat2": Need.VALUES},
    "linear input without grad": {"AddmmBackward0.mat1": Need.OPERAND},
    "mm of activations": {"MmBackward0.self": Need.VALUES, "MmBackward0.mat2": Need.VALUES},
    "bmm of activations": {"BmmBackward0.self": Need.VALUES, "BmmBackward0.mat2": Need.VALUES},
    "conv2d": {f"{CONV}.input": Need.OPERAND, f"{CONV}.weight": Need.VALUES},
    "conv2d channels last": {f"{CONV}.input": Need.OPERAND, f"{CONV}.weight": Need.VALUES},
    "conv2d frozen weight": {f"{CONV}.input": Need.NOTHING, f"{CONV}.weight": Need.VALUES},
    "conv2d frozen weight trainable bias": {f"{CONV}.input": Need.NOTHING, f"{CONV}.weight": Need.VALUES},
    "conv2d computed weight": {f"{CONV}.input": Need.VALUES, f"{CONV}.weight": Need.VALUES},
    "conv2d input without grad": {f"{CONV}.input": Need.OPERAND, f"{CONV}.weight": Need.NOTHING},
    "conv transpose2d frozen weight": {f"{CONV}.input": Need.NOTHING, f"{CONV}.weight": Need.VALUES},
    "batch norm train trainable weight trainable bias": {f"{BN}.input": Need.VALUES},
    "batch norm train frozen weight frozen bias": {f"{BN}.input": Need.VALUES},
    "batch norm train no weight no bias": {f"{BN}.input": Need.VALUES},
    "batch norm eval trainable weight trainable bias": {f"{BN}.input": Need.VALUES},
    "batch norm eval frozen weight trainable bias": {f"{BN}.input": Need.NOTHING},
    "batch norm eval frozen weight frozen bias": {f"{BN}.input": Need.NOTHING},
    "batch norm eval no weight no bias": {f"{BN}.input": Need.NOTHING},
    "layer norm frozen": {"NativeLayerNormBackward0.input": Need.VALUES},
    "prelu trainable slope": {"PreluKernelBackward0.self": Need.VALUES, "PreluKernelBackward0.weight": Need.VALUES},
    "prelu frozen slope": {"PreluKernelBackward0.self": Need.MASK, "PreluKernelBackward0.weight": Need.VALUES},
    "rrelu training": {"RreluWithNoiseBackward0.self": Need.NOTHING},
    "rrelu eval": {"RreluWithNoiseBackward0.self": Need.MASK},
    "max pool2d": {
        "MaxPool2DWithIndicesBackward0.self": Need.NOTHING,
        "MaxPool2DWithIndicesBackward0.result1": Need.INDEX,
    },
    "nll": {"NllLossBackward0.self": Need.NOTHING},
    "dropout function": {"MulBackward0.other": Need.VALUES},
    "dropout module": {"MulBackward0.other": Need.MASK},
}
"""What a call saves that is not EXACT: all of it."""


@pytest.mark.parametrize("name", EXPECTED)
def test_a_call_saves_exactly_what_its_circumstances_ask_for(name: str) -> None:
    saved = look(BY_NAME[name], CPU, torch.float32).values()
    assert {".".join(found.key): found.need for found in saved if found.need is not Need.EXACT} == EXPECTED[name]


DETAILS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "hardtanh -0.5 2": ("hardtanh", {"min_val": -0.5, "max_val": 2.0}),
    "relu6": ("hardtanh", {"min_val": 0, "max_val": 6}),
    "threshold 0.25": ("threshold", {"threshold": 0.25}),
    "softshrink": ("shrink", {"lambd": 0.5}),
    "clamp": ("clamp", {"min": -1, "max": 2}),
    "clamp min only nasty": ("clamp", {"min": 0.5, "max": None}),
    "clamp_max nasty": ("clamp", {"max": 0.5}),
    "gelu tanh": ("gelu", {"approximate": "tanh"}),
    "softplus": ("softplus", {"beta": 2.0, "threshold": 5.0}),
    "elu in place": ("elu", {"alpha": 0.5, "scale": 1.0, "input_scale": 1.0, "saved": "result"}),
    "celu": ("celu", {"alpha": 2.0}),
    "max pool2d": (
        "window",
        {"input_size": (8, 6), "kernel_size": (2, 2), "stride": (2, 2), "padding": (0, 0), "dilation": (1, 1)},
    ),
    "adaptive max pool3d unbatched": ("plane", {"input_size": (8, 8, 8)}),
}


@pytest.mark.parametrize("name", DETAILS)
def test_an_answer_carries_the_constants_of_its_function(name: str) -> None:
    demands = [saved.demand for saved in look(BY_NAME[name], CPU, torch.float32).values() if saved.demand.fn]
    assert [(demand.fn, dict(demand.detail)) for demand in demands] == [DETAILS[name]]


@pytest.mark.parametrize("name", ["threshold 0.1", "hardtanh -0.1 0.1", "clamp 0.1", "clamp min after max nasty"])
def test_bounds_that_one_bit_cannot_stand_for_are_not_served(name: str) -> None:
    (saved,) = look(BY_NAME[name], CPU, torch.float32).values()
    assert saved.need is Need.MASK
    assert not saved.served


# --- what nobody has heard of ---------------------------------------------------------------------------------------


class Relu(torch.autograd.Function):
    """A function of the user's own, with a name that sounds familiar."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.exp())
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, arriving: Tensor) -> Tensor:
        x, other = ctx.saved_tensors
        return arriving * x * other


def test_an_unknown_node_needs_exactly_what_it_saved() -> None:
    saved = look(Sample("custom", lambda i: Relu.apply(i.made(3, 4))), CPU, torch.float32)
    assert [(found.node, found.slot, found.need) for found in saved.values()] == [
        ("ReluBackward", "saved_tensors[0]", Need.EXACT),
        ("ReluBackward", "saved_tensors[1]", Need.EXACT),
    ]


def test_an_unknown_slot_of_a_known_node_is_exact() -> None:
    node = torch.ones(3, requires_grad=True).relu().grad_fn
    assert needs.answer(node, "no such slot") == needs.EXACT


# --- the gate sees the same -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [sample for sample in ON_CPU if "nasty gradient" not in sample.name], ids=str)
def test_a_watched_forward_finds_the_owner_of_every_saved_tensor(sample: Sample) -> None:
    frame = WatchFrame()
    frame.enter(ROOT)
    try:
        outs = sample.run(CPU, torch.float32)
    finally:
        frame.leave(ROOT)
    modules = {} if sample.module is None else {ROOT: sample.module}
    learnt = lesson(frame, [out.grad_fn for out in outs], Owners({}, {}, {}), modules, {})
    found = zip(learnt.records, learnt.profile.sites, strict=True)
    sites = {record.index: (site.node, site.slot, site.need) for record, site in found}
    expected = {number: (*saved.key, saved.need) for number, saved in look(sample, CPU, torch.float32).items()}
    if sample.name == "checkpoint":  # saved by a node that hangs in no graph
        expected = dict.fromkeys(sites, (needs.CHECKPOINT, "input", Need.VALUES))
        assert sites
    assert sites == expected


# --- CUDA -----------------------------------------------------------------------------------------------------------

ATTENTION = "ScaledDotProduct{}AttentionBackward0"

ON_GPU: dict[str, tuple[str, str, Need]] = {
    "attention flash": (ATTENTION.format("Flash"), "query", Need.VALUES),
    "attention efficient": (ATTENTION.format("Efficient"), "query", Need.VALUES),
    "attention efficient mask": (ATTENTION.format("Efficient"), "attn_bias", Need.EXACT),
    "attention cudnn": (ATTENTION.format("Cudnn"), "query", Need.VALUES),
    "attention math": ("BmmBackward0", "self", Need.VALUES),
    "batch norm train trainable weight trainable bias with cudnn": ("CudnnBatchNormBackward0", "input", Need.VALUES),
    "batch norm train trainable weight trainable bias without cudnn": (BN, "input", Need.VALUES),
    "batch norm eval frozen weight frozen bias without cudnn": (BN, "input", Need.NOTHING),
    "cudnn convolution frozen weight": ("CudnnConvolutionBackward0", "self", Need.NOTHING),
    "conv2d frozen weight without cudnn": (CONV, "input", Need.NOTHING),
    "rms norm": ("FusedRmsNormBackward0", "input", Need.VALUES),
    "dropout function": ("NativeDropoutBackward0", "result1", Need.MASK),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_GPU)
def test_on_a_gpu_the_call_goes_through_the_node_that_the_table_names(name: str) -> None:
    sample = BY_NAME[name]
    found = look(sample, CUDA, sample.dtypes[0]).values()
    assert ON_GPU[name] in [(*saved.key, saved.need) for saved in found]
