"""Triton against the reference, bit for bit: on a GPU, and elsewhere through Triton's interpreter.

The interpreter must be chosen before triton is imported, for the whole process. So these tests run on CPU only where
TRITON_INTERPRET=1 is set already; test_interpreter.py starts such a process.
"""

from __future__ import annotations

import os

import pytest
import torch

from slimgrad import kernels
from slimgrad.kernels import Interval
from tests.kernels.cases import FLOATS, INF, INTEGERS, LEVELS, POOLS, RULES, SIZES, Pool, same_bits, sample

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

    def everything() -> None:
        kernels.unpack_bits(kernels.pack_bits(x, RELU), 5000, 1.0, 0.0, torch.float32)
        kernels.unpack_window(kernels.pack_window(indices, pool.geometry()), pool.geometry())

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
