"""``gpumem advise``: finds the step config with which a model fits."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pytest_gpumem.advice.card_table import CardTrials, card_table, conclusions
from pytest_gpumem.advice.cards import TrialFailed, begin, capacity_of, try_on, with_capacity
from pytest_gpumem.advice.search_order import Search, Tried, recommended
from pytest_gpumem.advice.snippet import code_snippet, inference_snippet, is_shown
from pytest_gpumem.advice.trial import AdviceSubject, SubjectError, subject_by_name, subject_of, try_config
from pytest_gpumem.cli.project import devices_of_plugins
from pytest_gpumem.cli.streams import INTERRUPTED, InputError, input_errors, parsed, write_lines
from pytest_gpumem.devices.contract import Device, DeviceUnavailable
from pytest_gpumem.devices.registry import AUTO, BUILT_IN, Devices, factories, make_cuda
from pytest_gpumem.emulated_process.before_torch import install
from pytest_gpumem.emulated_process.start import emulate
from pytest_gpumem.emulation.errors import EmulationError
from pytest_gpumem.emulation.gpus import Gpu, emulated_gpu, known_gpus
from pytest_gpumem.emulation.load import current_emulation, prepare
from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.models.name import BatchSize, ModelName, batch_size
from pytest_gpumem.models.sources import model_name, named_model
from pytest_gpumem.reports.matrix import MatrixRow, matrix_table
from pytest_gpumem.step_config.config import StepConfig
from pytest_gpumem.step_config.errors import ConfigError, NotAStep
from pytest_gpumem.torch_support.private_api import gpu_unseen
from pytest_gpumem.units import counted, format_bytes, format_seconds, parse_size
from pytest_gpumem.values.option_words import DEFAULT_DEVICE, EMULATED, nearest_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from types import ModuleType

    from pytest_gpumem.models.named_model import NamedModel


@click.command()
@click.argument("subject_name", metavar="MODEL")
@click.option(
    "--fits",
    metavar="SIZE",
    callback=parsed(parse_size),
    help="The memory that the step may take: 24GB, '80 GiB'. For a model by name on emulated GPUs theirs, if not given.",
)
@click.option(
    "--device",
    "device_names",
    default=(DEFAULT_DEVICE,),
    show_default=True,
    multiple=True,
    help="cuda, cpu, auto, emulated:l4 and so on, or a plugin's. For a model by name several emulated ones, or emulated:all.",
)
@click.option(
    "--batch",
    "size",
    metavar="SIZE",
    callback=parsed(batch_size),
    help="Of a model by name: samples and tokens (or pixels of a side) of each, 4x4096, or samples alone, 32. Default: one.",
)
@click.option(
    "--config",
    "words",
    metavar="CONFIG",
    multiple=True,
    help="A step config to measure, in place of those that are tried until one fits: amp-bf16,clip=1. May be repeated.",
)
@click.option(
    "--train/--infer", "trains", default=True, help="Measure a training step (the default), or a step of inference."
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Measure every combination (up to 96 configs of training), also when one fits already.",
)
@click.option(
    "--blocks",
    metavar="PATTERN",
    help="The modules that hold the model's repeated blocks (transformer.h), or the blocks themselves; found otherwise.",
)
def advise(
    *,
    subject_name: str,
    fits: int | None,
    device_names: tuple[str, ...],
    size: BatchSize | None,
    words: tuple[str, ...],
    trains: bool,
    everything: bool,
    blocks: str | None,
) -> None:
    """Find the step config with which a model's step fits into a given GPU.

    MODEL is hf:ORG/NAME, a model of transformers by its configuration: from the hub, a folder or a file, with random weights
    and without code of the hub's; hf-tiny:ORG/NAME is the same with two layers. Or it is timm:NAME, torchvision:NAME, or
    diffusers:CLASS, the network alone, also by a configuration. Its batch and loss follow from its class.

    Or it is MODULE:FACTORY, a function without arguments that returns (model, batch), or (model, batch, loss) where loss is a
    function of output and batch. MODULE is looked for in this folder, too.

    Tried are, in this order and each on top of what helped before: lower precision (AMP), checkpointing, accumulation over
    micro-batches, weights in bfloat16, an 8-bit optimizer, saved tensors on the host; for inference bfloat16, then
    weights in int8. It ends at the first config that fits, and shows the code that makes it. Training is with AdamW. On CUDA
    the reserved memory has to fit, on the CPU what tensors hold.

    \b
    Examples:
      gpumem advise hf:meta-llama/Llama-3.1-8B --batch 1x4096 --device emulated:h100 --device emulated:l40s
      gpumem advise hf:./config.json --infer --device emulated:all
      gpumem advise timm:vit_base_patch16_224 --batch 64 --device emulated:l4
      gpumem advise my_project.models:make_gpt --fits 24GB

    Exit status: 0 when a config fits into each device that was named, or into one of emulated:all, 1 when none does, 2 for
    wrong usage, 130 when interrupted.
    """
    configs = _configs(words)
    if configs and everything:
        raise click.UsageError("configs are named by --config, or all are measured with --all, not both")
    search = Search(fits, configs, everything, blocks, trains)
    with input_errors(ModelError):
        name = model_name(subject_name)
    gpus = _gpus(device_names)
    if name is None:
        if size is not None:
            raise click.UsageError(f"--batch is for a model by name; {subject_name} returns its own batch")
        if len(device_names) > 1 or EVERY in device_names:
            raise click.UsageError("several devices are for a model by name; for a function, name one")
        _advise_here(search, device_names[0], lambda device: _subject(subject_name, device, search))
    elif gpus:
        _advise_on_cards(search, gpus, name, size, every=EVERY not in device_names)
    elif len(device_names) > 1:
        raise click.UsageError("several devices have to be emulated ones, like emulated:h100")
    else:
        _advise_here(
            search, device_names[0], lambda _: subject_by_name(_model(name, size, search), blocks, trains=trains)
        )


def _configs(words: Sequence[str]) -> tuple[StepConfig, ...]:
    with input_errors(ConfigError):
        return tuple(dict.fromkeys(map(StepConfig.parse, words)))


def _gpus(names: Sequence[str]) -> dict[str, Gpu]:
    """Return the GPUs to emulate, by name; none where another device is named. Raises `InputError`."""
    if not all(name.startswith(EMULATED) for name in names):
        return {}
    with input_errors(ValueError):
        words = dict.fromkeys(
            word
            for name in names
            for word in ([EMULATED + one.word for one in known_gpus()] if name == EVERY else [name])
        )
        return {word: emulated_gpu(word) for word in words}


EVERY = f"{EMULATED}all"


def _model(name: ModelName, size: BatchSize | None, search: Search) -> NamedModel:
    with input_errors(ModelError):
        model = named_model(name, size, trains=search.trains)
    click.echo(model.title)
    return model


def _subject(factory: str, device: Device, search: Search) -> AdviceSubject:
    return subject_of(_function(factory), device.torch_device, search.blocks, trains=search.trains)


def _advise_here(search: Search, device_name: str, subject_on: Callable[[Device], AdviceSubject]) -> None:
    """Measure on one device, in this process."""
    if search.fits is None and not search.everything and not search.configs:
        raise click.UsageError("say how much memory there is: --fits 24GB (or --all, to see every combination)")
    device = _device(device_name)
    try:
        subject = subject_on(device)
    except SubjectError as error:
        raise click.UsageError(str(error)) from None
    tried: list[Tried] = []

    def try_one(config: StepConfig) -> Tried:
        return try_config(device, subject, config)

    finished = _try_all(tried, search.over(tried, search.fits, subject.samples), try_one)
    chosen = recommended(tried, search.fits)
    if tried:
        if not device.tells_time:
            click.echo(f"{device.environment().device}: memory as of PyTorch's own allocator, no times\n")
        rows = [MatrixRow(str(one.config), one.peak, one.time, one.why_not) for one in tried]
        click.echo("\n".join([*matrix_table("config", rows, "si"), ""]))
        # An emulated GPU's peaks may lack what convolutions take on a GPU.
        emulation = current_emulation()
        _tell_lacking({None if emulation is None else emulation.cudnn.lacking()})
    if not finished or chosen is None:
        click.echo(_conclusion(tried, chosen, search.fits, finished=finished))
    if chosen is not None:
        within = "" if search.fits is None else f" of {format_bytes(search.fits)}"
        time = "" if chosen.time is None else f", {format_seconds(chosen.time)} a step"
        click.echo(f"recommended: {chosen.config}: {format_bytes(chosen.peak or 0)}{within}{time}")
        _show_code(chosen.config, device.torch_device.type, subject)
    sys.exit(INTERRUPTED if not finished else 0 if chosen is not None else 1)


def _advise_on_cards(
    search: Search, gpus: Mapping[str, Gpu], name: ModelName, size: BatchSize | None, *, every: bool
) -> None:
    """Measure on emulated GPUs, each config in a process of its own."""
    with input_errors(EmulationError, ValueError):
        for word in gpus:
            prepare(word)
        begin(next(iter(gpus)))
    try:
        with gpu_unseen():
            subject = subject_by_name(_model(name, size, search), search.blocks, trains=search.trains)
    except SubjectError as error:
        raise click.UsageError(str(error)) from None
    done: list[CardTrials] = []
    finished = all(_try_card(done, gpu, subject, search, several=len(gpus) > 1) for gpu in gpus.values())
    if any(card.tried for card in done):
        click.echo("\n".join(["", *card_table(done), ""]))
    _tell_lacking(card.lacking for card in done)
    write_lines([*conclusions(done), *([] if finished else ["not finished"])])
    codes = dict.fromkeys(card.chosen.config for card in done if card.chosen is not None)
    for config in codes:
        if len(codes) > 1:
            click.echo(f"\n{config}:")
        _show_code(config, "cuda", subject)
    fitting = [card.chosen is not None for card in done]
    sys.exit(INTERRUPTED if not finished else 0 if (all if every else any)(fitting) else 1)


def _try_card(done: list[CardTrials], gpu: Gpu, subject: AdviceSubject, search: Search, *, several: bool) -> bool:
    """Append what was tried on a card to ``done``, and return whether all was: not after Ctrl-C."""
    if search.fits is not None:
        gpu = with_capacity(gpu, search.fits)
    limit = capacity_of(gpu)
    tried: list[Tried] = []
    lacking: list[str] = []

    def try_one(config: StepConfig) -> Tried:
        one, why = try_on(gpu, subject, config)
        lacking.extend(filter(None, [why]))
        return one

    configs = search.over(tried, limit, subject.samples)
    finished = _try_all(tried, configs, try_one, f"{gpu.title}: " if several else "", goes_on=bool(done))
    why = lacking[0] if lacking else None
    done.append(CardTrials(gpu.title, limit, tuple(tried), recommended(tried, limit), why))
    return finished


def _try_all(
    tried: list[Tried],
    configs: Iterator[StepConfig],
    try_one: Callable[[StepConfig], Tried],
    where: str = "",
    *,
    goes_on: bool = False,
) -> bool:
    """Append the result of each config to ``tried``, and return whether all were tried: not after Ctrl-C.

    An error of the model's own ends it where there is nothing yet to lose, unless it ``goes_on``.
    """
    try:
        for number, config in enumerate(configs, start=1):
            click.echo(f"[{number}] {where}{config} ... ", nl=False, err=True)
            try:
                one = try_one(config)
            except NotAStep as error:
                # What steps say for tests, where the loss is an argument.
                problem, no_loss, _ = str(error).partition("; pass loss=")
                mend = "; return (model, batch, loss) from the factory, where loss(output, batch) gives one number"
                raise click.UsageError(problem + mend if no_loss else problem) from None
            except TrialFailed as error:
                if not goes_on and not tried:
                    raise InputError(str(error)) from None
                one = Tried(config, why_not=str(error))
            tried.append(one)
            click.echo(one.why_not if one.peak is None else format_bytes(one.peak), err=True)
    except KeyboardInterrupt:
        click.echo("interrupted", err=True)
        return False
    return True


def _tell_lacking(reasons: Iterable[str | None]) -> None:
    for reason in sorted({reason for reason in reasons if reason is not None}):
        click.echo(f"peaks may be too low: {reason}\n")


def _conclusion(tried: Sequence[Tried], chosen: Tried | None, fits: int | None, *, finished: bool) -> str:
    """Return the last line where nothing fits, or where not everything was tried."""
    measured = [one for one in tried if one.peak is not None]
    if not finished:
        none = ", none of them fits" if measured and chosen is None else ""
        return f"not finished: {counted(len(measured), 'config')} measured{none}"
    smallest = min(measured, key=lambda one: one.peak or 0, default=None)
    closest = "" if smallest is None else f"; the smallest is {format_bytes(smallest.peak or 0)} with {smallest.config}"
    return f"nothing fits into {format_bytes(fits)}{closest}" if fits is not None else "nothing could be measured"


def _show_code(config: StepConfig, device_type: str, subject: AdviceSubject) -> None:
    click.echo()
    if not is_shown(config):
        click.echo(f'    # as in @pytest.mark.gpumem and fixtures: config="{config}"')
        return
    inference = None if subject.trains else inference_snippet(config, device_type)
    for line in inference or code_snippet(config, device_type, subject.containers):
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
        raise click.ClickException(
            f"{unavailable}; --device emulated:h100 measures on a GPU that is emulated, --device cpu on the CPU"
        ) from None


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
