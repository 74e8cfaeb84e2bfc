"""``gpumem advise``: finds the step config with which a model fits."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.advice.search_order import Tried, every_config, next_config, recommended
from pytest_gpumem.advice.snippet import code_snippet
from pytest_gpumem.advice.trial import AdviceSubject, SubjectError, subject_of, try_config
from pytest_gpumem.cli.project import devices_of_plugins
from pytest_gpumem.cli.streams import INTERRUPTED, parsed
from pytest_gpumem.devices.contract import Device, DeviceUnavailable
from pytest_gpumem.devices.registry import AUTO, BUILT_IN, Devices, factories, make_cuda
from pytest_gpumem.emulated_process.before_torch import install
from pytest_gpumem.emulated_process.start import emulate
from pytest_gpumem.emulation.errors import EmulationError
from pytest_gpumem.emulation.load import current_emulation
from pytest_gpumem.reports.matrix import MatrixRow, matrix_table
from pytest_gpumem.step_config.errors import NotAStep
from pytest_gpumem.units import counted, format_bytes, format_seconds, parse_size
from pytest_gpumem.values.option_words import DEFAULT_DEVICE, EMULATED, nearest_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from pytest_gpumem.step_config.config import StepConfig


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option(
    "--fits", metavar="SIZE", callback=parsed(parse_size), help="The memory that the step may take: 24GB, '80 GiB'."
)
@click.option(
    "--device",
    "device_name",
    default=DEFAULT_DEVICE,
    show_default=True,
    help="cuda, cpu, auto, emulated:l4 and so on, or a plugin's.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Measure every combination (up to 96 configs), also when one fits already.",
)
@click.option(
    "--blocks",
    metavar="PATTERN",
    help="The modules that hold the model's repeated blocks (transformer.h), or the blocks themselves; found otherwise.",
)
def advise(*, factory: str, fits: int | None, device_name: str, everything: bool, blocks: str | None) -> None:
    """Find the step config with which a model's training step fits into a given GPU.

    FACTORY is a function of MODULE without arguments that returns (model, batch), or (model, batch, loss) where loss is a
    function of output and batch. MODULE is looked for in this folder, too. Training is with AdamW.

    Tried are, in this order and each on top of what helped before: lower precision (AMP), checkpointing, accumulation over
    micro-batches, an 8-bit optimizer, saved tensors on the host. It ends at the first config that fits, and shows the code
    that makes it. On CUDA the reserved memory has to fit, on the CPU what tensors hold.

    \b
    Examples:
      gpumem advise my_project.models:make_gpt --fits 24GB
      gpumem advise my_project.models:make_gpt --all --device cpu

    Exit status: 0 when a config fits, 1 when none does, 2 for wrong usage, 130 when interrupted.
    """
    if fits is None and not everything:
        raise click.UsageError("say how much memory there is: --fits 24GB (or --all, to see every combination)")
    device = _device(device_name)
    try:
        subject = subject_of(_function(factory), device.torch_device, blocks)
    except SubjectError as error:
        raise click.UsageError(str(error)) from None
    tried: list[Tried] = []
    finished = False
    try:
        configs = (
            every_config(subject.samples, blocks) if everything else _climbed(tried, fits, subject.samples, blocks)
        )
        for config in configs:
            tried.append(_try(device, subject, config, len(tried) + 1))
        finished = True
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
    chosen = recommended(tried, fits)
    if tried:
        if not device.tells_time:
            click.echo(f"{device.environment().device}: memory as of PyTorch's own allocator, no times\n")
        rows = [MatrixRow(str(one.config), one.peak, one.time, one.why_not) for one in tried]
        click.echo("\n".join([*matrix_table("config", rows, "si"), ""]))
        # An emulated GPU's peaks may lack what convolutions take on a GPU.
        emulation = current_emulation()
        lacking = None if emulation is None else emulation.cudnn.lacking()
        if lacking is not None:
            click.echo(f"peaks may be too low: {lacking}\n")
    if not finished or chosen is None:
        click.echo(_conclusion(tried, chosen, fits, finished=finished))
    if chosen is not None:
        _recommend(chosen, fits, device, subject)
    sys.exit(INTERRUPTED if not finished else 0 if chosen is not None else 1)


def _climbed(tried: Sequence[Tried], fits: int | None, samples: int | None, blocks: str | None) -> Iterator[StepConfig]:
    """Yield the configs to try until one fits, each chosen by the results in ``tried``."""
    while (config := next_config(tried, samples, blocks)) is not None:
        yield config
        if fits is not None and tried[-1].fits(fits):
            return


def _try(device: Device, subject: AdviceSubject, config: StepConfig, number: int) -> Tried:
    click.echo(f"[{number}] {config} ... ", nl=False, err=True)
    try:
        tried = try_config(device, subject, config)
    except NotAStep as error:
        # What steps say for tests, where the loss is an argument.
        problem, no_loss, _ = str(error).partition("; pass loss=")
        mend = "; return (model, batch, loss) from the factory, where loss(output, batch) gives one number"
        raise click.UsageError(problem + mend if no_loss else problem) from None
    click.echo(tried.why_not if tried.peak is None else format_bytes(tried.peak), err=True)
    return tried


def _conclusion(tried: Sequence[Tried], chosen: Tried | None, fits: int | None, *, finished: bool) -> str:
    """Return the last line where nothing fits, or where not everything was tried."""
    measured = [one for one in tried if one.peak is not None]
    if not finished:
        none = ", none of them fits" if measured and chosen is None else ""
        return f"not finished: {counted(len(measured), 'config')} measured{none}"
    smallest = min(measured, key=lambda one: one.peak or 0, default=None)
    closest = "" if smallest is None else f"; the smallest is {format_bytes(smallest.peak or 0)} with {smallest.config}"
    return f"nothing fits into {format_bytes(fits)}{closest}" if fits is not None else "nothing could be measured"


def _recommend(chosen: Tried, fits: int | None, device: Device, subject: AdviceSubject) -> None:
    within = "" if fits is None else f" of {format_bytes(fits)}"
    time = "" if chosen.time is None else f", {format_seconds(chosen.time)} a step"
    click.echo(f"recommended: {chosen.config}: {format_bytes(chosen.peak or 0)}{within}{time}")
    click.echo()
    for line in code_snippet(chosen.config, device.torch_device.type, subject.containers):
        click.echo(f"    {line}".rstrip())


def _device(name: str) -> Device:
    if name.startswith(EMULATED):
        try:
            emulate(name)
        except (EmulationError, ValueError) as error:
            raise click.ClickException(str(error)) from None
        install(name)
        return make_cuda()
    known = factories(name, () if name in (*BUILT_IN, AUTO) else devices_of_plugins())
    if name not in (*known, AUTO):
        raise click.UsageError(f"--device {name}: no such device; {nearest_device(name, [*known, AUTO])}")
    try:
        return Devices(known).get(name)
    except DeviceUnavailable as unavailable:
        raise click.ClickException(f"{unavailable}; --device cpu measures on the CPU") from None


def _function(text: str) -> Callable[[], Any]:
    """Return the function that ``module:function`` names. Raises ``click.UsageError``."""
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise click.UsageError(f"{text!r}: write MODULE:FACTORY, like my_project.models:make_gpt")
    if module_name.endswith(".py"):
        raise click.UsageError(f"{text!r} names a file; write {_as_module(module_name, name)}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise
        raise click.UsageError(f"there is no module {error.name!r}, neither installed nor in {here}") from None
    function: Any = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(_callables(module)[:8]) or "none"
        raise click.UsageError(f"{module_name} has no function {name!r}; it has {there}")
    return function  # type: ignore[no-any-return]


def _callables(module: ModuleType) -> list[str]:
    """Return the names of a module's callables: its own functions, its own classes, then imported ones."""
    found = {name: value for name, value in vars(module).items() if callable(value) and not name.startswith("_")}

    def order(name: str) -> tuple[bool, bool, str]:
        own = getattr(found[name], "__module__", None) == module.__name__
        return not own, isinstance(found[name], type), name

    return sorted(found, key=order)


def _as_module(path: str, function: str) -> str:
    """Return ``module:function`` for a function of the file at ``path``."""
    parts = Path(os.path.relpath(path)).with_suffix("").parts
    outside = os.pardir in parts
    return f"{parts[-1]}:{function}, in the folder of the file" if outside else f"{'.'.join(parts)}:{function}"
