"""``gpumem advise``: finds the step config with which a model fits."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.units import format_bytes, format_seconds, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_gpumem.advice.ladder import Tried
    from pytest_gpumem.advice.trial import Subject
    from pytest_gpumem.devices.contract import Device
    from pytest_gpumem.steps.config import StepConfig


def _size(_context: click.Context, _parameter: click.Parameter, value: str | None) -> int | None:
    try:
        return None if value is None else parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@click.command()
@click.argument("factory", metavar="MODULE:FACTORY")
@click.option("--fits", metavar="SIZE", callback=_size, help="The memory that the step may take: 24GB, '80 GiB'.")
@click.option("--device", "device_name", default="cuda", show_default=True, help="cuda, cpu or auto.")
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Measure every combination (up to 96 configs), also when one fits already.",
)
def advise(*, factory: str, fits: int | None, device_name: str, everything: bool) -> None:
    """Find the step config with which a model's training step fits into a GPU.

    FACTORY is a function of MODULE without arguments that returns (model, batch), or (model, batch, loss) where loss is a
    function of output and batch. MODULE is looked for in this folder, too. Training is with AdamW.

    Tried are, in this order and each on top of what helped before: lower precision (AMP), checkpointing, accumulation over
    micro-batches, an 8-bit optimizer, saved tensors on the host. It ends at the first config that fits, and shows the code
    that makes it. On CUDA the reserved memory has to fit, on the CPU what tensors hold.

    Exit status: 0 when a config fits, 1 when none does, 2 for wrong usage.
    """
    from pytest_gpumem.advice.ladder import every_config, next_config, recommended
    from pytest_gpumem.advice.trial import SubjectError, subject_of

    if fits is None and not everything:
        raise click.UsageError("say how much memory there is: --fits 24GB (or --all, to see every combination)")
    device = _device(device_name)
    try:
        subject = subject_of(_function(factory), device.torch_device)
    except SubjectError as error:
        raise click.UsageError(str(error)) from None
    tried: list[Tried] = []
    try:
        if everything:
            for config in every_config(subject.samples):
                tried.append(_try(device, subject, config, len(tried) + 1))
        else:
            while (following := next_config(tried, subject.samples)) is not None:
                tried.append(_try(device, subject, following, len(tried) + 1))
                if fits is not None and tried[-1].fits(fits):
                    break
    except KeyboardInterrupt:
        click.echo("interrupted; this is what was measured until then", err=True)
    chosen = recommended(tried, fits)
    _tell(tried, chosen, fits, device, subject)
    sys.exit(0 if chosen is not None else 1)


def _try(device: Device, subject: Subject, config: StepConfig, number: int) -> Tried:
    from pytest_gpumem.advice.trial import try_config
    from pytest_gpumem.steps.model_step import NotAStep

    click.echo(f"[{number}] {config} ... ", nl=False, err=True)
    try:
        tried = try_config(device, subject, config)
    except NotAStep as error:
        raise click.UsageError(str(error)) from None
    click.echo(tried.why_not if tried.peak is None else format_bytes(tried.peak), err=True)
    return tried


def _tell(tried: Sequence[Tried], chosen: Tried | None, fits: int | None, device: Device, subject: Subject) -> None:
    from pytest_gpumem.advice.recipe import recipe
    from pytest_gpumem.reports.matrix import Row, matrix_table

    rows = [Row(str(one.config), one.peak, one.time, one.why_not) for one in tried]
    for line in matrix_table("config", rows, "si"):
        click.echo(line)
    click.echo()
    if chosen is None or chosen.peak is None:
        smallest = min((one for one in tried if one.peak is not None), key=lambda one: one.peak or 0, default=None)
        closest = (
            "" if smallest is None else f"; the smallest is {format_bytes(smallest.peak or 0)} with {smallest.config}"
        )
        click.echo(
            f"nothing fits into {format_bytes(fits)}{closest}" if fits is not None else "nothing could be measured"
        )
        return
    within = "" if fits is None else f" of {format_bytes(fits)}"
    time = "" if chosen.time is None else f", {format_seconds(chosen.time)} a step"
    click.echo(f"recommended: {chosen.config}: {format_bytes(chosen.peak)}{within}{time}")
    click.echo()
    for line in recipe(chosen.config, device.torch_device.type, subject.holders):
        click.echo(f"    {line}".rstrip())


def _device(name: str) -> Device:
    from pytest_gpumem.devices.contract import DeviceUnavailable
    from pytest_gpumem.devices.naming import nearest_device
    from pytest_gpumem.devices.registry import AUTO, BUILT_IN, Devices

    if name not in (*BUILT_IN, AUTO):
        raise click.UsageError(f"--device {name}: no such device; {nearest_device(name, [*BUILT_IN, AUTO])}")
    try:
        return Devices(BUILT_IN).get(name)
    except DeviceUnavailable as unavailable:
        raise click.ClickException(f"{unavailable}; --device cpu measures on the CPU") from None


def _function(text: str) -> Callable[[], Any]:
    """The function that ``module:function`` names. Raises ``click.UsageError``."""
    module_name, colon, name = text.partition(":")
    if not (module_name and colon and name):
        raise click.UsageError(f"{text!r}: write MODULE:FACTORY, like my_project.models:make_gpt")
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
        there = ", ".join(sorted(one for one, value in vars(module).items() if callable(value) and one[0] != "_")[:8])
        raise click.UsageError(f"{module_name} has no function {name!r}; it has {there}")
    return function  # type: ignore[no-any-return]
