"""What every test may count on: settings made before torch, no network, few threads, a device."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")  # bf16 matmul dies with SIGILL in oneDNN on some CPUs
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is reproducible only with a fixed workspace
os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin make tests 3x slower on a busy machine
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_OFFLINE", "1")

import pytest
import torch

if "OMP_NUM_THREADS" not in os.environ:
    torch.set_num_threads(2)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # They take minutes each: at the end, where their file stands, one worker would run them and the others rest.
    items.sort(key=lambda item: "test_interpreter" not in item.nodeid)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device there is, one after another."""
    return torch.device(request.param)


@pytest.fixture(autouse=True, scope="session")
def solved_tables(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tables that tests solve are kept for the session, not in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIMGRAD_CACHE", str(tmp_path_factory.mktemp("tables")))
        yield
