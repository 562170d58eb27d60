"""Triton against the reference, bit for bit: on a GPU, and elsewhere through Triton's interpreter.

The interpreter must be chosen before triton is imported, for the whole process. So these tests run on CPU only where
TRITON_INTERPRET=1 is set already; test_interpreter.py starts such a process.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F

from slimgrad import kernels
from slimgrad.kernels import Interval, Pointwise
from slimgrad.kernels.groups import DTYPES, Groups
from tests.kernels.cases import (
    FLOATS,
    FORMATS,
    INF,
    INTEGERS,
    LEVELS,
    POOLS,
    RULES,
    SIZES,
    Pool,
    buckets,
    quantizable,
    same_bits,
    sample,
)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RELU = Interval(-INF, 0.0, closed=True, outside=True, nan=True)
NON_ZERO = Interval(0.0, 0.0, closed=True, outside=True, nan=True)


PLACES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> torch.device:
    pytest.importorskip("triton")
    return torch.device(request.param)


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_packed_bits_are_the_same_for_every_rule(place: torch.device, dtype: torch.dtype) -> None:
    x = sample(5000, dtype)
    for rule in RULES:
        packed = kernels.pack_bits(x.to(place), rule, force="triton")
        assert same_bits(packed.cpu(), kernels.pack_bits(x, rule)), rule


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
def test_packed_bits_are_the_same_for_every_size(place: torch.device, dtype: torch.dtype, n: int) -> None:
    x = sample(n, dtype)
    for rule in (RELU, Interval(0.0, 6.0, closed=False, outside=False, nan=False)):
        packed = kernels.pack_bits(x.to(place), rule, force="triton")
        assert same_bits(packed.cpu(), kernels.pack_bits(x, rule))


@pytest.mark.parametrize("offset", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool], ids=str)
def test_views_that_start_in_the_middle_of_a_storage_pack_the_same(
    place: torch.device, dtype: torch.dtype, offset: int
) -> None:
    x = sample(9000, dtype)
    packed = kernels.pack_bits(x.to(place)[offset:], NON_ZERO, force="triton")
    assert same_bits(packed.cpu(), kernels.pack_bits(x[offset:], NON_ZERO))


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=str)
def test_unpacked_values_are_the_same_bits(place: torch.device, dtype: torch.dtype, n: int) -> None:
    packed = kernels.pack_bits(sample(n, torch.float32), RELU)
    for on, off in LEVELS if dtype.is_floating_point else ((1.0, 0.0), (0.0, 1.0)):
        values = kernels.unpack_bits(packed.to(place), n, on, off, dtype, force="triton")
        assert same_bits(values.cpu(), kernels.unpack_bits(packed, n, on, off, dtype)), (on, off)


@pytest.mark.parametrize("pool", POOLS, ids=str)
def test_window_codes_and_indices_are_the_same(place: torch.device, pool: Pool) -> None:
    indices = pool.indices(place)
    codes = kernels.pack_window(indices, pool.geometry(), force="triton")
    assert torch.equal(codes.cpu(), kernels.pack_window(indices.cpu(), pool.geometry()))
    assert codes.stride() == indices.stride()
    back = kernels.unpack_window(codes, pool.geometry(), force="triton")
    assert torch.equal(back, indices)
    assert back.stride() == indices.stride()


def same_numbers(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, but for those of NaN, of which there are many."""
    return torch.equal(a.isnan(), b.isnan()) and same_bits(a.nan_to_num(1.0, INF, -INF), b.nan_to_num(1.0, INF, -INF))


@pytest.mark.parametrize("n", [129, 3100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", FORMATS, ids=str)
def test_groups_are_packed_and_unpacked_the_same(place: torch.device, how: Groups, dtype: torch.dtype, n: int) -> None:
    for kind, x in quantizable(n, dtype).items():
        packed = kernels.pack_groups(x, how)
        assert torch.equal(kernels.pack_groups(x.to(place), how, force="triton").cpu(), packed), kind
        values = kernels.unpack_groups(packed.to(place), (n,), (1,), how, dtype, force="triton")
        assert same_numbers(values.cpu(), kernels.unpack_groups(packed, (n,), (1,), how, dtype)), kind


@pytest.mark.parametrize("offset", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_views_that_start_in_the_middle_of_a_storage_are_the_same(
    place: torch.device, dtype: torch.dtype, offset: int
) -> None:
    x, how = sample(4000, dtype), Groups(4, 128)
    packed = kernels.pack_groups(x.to(place)[offset:], how, force="triton")
    assert torch.equal(packed.cpu(), kernels.pack_groups(x[offset:], how))


@pytest.mark.parametrize("n", [129, 3100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
def test_codes_are_packed_and_unpacked_the_same(
    place: torch.device, bits: int, absolute: bool, dtype: torch.dtype, n: int
) -> None:
    x, table = sample(n, dtype), buckets(bits, absolute=absolute)
    packed = kernels.pack_codes(x, table)
    assert torch.equal(kernels.pack_codes(x.to(place), table, force="triton").cpu(), packed)
    values = kernels.unpack_codes(packed.to(place), (n,), (1,), table, dtype, force="triton")
    assert torch.equal(values.cpu(), kernels.unpack_codes(packed, (n,), (1,), table, dtype))


POINTWISE = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x.float()).to(x.dtype),
    "sigmoid": torch.sigmoid,
    "hardswish": F.hardswish,
    "mish": F.mish,
}


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", POINTWISE)
def test_a_function_and_its_codes_are_the_same_in_one_pass(
    place: torch.device, name: str, dtype: torch.dtype, bits: int
) -> None:
    unit = Pointwise(POINTWISE[name], buckets(bits, absolute=name == "sigmoid"), name)
    x, dy = ((torch.randn(3100, generator=torch.Generator().manual_seed(s)) * 3).to(dtype) for s in (0, 1))
    y, codes = kernels.pointwise_forward(x, unit)
    found, found_codes = kernels.pointwise_forward(x.to(place), unit, force="triton")
    assert torch.equal(found_codes.cpu(), codes)
    rounding = torch.finfo(dtype).eps
    # 1 + erf(x) loses digits below zero, in stock torch as here: 2**-23 * |x| of them.
    assert torch.allclose(found.cpu().double(), y.double(), rtol=2 * rounding, atol=4 * rounding + 2e-6)
    dx = kernels.pointwise_backward(codes.to(place), dy.to(place), unit, force="triton")
    assert same_bits(dx.cpu(), kernels.pointwise_backward(codes, dy, unit))


def test_every_function_of_the_fused_kernel_is_tested() -> None:
    from slimgrad.kernels.pointwise import FUSED

    assert tuple(POINTWISE) == FUSED


def test_a_tensor_that_needs_a_gradient_is_packed_like_any_other(place: torch.device) -> None:
    x = sample(100, torch.float32).to(place)
    packed = kernels.pack_bits(x.clone().requires_grad_(), RELU, force="triton")
    assert torch.equal(packed, kernels.pack_bits(x, RELU, force="torch"))


@pytest.mark.gpu
def test_cuda_tensors_go_to_triton_by_themselves() -> None:
    pytest.importorskip("triton")
    assert kernels.backend("cuda") == "triton"


@pytest.mark.gpu
def test_more_elements_than_int32_counts_are_packed_and_unpacked() -> None:
    n = 2**31 + 5001
    if torch.cuda.mem_get_info()[0] < 5 * n:
        pytest.skip(f"needs {5 * n / 2**30:.0f} GiB of GPU memory")
    mask = torch.zeros(n, dtype=torch.bool, device="cuda")
    mask[::3] = True
    mask[-7:] = True
    packed = kernels.pack_bits(mask, NON_ZERO)
    assert torch.equal(packed, kernels.pack_bits(mask, NON_ZERO, force="torch"))
    assert torch.equal(kernels.unpack_bits(packed, n, 1.0, 0.0, torch.bool), mask)


@pytest.mark.gpu
def test_nothing_on_the_way_waits_for_the_device() -> None:
    x = sample(5000, torch.float32).cuda()
    pool = POOLS[-1]
    indices = pool.indices("cuda")
    how = Groups(4, 128)

    def everything() -> None:
        kernels.unpack_bits(kernels.pack_bits(x, RELU), 5000, 1.0, 0.0, torch.float32)
        kernels.unpack_window(kernels.pack_window(indices, pool.geometry()), pool.geometry())
        kernels.unpack_groups(kernels.pack_groups(x, how), x.shape, x.stride(), how, x.dtype)

    everything()  # compiling may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_packing_allocates_nothing_but_its_output() -> None:
    x = torch.randn(2**22, device="cuda")
    kernels.pack_bits(x, RELU)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    packed = kernels.pack_bits(x, RELU)
    assert torch.cuda.max_memory_allocated() - before == packed.numel()
    how = Groups(4, 128)
    kernels.pack_groups(x, how)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    codes = kernels.pack_groups(x, how)
    assert torch.cuda.max_memory_allocated() - before == -(-codes.numel() // 512) * 512  # the allocator's grain


@pytest.mark.gpu
def test_more_elements_than_int32_counts_are_quantized() -> None:
    n, how = 2**31 + 5001, Groups(2, 128)
    if torch.cuda.mem_get_info()[0] < 6 * n:
        pytest.skip(f"needs {6 * n / 2**30:.0f} GiB of GPU memory")
    x = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    x[-5000:] = torch.randn(5000, device="cuda").bfloat16()
    packed = kernels.pack_groups(x, how)
    values = kernels.unpack_groups(packed, x.shape, x.stride(), how, x.dtype)
    first = n // 1024 * 1024 - 4096  # a whole number of tiles
    tail = x[first:].cpu()
    assert torch.equal(
        values[first:].cpu(), kernels.unpack_groups(kernels.pack_groups(tail, how), tail.shape, (1,), how, x.dtype)
    )
    assert not values[:first].any()
