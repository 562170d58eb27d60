"""The command `slimgrad`. Nothing heavy is imported before a command needs it, so `--help` answers at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from slimgrad import __version__
from slimgrad.cli.demo import demo
from slimgrad.cli.fit import fit
from slimgrad.cli.info import info
from slimgrad.cli.plan import plan
from slimgrad.cli.profile import profile
from slimgrad.cli.report import report
from slimgrad.cli.table import table
from slimgrad.errors import SlimgradError


class Commands(TyperGroup):
    """Says our own errors, and those of files, in one line, with exit code 2 and no traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with without_torch_logs():
                return super().invoke(ctx)
        except SlimgradError as error:
            typer.echo(f"slimgrad: {error}", err=True)
            raise typer.Exit(2) from error
        except OSError as error:
            if error.filename is None:  # not of a file: a pipe that nobody reads any longer
                raise
            typer.echo(f"slimgrad: {error.filename}: {error.strerror}", err=True)
            raise typer.Exit(2) from error


@contextmanager
def without_torch_logs() -> Iterator[None]:
    """What fails on fake tensors is told by our own errors; torch logs its traceback besides."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")

    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


app = typer.Typer(
    cls=Commands,
    name="slimgrad",
    help="Shrink what PyTorch autograd keeps between forward and backward, and count the bytes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"slimgrad {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=show_version, is_eager=True, help="Say the version."),
) -> None:
    """Shrink what PyTorch autograd keeps between forward and backward, and count the bytes."""


app.command()(demo)
app.command()(profile)
app.command()(plan)
app.command()(fit)
app.command()(report)
app.command()(table)
app.command()(info)
