"""`slimgrad info`: versions, devices, and which kernels serve them."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

import typer

from slimgrad import __version__


def info() -> None:
    """Say which versions, devices and kernels are in use."""
    for name, value in facts():
        typer.echo(f"{name:<10}{value}")


def facts() -> Iterator[tuple[str, str]]:
    yield "slimgrad", __version__
    for package in ("torch", "triton"):
        yield package, version_of(package)
    yield "python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield from devices()


def version_of(package: str) -> str:
    """The version installed, without importing the package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def devices() -> Iterator[tuple[str, str]]:
    """Each device with the kernels that slimgrad uses on it."""
    import torch

    from slimgrad.kernels import backend

    yield "cpu", f"{torch.get_num_threads()} threads, {backend(torch.device('cpu'))} kernels"
    for i in range(torch.cuda.device_count()):
        memory = torch.cuda.get_device_properties(i).total_memory / 2**30
        kernels = backend(torch.device("cuda", i))
        yield f"cuda:{i}", f"{torch.cuda.get_device_name(i)}, {memory:.0f} GiB, {kernels} kernels"
