"""``gpumem advise``: finds the step config with which a model fits."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from pytest_gpumem.advice.cards import begin, capacity_of, explain_on, subject_in_forks, try_on, with_capacity
from pytest_gpumem.advice.formats import html, markdown, to_json
from pytest_gpumem.advice.largest import OPTIONS
from pytest_gpumem.advice.results import Advice, DeviceTrials, Recommended
from pytest_gpumem.advice.run_warnings import warnings_kept
from pytest_gpumem.advice.search_order import Search
from pytest_gpumem.advice.shard_option import PER_RANK, named_configs, sharding_of
from pytest_gpumem.advice.snippet import code_of
from pytest_gpumem.advice.texts import lines
from pytest_gpumem.advice.trial import (
    AdviceSubject,
    SubjectError,
    TrialFailed,
    explain_config,
    subject_by_name,
    subject_of,
    try_config,
)
from pytest_gpumem.advice.trials import Trials
from pytest_gpumem.cli import completion
from pytest_gpumem.cli.named_function import check_form, named_function
from pytest_gpumem.cli.project import devices_of_plugins, own_gpus_around
from pytest_gpumem.cli.streams import (
    INTERRUPTED,
    InputError,
    WholeLines,
    WholeNumber,
    format_option,
    input_errors,
    parsed,
    write_lines,
)
from pytest_gpumem.devices.contract import Device, DeviceUnavailable
from pytest_gpumem.devices.registry import AUTO, BUILT_IN, Devices, factories
from pytest_gpumem.emulation.errors import EmulationError
from pytest_gpumem.emulation.gpus import EVERY, Gpu, emulated_gpu, known_gpus, nearest_device_or_emulated
from pytest_gpumem.emulation.load import current_emulation, prepare
from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.models.lora import DTYPE_OF_ADAPTERS, Lora, lora
from pytest_gpumem.models.name import BatchSize, ModelName, batch_size
from pytest_gpumem.models.sources import model_name, named_model
from pytest_gpumem.models.task import TaskWords, task_of
from pytest_gpumem.reports.formats import format_of
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.torch_support.private_api import gpu_unseen
from pytest_gpumem.units import parse_size
from pytest_gpumem.values.option_words import DEFAULT_DEVICE, EMULATED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from pytest_gpumem.advice.largest import SizeTrial, Sought
    from pytest_gpumem.advice.search_order import Tried
    from pytest_gpumem.models.named_model import NamedModel
    from pytest_gpumem.step_config.config import StepConfig
    from pytest_gpumem.values.composition import Explanation


@click.command()
@click.argument("subject_name", metavar="MODEL")
@click.option(
    "--fits",
    metavar="SIZE",
    callback=parsed(parse_size),
    help="The memory that the step may take: 24GB, '80 GiB'. On emulated GPUs theirs, if not given.",
)
@click.option(
    "--device",
    "device_names",
    default=(DEFAULT_DEVICE,),
    show_default=True,
    multiple=True,
    shell_complete=completion.devices,
    help="cuda, cpu, auto, emulated:l4 and so on, or a plugin's. Several emulated ones, or emulated:all.",
)
@click.option(
    "--batch",
    "size",
    metavar="SIZE",
    callback=parsed(batch_size),
    help="Of a model by name: samples and tokens of each (or the side of images), 4x4096, or samples alone, 32. Default: one.",
)
@click.option(
    "--config",
    "words",
    metavar="CONFIG",
    multiple=True,
    help="A step config to measure, in place of those that are tried until one fits: amp-bf16,clip=1. May be repeated.",
)
@click.option(
    "--shard",
    "sharding",
    metavar="KIND,world=N",
    callback=parsed(sharding_of),
    help="Measure one rank of a job whose model is sharded: fsdp,world=8. KIND is a word of shard= in step configs.",
)
@click.option(
    "--train/--infer", "trains", default=True, help="Measure a training step (the default), or a step of inference."
)
@click.option(
    "--generate",
    "new_tokens",
    metavar="N",
    type=WholeNumber(min=1),
    help="Of a model by name: measure the generation of N tokens by its generate(), after a prompt that is the batch.",
)
@click.option(
    "--lora",
    "adapters",
    metavar="SETTINGS",
    callback=parsed(lora),
    help="Of a model by name: train adapters of PEFT alone: r=8, or r=8,alpha=16,targets=q_proj+v_proj.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Measure every combination (up to 96 configs of training), also when one fits already.",
)
@click.option(
    "--largest-batch",
    is_flag=True,
    help="Of a model by name: find the most samples that fit, by running it: of the recommended config, or each --config.",
)
@click.option(
    "--longest-sequence",
    is_flag=True,
    help="Of a model by name: find the most tokens of a sample that fit, in the same way.",
)
@click.option(
    "--blocks",
    metavar="PATTERN",
    help="The modules that hold the model's repeated blocks (transformer.h), or the blocks themselves; found otherwise.",
)
@format_option("json", "markdown", "html")
def advise(
    *,
    subject_name: str,
    fits: int | None,
    device_names: tuple[str, ...],
    size: BatchSize | None,
    words: tuple[str, ...],
    sharding: StepConfig | None,
    trains: bool,
    new_tokens: int | None,
    adapters: Lora | None,
    everything: bool,
    largest_batch: bool,
    longest_sequence: bool,
    blocks: str | None,
    form: str,
) -> None:
    """Find the step config with which a model's step fits into a given GPU.

    MODEL is hf:ORG/NAME, a model of transformers by its configuration: from the hub, a folder or a file, with random weights
    and without code of the hub's; hf-tiny:ORG/NAME is the same with two layers. Or it is timm:NAME, torchvision:NAME, or
    diffusers:CLASS, the network alone, also by a configuration. Its batch and loss follow from its class.

    Or it is MODULE:FACTORY, a function without arguments that returns (model, batch), or (model, batch, loss) where loss is a
    function of output and batch. MODULE is looked for in this folder, too.

    Tried are, in this order and each on top of what helped before: lower precision (AMP), checkpointing, accumulation over
    micro-batches, weights in bfloat16, an 8-bit optimizer, saved tensors on the host; for inference and generation
    bfloat16, then weights in int8. It ends at the first config that fits, and shows the code that makes it. Training is with
    AdamW. On CUDA the reserved memory has to fit, on the CPU what tensors hold.

    \b
    Examples:
      gpumem advise hf:meta-llama/Llama-3.1-8B --batch 1x4096 --device emulated:h100 --device emulated:l40s
      gpumem advise hf:./config.json --infer --device emulated:all
      gpumem advise hf:meta-llama/Llama-3.1-8B --lora r=16 --batch 1x4096 --device emulated:rtx4090
      gpumem advise hf:meta-llama/Llama-3.1-8B --generate 256 --batch 8x2048 --device emulated:l40s
      gpumem advise timm:vit_base_patch16_224 --batch 64 --device emulated:l4
      gpumem advise my_project.models:make_gpt --fits 24GB

    Exit status: 0 when a config fits into each device that was named, or into one of emulated:all, 1 when none does, the model
    fails by itself or the device cannot be used, 2 for wrong usage, 130 when interrupted.
    """
    page = format_of("advice.html")
    if form == "html" and page is not None and page.lacking():
        raise InputError(f"--format html: {page.lacking()}")
    typed = click.get_current_context().get_parameter_source("trains") != ParameterSource.DEFAULT
    with input_errors(ModelError):
        task = task_of(
            trains if typed else None, new_tokens, adapters, TaskWords("--train", "--infer", "--generate", "--lora")
        )
    if sharding is not None and not task.trains:
        said = "--infer" if new_tokens is None else "--generate"
        raise click.UsageError(f"--shard is for a training step: no step of inference is sharded, leave {said} out")
    shared = None if sharding is None else sharding.sharding
    if shared is not None and task.lora is not None and "tp" in dict(shared.parts):
        raise click.UsageError("--lora cannot be shared out by --shard tp: the model's plan names no adapters")
    if blocks is not None and not task.trains:
        raise click.UsageError("--blocks is for a training step: inference recomputes nothing, leave it out")
    with input_errors(ConfigError):
        configs, refused = named_configs(words, sharding, blocks)
    if words and everything:
        raise click.UsageError("configs are named by --config, or all are measured with --all, not both")
    if largest_batch and longest_sequence:
        raise click.UsageError("--largest-batch and --longest-sequence are looked for one at a time")
    sought: Sought | None = "samples" if largest_batch else "tokens" if longest_sequence else None
    search = Search(fits, configs, everything, blocks, task, sought, sharding, refused)
    with input_errors(ModelError):
        name = model_name(subject_name)
    if name is None:
        check_form(subject_name)
        given = {"--batch": size, OPTIONS[sought or "samples"]: sought, "--generate": new_tokens, "--lora": adapters}
        for option, value in given.items():
            if value is not None:
                raise click.UsageError(f"{option} is for a model by name; {subject_name} returns its own batch")
    found = _advised(search, _Named(subject_name, name, size), device_names, over_time=form == "html")
    status = INTERRUPTED if not found.finished else 0 if found.fits(every=_EVERY not in device_names) else 1
    _print(found, form, status)
    sys.exit(status)


def _print(found: Advice, form: str, status: int) -> None:
    if form == "text":
        write_lines(lines(found))
    elif form == "json":
        click.echo(to_json(found, status), nl=False)
    else:
        click.echo(markdown(found) if form == "markdown" else html(found), nl=False)


@dataclass(frozen=True)
class _Named:
    """A model as it was named: a function where it is none of a library's."""

    text: str
    name: ModelName | None
    size: BatchSize | None

    def here(self, search: Search, device: Device) -> AdviceSubject:
        """Return it with its batch on a device of this process."""
        with warnings_kept() as warned:
            if self.name is not None:
                subject = subject_by_name(self._model(self.name, search), search.blocks)
            else:
                subject = subject_of(named_function(self.text), device.torch_device, search.blocks, search.task)
        return replace(subject, warnings=tuple(warned))

    def on_cards(self, search: Search, gpus: Sequence[Gpu]) -> AdviceSubject:
        """Return it for processes with emulated GPUs: this one must not begin to use CUDA, which a function may."""
        if self.name is not None:
            with gpu_unseen(), warnings_kept() as warned:
                subject = subject_by_name(self._model(self.name, search), search.blocks)
            return replace(subject, warnings=tuple(warned))

        def make(device: torch.device, keeps_model: bool) -> AdviceSubject:
            try:
                function = named_function(self.text)
            except click.UsageError as error:
                raise SubjectError(error.message) from None
            return subject_of(function, device, search.blocks, search.task, keeps_model=keeps_model)

        return subject_in_forks(self.text, gpus, make, search.task)

    def _model(self, name: ModelName, search: Search) -> NamedModel:
        try:
            model = named_model(name, self.size, search.task)
        except ModelError as error:
            own = any(Path(path).is_file() for path in (f"{name.source}.py", f"{name.source}/__init__.py"))
            hint = f"; {name.source}: is a source of models, so import the function into a module of another name"
            raise InputError(f"{error}{hint if own else ''}") from None
        click.echo(model.title, err=True)
        return model


def _advised(search: Search, named: _Named, device_names: Sequence[str], *, over_time: bool) -> Advice:
    """Return what is found on the devices that were named. Raises ``click.ClickException``."""
    gpus = _gpus(device_names)
    if len(device_names) > 1 and not gpus:
        raise click.UsageError("several devices have to be emulated ones, like emulated:h100")
    try:
        if gpus:
            return _advised_on_cards(search, gpus, lambda: named.on_cards(search, gpus), over_time=over_time)
        return _advised_here(search, device_names[0], lambda device: named.here(search, device), over_time=over_time)
    except SubjectError as error:
        raise click.UsageError(str(error)) from None
    except TrialFailed as error:
        raise _ModelFailed(str(error)) from None


class _ModelFailed(InputError):
    """The model was found, and fails by itself."""

    exit_code = 1


def _gpus(names: Sequence[str]) -> list[Gpu]:
    """Return the GPUs to emulate; none where another device is named. Raises `InputError`."""
    if not all(name.startswith(EMULATED) for name in names):
        return []
    own = own_gpus_around()
    with input_errors(ValueError):
        found = [gpu for name in names for gpu in (known_gpus(own) if name == _EVERY else (emulated_gpu(name, own),))]
    for gpu in found:
        if gpu.count > 1:
            raise InputError(
                f"{gpu.device}: a model that is not sharded runs on one GPU; name {gpu.device.removesuffix(f'x{gpu.count}')}, "
                f"with --shard fsdp,world={gpu.count} for one rank of several"
            )
    return list(dict.fromkeys(found))


_EVERY = f"{EMULATED}{EVERY}"


def _advised_here(
    search: Search, device_name: str, subject_on: Callable[[Device], AdviceSubject], *, over_time: bool
) -> Advice:
    """Return what is found on one device, in this process."""
    if search.fits is None and (search.sought is not None or not (search.everything or search.configs)):
        instead = "" if search.sought is not None else " (or --all, to see every combination)"
        raise click.UsageError(f"say how much memory there is: --fits 24GB{instead}")
    device = _device(device_name)
    subject = subject_on(device)

    def try_one(sized: AdviceSubject, config: StepConfig) -> tuple[Tried, str | None]:
        # An emulated GPU's peaks may lack what convolutions take on a GPU.
        emulation = current_emulation()
        return try_config(device, sized, config), None if emulation is None else emulation.cudnn.lacking()

    name = device.environment().device
    trials = Trials(search.fits, subject, search, try_one, WholeLines().write).run(name)
    notes = _notes(search)
    if trials.tried and not device.tells_time:
        notes += (f"{name}: memory as of PyTorch's own allocator, no times",)
    found = Advice(
        subject.title,
        subject.task,
        False,
        (trials,),
        finished=trials.finished,
        notes=notes,
        sought=search.sought,
        sharding=search.sharding,
        attention=subject.attention,
    )
    return _with_code(
        found,
        subject,
        device.torch_device.type,
        lambda _, config: explain_config(device, subject, config, over_time=over_time),
    )


def _advised_on_cards(
    search: Search, gpus: Sequence[Gpu], made: Callable[[], AdviceSubject], *, over_time: bool
) -> Advice:
    """Return what is found on emulated GPUs, each config in a process of its own."""
    try:
        prepare()
        begin(gpus[0])
    except EmulationError as error:
        raise click.ClickException(str(error)) from None
    subject = made()
    done: list[DeviceTrials] = []
    elsewhere: dict[StepConfig, list[SizeTrial]] = {}
    for gpu in gpus:
        card = gpu if search.fits is None else with_capacity(gpu, search.fits)
        where = f"{card.title}: " if len(gpus) > 1 else ""
        trials = Trials(
            capacity_of(card), subject, search, partial(try_on, card), WholeLines().write, where, bool(done), elsewhere
        )
        done.append(trials.run(card.title))
        if not done[-1].finished:
            break
    by_title = {gpu.title: gpu for gpu in gpus}
    return _with_code(
        Advice(
            subject.title,
            subject.task,
            True,
            tuple(done),
            finished=done[-1].finished,
            notes=(*_notes(search), *_notes_on_faster(search, done)),
            sought=search.sought,
            sharding=search.sharding,
            attention=subject.attention,
        ),
        subject,
        "cuda",
        lambda title, config: explain_on(by_title[title], subject, config, over_time=over_time),
    )


def _notes(search: Search) -> tuple[str, ...]:
    notes = () if search.sharding is None else (PER_RANK,)
    return notes if search.task.lora is None else (*notes, DTYPE_OF_ADAPTERS)


def _notes_on_faster(search: Search, done: Sequence[DeviceTrials]) -> Iterator[str]:
    """Yield why a faster config may fit as well, with the cards of which it is so."""
    cards: dict[str, list[str]] = {}
    for card in done:
        note = search.note_on_faster(card.tried, card.limit) if card.finished else None
        if note is not None:
            cards.setdefault(note, []).append(card.name)
    yield from (f"{', '.join(names)}: {note}" if len(done) > 1 else note for note, names in cards.items())


def _with_code(
    found: Advice, subject: AdviceSubject, device_type: str, explain: Callable[[str, StepConfig], Explanation | str]
) -> Advice:
    """Return it with the code of what is recommended, and with what its peak is made of on the first device that it is for."""
    first: dict[StepConfig, str] = {}
    for device in found.devices:
        if device.chosen is not None:
            first.setdefault(device.chosen.config, device.name)
    configs = []
    for config, device_name in first.items():
        code = tuple(code_of(config, device_type, subject.containers, subject.task))
        explanation: Explanation | str = ""
        # After Ctrl-C nothing more is begun.
        if found.finished:
            progress = WholeLines()
            progress.write(f"{config}: what its peak is made of ... ")
            try:
                explanation = explain(device_name, config)
                progress.write(f"{explanation if isinstance(explanation, str) else 'known'}\n")
            except KeyboardInterrupt:
                progress.write("interrupted\n")
                found = replace(found, finished=False)
        why_not, known = (explanation, None) if isinstance(explanation, str) else ("", explanation)
        configs.append(Recommended(config, device_name, code, known, why_not))
    return replace(found, recommended=tuple(configs))


def _device(name: str) -> Device:
    known = factories(name, () if name in (*BUILT_IN, AUTO) else devices_of_plugins())
    if name not in (*known, AUTO):
        near = nearest_device_or_emulated(name, [*known, AUTO], own_gpus_around())
        raise click.UsageError(f"--device {name}: no such device; {near}")
    try:
        return Devices(known).get(name)
    except DeviceUnavailable as unavailable:
        raise click.ClickException(
            f"{unavailable}; --device emulated:h100 measures on a GPU that is emulated, --device cpu on the CPU"
        ) from None
