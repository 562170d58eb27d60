"""`slimgrad profile package.module:factory`: what autograd keeps in one step of a model."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from slimgrad.cli.files import check_figure, check_targets, write
from slimgrad.errors import SlimgradError

if TYPE_CHECKING:
    from torch import nn

RETURNS = "(model, batch) or (model, batch, loss_fn)"


class Autocast(str, Enum):
    """The low precisions one can profile under."""

    bf16 = "bf16"
    fp16 = "fp16"


def profile(
    factory: str = typer.Argument(..., help=f"package.module:factory, a function that returns {RETURNS}."),
    json: Path | None = typer.Option(None, "--json", help="Write the profile to this file, as JSON."),
    plot: Path | None = typer.Option(None, "--plot", help="Draw the profile to this file (png, pdf, svg or jpg)."),
    explain: str | None = typer.Option(None, "--explain", help="Say in words what this module keeps, and for whom."),
    limit: int = typer.Option(20, "--limit", min=1, help="Rows in the table."),
    fake: bool = typer.Option(False, "--fake", help="Use fake tensors: nothing is computed or allocated."),
    device: str | None = typer.Option(None, "--device", help="Device to run on, such as cpu or cuda:0."),
    autocast: Autocast | None = typer.Option(None, "--autocast", help="Run under autocast."),
) -> None:
    """Show what autograd keeps between forward and backward, storage by storage."""
    import slimgrad as sg

    checked_device(device)
    check_targets(json=json)
    check_figure("plot", plot)
    model, batch, loss_fn = made_by(factory)
    if device and not fake:
        model, batch = moved(model, device), moved(batch, device)
    with precision(autocast, device, model):
        result = sg.profile(model, batch, loss_fn, fake=fake, device=device if fake else None)
    typer.echo(result.explain(explain) if explain is not None else result.table(limit=limit))
    if json is not None:
        write(json, result.to_json())
        typer.echo(f"wrote {json}")
    if plot is not None:
        typer.echo(f"wrote {result.plot(plot)}")


def checked_device(device: str | None) -> None:
    import torch

    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise SlimgradError(f"{device!r} is not a device; try cpu or cuda:0") from error


def moved(value: Any, device: str) -> Any:
    """The value with its tensors on `device`, through tuples, lists and mappings."""
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(moved(item, device) for item in value)
    if not hasattr(value, "to"):
        return value
    try:
        return value.to(device)
    except (RuntimeError, AssertionError) as error:
        raise SlimgradError(f"cannot move to {device!r}: {str(error).splitlines()[0]}") from error


def made_by(target: str) -> tuple[nn.Module, Any, Callable[..., Any] | None]:
    """Call the factory and check what it returns."""
    from torch import nn

    factory = loaded(target)
    with told_of(target):
        made = factory()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise SlimgradError(f"{target} should return {RETURNS}; it returned {described(made)}")
    model, batch, loss_fn = (*made, None)[:3]
    if not isinstance(model, nn.Module):
        raise SlimgradError(f"{target} should return {RETURNS}; its model is {described(model)}, not an nn.Module")
    if loss_fn is not None and not callable(loss_fn):
        raise SlimgradError(f"{target} should return {RETURNS}; its loss_fn is {described(loss_fn)}, not callable")
    return model, batch, loss_fn


def described(value: Any) -> str:
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return "None" if value is None else f"a value of type {type(value).__name__}"


def loaded(target: str) -> Callable[[], Any]:
    """The factory named 'package.module:factory'; modules of the working directory are found first."""
    name, _, attribute = target.partition(":")
    if not name or not attribute:
        raise SlimgradError(f"expected package.module:factory, found {target!r}")
    module = imported(name)
    if not hasattr(module, attribute):
        public = [known for known in vars(module) if not known.startswith("_")]
        close = difflib.get_close_matches(attribute, public, n=3)
        hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise SlimgradError(f"the module {name!r} has no {attribute!r}{hint}")
    factory = getattr(module, attribute)
    if not callable(factory):
        raise SlimgradError(f"{target} is {described(factory)}, not a function that returns {RETURNS}")
    return factory  # type: ignore[no-any-return]


def imported(name: str) -> Any:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    with told_of(f"the module {name!r}"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            missing = error.name or name
            if name == missing or name.startswith(f"{missing}."):
                raise SlimgradError(f"no module {missing!r} in {here} or on the Python path") from error
            raise SlimgradError(f"the module {name!r} imports {missing!r}, which is not installed") from error


@contextlib.contextmanager
def told_of(what: str) -> Iterator[None]:
    """Says in one line what somebody's own code raises, and in which of its lines."""
    try:
        yield
    except SlimgradError:
        raise
    except Exception as error:
        lines = str(error).splitlines()
        words = ": ".join((type(error).__name__, *lines[:1]))
        raise SlimgradError(f"{what} raised {words}{place_of(error)}") from error


def place_of(error: Exception) -> str:
    """The last line that was run outside of this file and of what is installed; a SyntaxError names its own."""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*installed, __file__, "<"))]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own and not isinstance(error, SyntaxError) else ""


def precision(
    autocast: Autocast | None, device: str | None, model: nn.Module
) -> contextlib.AbstractContextManager[object]:
    """Autocast on the device the step will run on, or nothing."""
    if autocast is None:
        return contextlib.nullcontext()
    import torch

    first = next(model.parameters(), None)
    kind = torch.device(device).type if device else first.device.type if first is not None else "cpu"
    dtype = torch.bfloat16 if autocast is Autocast.bf16 else torch.float16
    return torch.autocast(kind, dtype)
