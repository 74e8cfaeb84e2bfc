"""``gpumem advise``: finds the step config with which a model's step fits into a GPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from pytest_gpumem.base.units import parse_size
from pytest_gpumem.emulating.emulation.errors import EmulationError
from pytest_gpumem.emulating.emulation.gpus import EVERY, Gpu, emulated_gpu, known_gpus, nearest_device_or_emulated
from pytest_gpumem.emulating.emulation.load import current_emulation, prepare
from pytest_gpumem.facts.values.option_words import DEFAULT_DEVICE, EMULATED
from pytest_gpumem.measuring.devices.contract import Device, DeviceUnavailable
from pytest_gpumem.measuring.devices.registry import AUTO, BUILT_IN, Devices, factories
from pytest_gpumem.measuring.models.errors import ModelError
from pytest_gpumem.measuring.models.lora import DTYPE_OF_ADAPTERS, Lora, lora
from pytest_gpumem.measuring.models.name import BatchSize, ModelName, batch_size
from pytest_gpumem.measuring.models.sources import model_name, named_model
from pytest_gpumem.measuring.models.task import TaskWords, task_of
from pytest_gpumem.measuring.step_config.errors import ConfigError
from pytest_gpumem.tools.advise.cards import begin, capacity_of, explain_on, subject_in_forks, try_on, with_capacity
from pytest_gpumem.tools.advise.formats import html, markdown, to_json
from pytest_gpumem.tools.advise.largest import OPTIONS
from pytest_gpumem.tools.advise.results import Advice, DeviceTrials, Recommendation
from pytest_gpumem.tools.advise.run_warnings import collected_warnings
from pytest_gpumem.tools.advise.search_order import Search
from pytest_gpumem.tools.advise.shard_option import PER_RANK, named_configs, sharding_of
from pytest_gpumem.tools.advise.snippet import code_of
from pytest_gpumem.tools.advise.texts import lines
from pytest_gpumem.tools.advise.trial import (
    AdviceSubject,
    SubjectError,
    TrialFailed,
    explain_config,
    subject_by_name,
    subject_of,
    try_config,
)
from pytest_gpumem.tools.advise.trials import Trials
from pytest_gpumem.tools.console import completion
from pytest_gpumem.tools.console.named_function import check_form, named_function
from pytest_gpumem.tools.console.project import devices_of_plugins, own_gpus_around
from pytest_gpumem.tools.console.streams import (
    INTERRUPTED,
    InputError,
    WholeLines,
    WholeNumber,
    format_option,
    input_errors,
    parsed,
    write_lines,
)
from pytest_gpumem.torch_support.private_api.allocator import gpu_unseen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from pytest_gpumem.facts.values.composition import Explanation
    from pytest_gpumem.measuring.models.named_model import NamedModel
    from pytest_gpumem.measuring.step_config.config import StepConfig
    from pytest_gpumem.tools.advise.largest import SizeAxis, SizeTrial
    from pytest_gpumem.tools.advise.search_order import Trial


@click.command()
@click.argument("subject_name", metavar="MODEL")
@click.option(
    "--fits",
    metavar="SIZE",
    callback=parsed(parse_size),
    help="The memory that the step may take, for example `24GB` or `80GiB`. Default on an emulated GPU: its own memory. Other "
    "devices need this option, --config or --all.",
)
@click.option(
    "--device",
    "device_names",
    metavar="DEVICE",
    default=(DEFAULT_DEVICE,),
    show_default=True,
    multiple=True,
    shell_complete=completion.devices,
    help="Measure on this device: `cuda`, `cpu`, `auto`, an emulated GPU such as `emulated:l4`, or a device from a plugin. "
    "Several emulated GPUs may be given, or `emulated:all`.",
)
@click.option(
    "--batch",
    "size",
    metavar="SIZE",
    callback=parsed(batch_size),
    help="The batch of a named model: SAMPLES, SAMPLESxTOKENS, or SAMPLESxSIDE for images and latents. Examples: `32`, "
    "`4x4096`, `8x512`. Default: 1 sample.",
)
@click.option(
    "--config",
    "words",
    metavar="CONFIG",
    multiple=True,
    help="Measure this step config instead of searching, for example `amp-bf16,clip=1`. May be repeated.",
)
@click.option(
    "--shard",
    "sharding",
    metavar="KIND,world=N",
    callback=parsed(sharding_of),
    help="Measure one rank of a sharded training job, for example `fsdp,world=8`. KIND is a value of `shard=` in step configs.",
)
@click.option("--train/--infer", "trains", default=True, help="Measure a training step (the default), or inference.")
@click.option(
    "--generate",
    "new_tokens",
    metavar="N",
    type=WholeNumber(min=1),
    help="Measure the generation of N tokens by a named model of transformers, for example `256`. The prompt is --batch.",
)
@click.option(
    "--lora",
    "adapters",
    metavar="SETTINGS",
    callback=parsed(lora),
    help="Train only PEFT's LoRA adapters of a named model, for example `r=8` or `r=8,alpha=16,targets=q_proj+v_proj`.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Measure every combination (up to 96 configs of a training step), even if one fits already.",
)
@click.option(
    "--largest-batch",
    is_flag=True,
    help="Find the largest number of samples with which the step of a named model fits, by running it with the recommended "
    "config, or each --config.",
)
@click.option(
    "--longest-sequence",
    is_flag=True,
    help="Find the largest number of tokens in a sample in the same way.",
)
@click.option(
    "--blocks",
    metavar="PATTERN",
    help="The modules that contain the model's repeated blocks, for example `transformer.h`, or the blocks themselves. "
    "Default: the blocks found by the command.",
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
    """Find a config with which a model's step fits into a GPU.

    The command tries step configs in a fixed order until one fits, and prints the code for it and the composition of its peak.
    A training step uses AdamW. On CUDA the reserved memory has to fit, on a CPU the memory in tensors.

    \b
    MODEL is the name of a model, or a function:
      hf:ORG/NAME       a transformers model with its configuration on the hub;
                        ORG/NAME can also be a folder or a `config.json`
      hf-tiny:ORG/NAME  the same model with two layers of each kind
      timm:NAME         a timm model
      torchvision:NAME  a torchvision model
      diffusers:CLASS   a network from diffusers, or its configuration
      MODULE:FACTORY    a function that returns `(model, batch)` or
                        `(model, batch, loss)`; `loss` is called with the
                        output and the batch

    A named model has random weights and a random batch. No checkpoint is loaded, and no code from the hub runs.

    \b
    The search tries these configs in order, and keeps each change that saves
    memory for the next ones:
      training   `fp32`, `amp-bf16` or `amp-fp16`, `checkpoint=ops`,
                 `checkpoint=blocks`, `accumulate=` 2, 4, 8 and 16, `bf16`,
                 `optimizer=adamw-8bit`, `checkpoint=offload`
      inference  `fp32`, `bf16`, `bf16,weights=int8`

    \b
    Examples:
      gpumem advise hf:meta-llama/Llama-3.1-8B --batch 1x4096 --device emulated:h100 --device emulated:l40s
      gpumem advise hf:./config.json --infer --device emulated:all
      gpumem advise hf:meta-llama/Llama-3.1-8B --lora r=16 --batch 1x4096 --device emulated:rtx4090
      gpumem advise hf:meta-llama/Llama-3.1-8B --generate 256 --batch 8x2048 --device emulated:l40s
      gpumem advise timm:vit_base_patch16_224 --batch 64 --device emulated:l4
      gpumem advise my_project.models:make_gpt --fits 24GB

    Exit status: 0 if a config fits into each given device, or with `emulated:all` into any card, 1 if no config fits, the model
    fails by itself or the device cannot be used, 2 for wrong usage, 130 after Ctrl-C.
    \f
    Without a limit, 0 means that a config was measured. With `--largest-batch` and `--longest-sequence`, the status
    is also 0 if only a smaller batch than the given batch fits. After Ctrl-C, the command prints the configs measured so
    far and recommends the best one that fits.

    ## `--batch`

    - The default length is the number of positions in the model, at most 2,048 tokens. The default side is the model's own.
    - A function returns its own batch, so this option is refused.

    ## `--config`

    A mixture that loops over its experts needs a [routing](../concepts/emulated-gpu.md#routing-of-experts) on an emulated GPU:
    `bf16,routing=balanced`.

    ## `--shard`

    - After the kind come `world=N` ranks and, for another rank than the first, `rank=M`: `hsdp:2,world=16,rank=3`.
      See [step configs](step-configs.md) for the kinds.
    - Memory, `--batch` and largest batches are for one rank, which is one GPU.
    - If a config cannot be combined with the sharding, its row contains the reason.
    - Inference and generation cannot be sharded.

    ## `--generate`

    - The step is one call of the model's `generate`: the prompt, then N tokens one after another, with the cache of keys and
      values. Decoding is greedy, and no token ends it early. Beams, repetition rules and stop tokens in the model's
      configuration are ignored, and there is no padding. So lengths and bytes are exact, even on an emulated GPU, which
      computes no tokens.
    - The models are causal language models, and encoder-decoders, in which the prompt is the encoder's input. Prompt and new
      tokens have to fit into the model's positions. Whisper can only be measured on a CPU or a real GPU, because it reads its
      tokens to cut the sound.
    - The configs are those of inference. `cache=off` generates without the cache.
    - `--largest-batch` finds how many prompts fit at once, and `--longest-sequence` how long a prompt may be.
    - A growing cache (`DynamicCache` in transformers) ends with
      `2 x layers x key heads x head size x (prompt tokens + N - 1) x samples` numbers, because the last token is not fed back.
      While it grows, the keys or values of one layer exist twice.
    - The peak of a few tokens does not predict the peak of many. At first the prompt decides the peak: a small GPT-2 with
      prompts of `4x64` reserves 48.23 MB for 32, 64 and 96 tokens, and 56.62 MB for 384. Later the allocator reserves faster
      than tensors grow, because a longer block rarely fits into the place of a shorter one. A two-layer Llama with prompts of
      `128x4` reserves 94 MB for 67 MB of tensors after 32 tokens, 170 MB for 109 MB after 96, and 3.11 GB for 299 MB after 384.
    - An emulated GPU runs 41 tokens if N is 84 or more: 28 after the prompt, and 13 after a prompt that is as long as the text
      without its last 13 tokens. If the allocations repeat from token to token, PyTorch's own allocator then makes the
      allocations of all N tokens. So the peak is the peak of all tokens to the byte, reserved memory included. The peak of so
      many tokens is not explained. If the allocations do not repeat, for example because a sliding window is reached in
      between, all N tokens run.

    ## `--lora`

    - `r` is the rank. `alpha` and `targets` are `lora_alpha` and `target_modules` of PEFT's `LoraConfig`, with PEFT's defaults:
      the modules that PEFT knows for the kind of model, otherwise `targets=all-linear`. Models of other libraries than
      transformers need `targets`.
    - Only the adapters are trained. Other weights have no gradients and no optimizer state, and are in the config's precision.
    - With `bf16` the adapters are in bfloat16 too, as the printed code makes them. PEFT's own default is float32.
    - `--infer` and `--generate` are refused, because merged adapters take no memory in inference.

    ## `--all`

    Without a limit, the command recommends the config whose saving is worth most.

    ## `--largest-batch`

    - The size is found by running the step: it fits, and the next size does not. With `accumulate=4` the next size is 4 samples
      larger. If the model itself sets the end, for example by its last position, the reason is printed.
    - If no config fits, the search uses the config with the least memory.

    ## `--blocks`

    Used by `checkpoint=ops`, `checkpoint=blocks`, and shardings of blocks.

    ## Named models

    - **Configuration.** Only `config.json` is fetched. It is refused if it needs code of its own (`auto_map`, for a model
      that transformers does not have), or contains `trust_remote_code`, `use_kernels`, `kernel_config`, `attribute_map`, a
      checkpoint, a `backbone` in another repository, or an implementation of attention or experts from outside transformers,
      for example `"attn_implementation": "org/kernel"`. `sdpa`, `eager` and `flash_attention_2` are accepted. If the package
      `kernels` is installed, transformers may load kernels that it chooses itself; `USE_HUB_KERNELS=NO` prevents most of
      them.
    - **transformers.** The class is the first of `architectures` that transformers has. Weights are made in the configuration's
      precision, or in float32 if it names none. The random batch contains tokens, images or sounds, and labels as the class
      takes them, without padding and mask. In training there is no cache of keys and values. For images with another side, the
      model gets as many positions as they have patches. If no batch can be made, for example for texts with images, the message
      says which function to write.
    - **timm and torchvision.** Images have the size for which the weights were trained, for torchvision that of
      `get_model_weights(NAME).DEFAULT`: crops, whole images for segmentation, clips of 16 frames. A tag in timm's name
      (`resnet50.a1_in1k`) selects its images and classes. The loss is the cross-entropy, with the auxiliary classifiers' added.
      A detector returns its own losses, for 7 objects in an image. It cannot run on an emulated GPU, because it reads boxes on
      the host.
    - **diffusers.** `diffusers:CLASS` uses the default configuration of the class, `diffusers:ORG/NAME/unet` the hub's, and
      `diffusers:./unet` that of a folder or file. Known classes are `UNet2DConditionModel` (also SDXL's), `UNet2DModel`,
      `AutoencoderKL`, `VQModel`, and the transformers of SD3, Flux and DiT. No pipeline is run. A sample is the input of
      `forward`, latents or an autoencoder's pixels, as the title says (`batch 1 of 4x128x128`). The loss is the mean squared
      error against noise.

    ## Functions

    - `MODULE` is also searched in the current folder. `batch` may be a function that makes a batch.
    - `FACTORY` is called without arguments, with the device as torch's default device. If that fails, for example because it
      uses a generator of the CPU or NumPy arrays, it is called again without a default device, and the result is moved.
    - On emulated GPUs, each process that measures imports `MODULE` and calls `FACTORY`. Their output goes to standard error.
    - If your module has the name of a source (`hf.py`), write its package, `my_project.hf:make`, or import the function in a
      module with another name.

    ## Search

    - The batch is shared out by `accumulate=` as far as its samples can be divided. If `fully_shard` gathers parameters,
      `mp-bf16` comes before `amp-bf16`. Combinations that a sharding excludes are left out.
    - If a config cannot run here, fails or runs out of memory, its row contains the reason. An error of `fp32`, the first
    config,
      ends the search.
    - No times are taken on an emulated GPU, so the first config that fits is recommended. A note names the faster precisions
      that were not tried. `--all` tries them.
    - On emulated GPUs, each config is first run on a card with more memory than any. If its tensors fit but the reserved memory
      does not, it is run again with the card's own memory, because the allocator then releases its cache. `lacks` is the memory
      by which the card is too small. If there are more cards than configs, each card has a row.
    - "cannot run" means that torch has no kernels for the card, or that the card lacks a feature, such as flash attention
      below compute capability 8.0. bfloat16 that torch emulates (on a T4) is measured, and recommended only if nothing
      else fits.

    ## Output

    - The table, the code and the peak go to standard output, progress to standard error. The CUDA context and other processes
      need memory besides.
    - `attention:` is the implementation in the configuration of the attention modules (`sdpa` or `eager`), for functions as
      well. Eager attention keeps the scores of all tokens, and can take much more memory.
    - The recommended config runs once more, recorded, on its first device. Its peak is printed by category and
      module. These are bytes in tensors; the allocator reserves somewhat more.
    - Warnings below the table come from Python and from the model's libraries, each once. For example, transformers warns
      that it uses its reference code for Mamba because `mamba_ssm` is not installed. The figures then belong to the
      reference code.

    ## JSON

    | key | value |
    |---|---|
    | `format`, `exit_status` | 1, and the command's exit status |
    | `finished` | `false` after Ctrl-C |
    | `subject`, `step`, `new_tokens`, `lora` | the model, the kind of step, N of `--generate`, and `--lora` |
    | `attention` | the implementation of attention; `null` for models of other libraries and without attention |
    | `emulated`, `shard` | whether the devices are emulated, and `--shard` |
    | `largest_of` | `samples` with `--largest-batch`, `tokens` with `--longest-sequence` |
    | `devices` | `device`, `limit`, `recommended` and `configs` of each device |
    | `recommended` | each recommended config: `config`, `device`, `code`, `made_of_bytes`, `phase`, `made_of`, `why_not` |
    | `notes`, `warnings` | texts below the table |

    Each of `configs` has `config`, `peak` (the figure that has to fit), `peak_allocated` (bytes in tensors in the same run),
    `step_time`, `fits`, `why_not`, `slow` and `largest` (with its `size`). `made_of` has all categories with their modules, and
    `made_of_bytes` is their sum: the peak of the recorded run.
    """
    is_typed = click.get_current_context().get_parameter_source("trains") != ParameterSource.DEFAULT
    with input_errors(ModelError):
        task = task_of(
            trains if is_typed else None, new_tokens, adapters, TaskWords("--train", "--infer", "--generate", "--lora")
        )
    if sharding is not None and not task.trains:
        option = "--infer" if new_tokens is None else "--generate"
        raise click.UsageError(f"--shard is for a training step, because inference is not sharded; leave out {option}")
    shared = None if sharding is None else sharding.sharding
    if shared is not None and task.lora is not None and "tp" in dict(shared.parts):
        raise click.UsageError(
            "--lora cannot be combined with --shard tp, because the model's tensor-parallel plan names no adapters"
        )
    if blocks is not None and not task.trains:
        raise click.UsageError("--blocks is for a training step, because inference recomputes nothing; leave it out")
    with input_errors(ConfigError):
        configs, refused = named_configs(words, sharding, blocks)
    if words and everything:
        raise click.UsageError("--config names configs and --all measures all of them: use only one option")
    if largest_batch and longest_sequence:
        raise click.UsageError("--largest-batch and --longest-sequence exclude each other: use one at a time")
    dimension: SizeAxis | None = "samples" if largest_batch else "tokens" if longest_sequence else None
    search = Search(fits, configs, everything, blocks, task, dimension, sharding, refused)
    with input_errors(ModelError):
        name = model_name(subject_name)
    if name is None:
        check_form(subject_name)
        for_named_models = {
            "--batch": size,
            OPTIONS[dimension or "samples"]: dimension,
            "--generate": new_tokens,
            "--lora": adapters,
        }
        for option, value in for_named_models.items():
            if value is not None:
                raise click.UsageError(f"{option} is for a model by name; {subject_name} returns its own batch")
    advice = _search(search, _ModelArgument(subject_name, name, size), device_names, over_time=form == "html")
    status = INTERRUPTED if not advice.finished else 0 if advice.fits(every=_EVERY not in device_names) else 1
    _print(advice, form, status)
    sys.exit(status)


def _print(advice: Advice, form: str, status: int) -> None:
    if form == "text":
        write_lines(lines(advice))
    elif form == "json":
        click.echo(to_json(advice, status), nl=False)
    else:
        click.echo(markdown(advice) if form == "markdown" else html(advice), nl=False)


@dataclass(frozen=True)
class _ModelArgument:
    """The argument MODEL: the name of a library's model, for example ``timm:resnet50``, or a function."""

    text: str
    name: ModelName | None
    size: BatchSize | None

    def on_device(self, search: Search, device: Device) -> AdviceSubject:
        """Make the model and its batch on a device in this process."""
        with collected_warnings() as warned:
            if self.name is not None:
                subject = subject_by_name(self._model(self.name, search), search.blocks)
            else:
                subject = subject_of(named_function(self.text), device.torch_device, search.blocks, search.task)
        return replace(subject, warnings=tuple(warned))

    def on_cards(self, search: Search, gpus: Sequence[Gpu]) -> AdviceSubject:
        """Return the model for processes with emulated GPUs.

        A named model is made in this process, which must not use CUDA. A function might use CUDA, so it is called in forks.
        """
        if self.name is not None:
            with gpu_unseen(), collected_warnings() as warned:
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
            is_own_module = any(Path(path).is_file() for path in (f"{name.source}.py", f"{name.source}/__init__.py"))
            hint = f"; {name.source}: is a source of models, so import the function into a module with another name"
            raise InputError(f"{error}{hint if is_own_module else ''}") from None
        click.echo(model.title, err=True)
        return model


def _search(search: Search, model: _ModelArgument, device_names: Sequence[str], *, over_time: bool) -> Advice:
    """Search on the named devices. Raises ``click.ClickException``."""
    gpus = _gpus(device_names)
    if len(device_names) > 1 and not gpus:
        raise click.UsageError("several devices are only possible if all are emulated, for example emulated:h100")
    try:
        if gpus:
            return _search_on_cards(search, gpus, lambda: model.on_cards(search, gpus), over_time=over_time)
        return _search_on_device(
            search, device_names[0], lambda device: model.on_device(search, device), over_time=over_time
        )
    except SubjectError as error:
        raise click.UsageError(str(error)) from None
    except TrialFailed as error:
        raise _ModelFailed(str(error)) from None


class _ModelFailed(InputError):
    """Error for an existing model that fails by itself."""

    exit_code = 1


def _gpus(names: Sequence[str]) -> list[Gpu]:
    """Return the GPUs to emulate, or an empty list if another device is named. Raises `InputError`."""
    if not all(name.startswith(EMULATED) for name in names):
        return []
    own = own_gpus_around()
    with input_errors(ValueError):
        gpus = [gpu for name in names for gpu in (known_gpus(own) if name == _EVERY else (emulated_gpu(name, own),))]
    for gpu in gpus:
        if gpu.count > 1:
            raise InputError(
                f"{gpu.device}: advise measures a single GPU; use {gpu.device.removesuffix(f'x{gpu.count}')}, with "
                f"--shard fsdp,world={gpu.count} to measure one of {gpu.count} ranks"
            )
    return list(dict.fromkeys(gpus))


_EVERY = f"{EMULATED}{EVERY}"


def _search_on_device(
    search: Search, device_name: str, subject_on: Callable[[Device], AdviceSubject], *, over_time: bool
) -> Advice:
    """Search on a device in this process."""
    if search.fits is None and (search.size_axis is not None or not (search.everything or search.configs)):
        alternative = "" if search.size_axis is not None else " (or measure every combination with --all)"
        raise click.UsageError(f"this device needs a limit: give its memory, for example --fits 24GB{alternative}")
    device = _device(device_name)
    subject = subject_on(device)

    def try_on_device(sized: AdviceSubject, config: StepConfig) -> tuple[Trial, str | None]:
        # Peaks on an emulated GPU may lack the convolution workspaces of a real GPU.
        emulation = current_emulation()
        return try_config(device, sized, config), None if emulation is None else emulation.cudnn.lacking()

    name = device.environment().device
    trials = Trials(search.fits, subject, search, try_on_device, WholeLines().write).run(name)
    notes = _notes(search)
    if trials.tried and not device.tells_time:
        notes += (f"{name}: memory from PyTorch's own allocator, no times",)
    advice = Advice(
        subject.title,
        subject.task,
        False,
        (trials,),
        finished=trials.finished,
        notes=notes,
        size_axis=search.size_axis,
        sharding=search.sharding,
        attention=subject.attention,
    )
    return _with_code(
        advice,
        subject,
        device.torch_device.type,
        lambda _, config: explain_config(device, subject, config, over_time=over_time),
    )


def _search_on_cards(
    search: Search, gpus: Sequence[Gpu], make_subject: Callable[[], AdviceSubject], *, over_time: bool
) -> Advice:
    """Search on emulated GPUs, with a process for each config."""
    try:
        prepare()
        begin(gpus[0])
    except EmulationError as error:
        raise click.ClickException(str(error)) from None
    subject = make_subject()
    card_trials: list[DeviceTrials] = []
    elsewhere: dict[StepConfig, list[SizeTrial]] = {}
    for gpu in gpus:
        card = gpu if search.fits is None else with_capacity(gpu, search.fits)
        prefix = f"{card.title}: " if len(gpus) > 1 else ""
        trials = Trials(
            capacity_of(card),
            subject,
            search,
            partial(try_on, card),
            WholeLines().write,
            prefix,
            bool(card_trials),
            elsewhere,
        )
        card_trials.append(trials.run(card.title))
        if not card_trials[-1].finished:
            break
    by_title = {gpu.title: gpu for gpu in gpus}
    return _with_code(
        Advice(
            subject.title,
            subject.task,
            True,
            tuple(card_trials),
            finished=card_trials[-1].finished,
            notes=(*_notes(search), *_notes_on_faster(search, card_trials)),
            size_axis=search.size_axis,
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


def _notes_on_faster(search: Search, trials: Sequence[DeviceTrials]) -> Iterator[str]:
    """Yield notes on untried faster precisions, with the cards' names."""
    cards: dict[str, list[str]] = {}
    for card in trials:
        note = search.note_on_faster(card.tried, card.limit) if card.finished else None
        if note is not None:
            cards.setdefault(note, []).append(card.name)
    yield from (f"{', '.join(names)}: {note}" if len(trials) > 1 else note for note, names in cards.items())


def _with_code(
    advice: Advice, subject: AdviceSubject, device_type: str, explain: Callable[[str, StepConfig], Explanation | str]
) -> Advice:
    """Add the code for each recommended config, and the composition of its peak.

    If several devices have the same recommended config, it is explained on the first device.
    """
    first_device: dict[StepConfig, str] = {}
    for device in advice.devices:
        if device.chosen is not None:
            first_device.setdefault(device.chosen.config, device.name)
    configs = []
    for config, device_name in first_device.items():
        code = tuple(code_of(config, device_type, subject.containers, subject.task))
        explanation: Explanation | str = ""
        # After Ctrl-C, no other step is run.
        if advice.finished:
            progress = WholeLines()
            progress.write(f"{config}: the composition of its peak ... ")
            try:
                explanation = explain(device_name, config)
                progress.write(f"{explanation if isinstance(explanation, str) else 'known'}\n")
            except KeyboardInterrupt:
                progress.write("interrupted\n")
                advice = replace(advice, finished=False)
        why_not, composition = (explanation, None) if isinstance(explanation, str) else ("", explanation)
        configs.append(Recommendation(config, device_name, code, composition, why_not))
    return replace(advice, recommended=tuple(configs))


def _device(name: str) -> Device:
    all_factories = factories(name, () if name in (*BUILT_IN, AUTO) else devices_of_plugins())
    if name not in (*all_factories, AUTO):
        near = nearest_device_or_emulated(name, [*all_factories, AUTO], own_gpus_around())
        raise click.UsageError(f"--device {name}: no such device; {near}")
    try:
        return Devices(all_factories).get(name)
    except DeviceUnavailable as unavailable:
        raise click.ClickException(
            f"{unavailable}; use an emulated GPU (--device emulated:h100) or the CPU (--device cpu)"
        ) from None
