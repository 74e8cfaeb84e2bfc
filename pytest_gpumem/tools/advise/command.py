"""``gpumem advise``: finds a step config with which a model's training or inference step fits into a GPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

from pytest_gpumem.base.errors import (
    ConfigError,
    DeviceUnavailable,
    EmulationError,
    ModelError,
    SubjectError,
    TrialFailed,
)
from pytest_gpumem.base.units import parse_size
from pytest_gpumem.emulating.emulation.gpus import EVERY, Gpu, emulated_gpu, known_gpus, nearest_device_or_emulated
from pytest_gpumem.emulating.emulation.load import current_emulation, prepare
from pytest_gpumem.facts.values.option_words import DEFAULT_DEVICE, EMULATED
from pytest_gpumem.measuring.devices.registry import AUTO, BUILT_IN, Devices, factories
from pytest_gpumem.measuring.models.lora import DTYPE_OF_ADAPTERS, Lora, lora
from pytest_gpumem.measuring.models.name import BatchSize, ModelName, batch_size
from pytest_gpumem.measuring.models.sources import model_name, named_model
from pytest_gpumem.measuring.models.task import TaskWords, task_of
from pytest_gpumem.tools.advise.cards import begin, capacity_of, explain_on, subject_in_forks, try_on, with_capacity
from pytest_gpumem.tools.advise.formats import html, markdown, to_json
from pytest_gpumem.tools.advise.largest import OPTIONS
from pytest_gpumem.tools.advise.results import Advice, DeviceTrials, Recommendation
from pytest_gpumem.tools.advise.run_warnings import collected_warnings
from pytest_gpumem.tools.advise.search_order import Search
from pytest_gpumem.tools.advise.shard_option import PER_RANK, named_configs, sharding_of
from pytest_gpumem.tools.advise.snippet import code_of
from pytest_gpumem.tools.advise.texts import lines
from pytest_gpumem.tools.advise.trial import AdviceSubject, explain_config, subject_by_name, subject_of, try_config
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
    from pytest_gpumem.measuring.devices.contract import Device
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
    help="Limit the step to this much memory, for example `24GB` or `80GiB`. Default on an emulated GPU: the GPU's "
    "memory. On other devices there is no default: give --fits, or measure without a limit by --config or --all.",
)
@click.option(
    "--device",
    "device_names",
    metavar="DEVICE",
    default=(DEFAULT_DEVICE,),
    show_default=True,
    multiple=True,
    shell_complete=completion.devices,
    help="Measure on this device: `cuda`, `cpu`, `auto` (`cuda` if there is a GPU, else `cpu`), an emulated GPU such as "
    "`emulated:l4`, or a device from a plugin. May be repeated for emulated GPUs; `emulated:all` tries all of them.",
)
@click.option(
    "--batch",
    "size",
    metavar="SIZE",
    callback=parsed(batch_size),
    help="Make this batch for a named model. `32` is 32 samples, `4x4096` is 4 texts with 4,096 tokens, and `8x512` is 8 "
    "images with 512 x 512 pixels, or latents with this side. Default: 1 sample.",
)
@click.option(
    "--config",
    "words",
    metavar="CONFIG",
    multiple=True,
    help="Measure this config and do not search, for example `amp-bf16,clip=1`. May be repeated.",
)
@click.option(
    "--shard",
    "sharding",
    metavar="KIND,world=N",
    callback=parsed(sharding_of),
    help="Measure a single rank of a sharded training job, for example `fsdp,world=8`: FSDP on 8 ranks. KIND is a value of "
    "`shard=` in step configs.",
)
@click.option("--train/--infer", "trains", default=True, help="Measure a training step (the default), or inference.")
@click.option(
    "--generate",
    "new_tokens",
    metavar="N",
    type=WholeNumber(min=1),
    help="Measure a call of `generate` that adds N tokens to the prompt, for example `256`. This needs a named model from "
    "transformers. --batch sets the number of prompts and their length.",
)
@click.option(
    "--lora",
    "adapters",
    metavar="SETTINGS",
    callback=parsed(lora),
    help="Add PEFT's LoRA adapters to a named model, and train only the adapters. Examples: `r=8`, "
    "`r=8,alpha=16,targets=q_proj+v_proj`.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Do not stop when a config fits, but measure every combination of the search's values. A training step has up to 96 "
    "combinations.",
)
@click.option(
    "--largest-batch",
    is_flag=True,
    help="Also find how many samples a batch may have before a named model's step no longer fits. The command runs the step "
    "with growing batches, with the recommended config or with each --config.",
)
@click.option(
    "--longest-sequence",
    is_flag=True,
    help="Also find how many tokens a sample may have before a named model's step no longer fits, as --largest-batch does for "
    "samples.",
)
@click.option(
    "--blocks",
    metavar="PATTERN",
    help="Checkpoint or shard these repeated layers of the model. PATTERN names their container, for example `transformer.h`, "
    "or the layers themselves. Default: the command finds them.",
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

    A config says how a step runs: `amp-bf16,checkpoint=blocks` is mixed precision with recomputed layers. The command measures
    the step with one config after another until the step fits. It prints the peak with each config, the code for the config
    that fits, and a list of the live tensors at the peak.

    The step is a training step with AdamW, or with --infer a forward pass. The step fits if the allocator reserves no
    more than the GPU's memory, or no more than --fits. On a CPU, the bytes in tensors are compared instead.

    \b
    MODEL names a model from a library, or your own function:
      hf:ORG/NAME       a transformers model, by its name on the Hugging Face
                        hub; or a folder or `config.json` instead of ORG/NAME
      hf-tiny:ORG/NAME  the same model with only two layers of each kind
      timm:NAME         a timm model
      torchvision:NAME  a torchvision model
      diffusers:CLASS   a diffusers network, by its class or its configuration
      MODULE:FACTORY    a function that returns `(model, batch)` or
                        `(model, batch, loss)`; `loss` is called with the
                        output and the batch

    Models from a library are called named models. The command makes their weights and batches at random. It loads no
    checkpoint, and runs no code from the hub.

    \b
    The search begins with fp32, and then changes the config in this order. In
    training, a change that saves memory stays in all later configs:
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

    Exit status: 0 if a config fits into each --device, or with `emulated:all` at least one GPU, 1 if no config fits, the
    model fails by itself or the device cannot be used, 2 for wrong usage, 130 after Ctrl-C.
    \f
    If no limit is given, the status is 0 after at least one config was measured. With `--largest-batch`, the
    status is also 0 if only fewer samples than in `--batch` fit, and with `--longest-sequence` if only fewer tokens fit.
    After Ctrl-C, the command prints the configs measured so far, and recommends the best fitting config.

    ## `--batch`

    - If you give only the samples (`32`), or leave out this option, the model decides the size. A text has as many tokens as
      the model has positions, but at most 2,048. An image has the side for which the model was made.
    - A function (`MODULE:FACTORY`) returns its own batch, so this option is refused.

    ## `--config`

    On an emulated GPU, a mixture of experts that loops over its experts needs a config with a
    [routing](../concepts/emulated-gpu.md#routing-of-experts), for example `bf16,routing=balanced`.

    ## `--shard`

    - The text is a kind of sharding, `world=N` for the number of ranks, and optionally `rank=M` for a rank other than the
      first: `hsdp:2,world=16,rank=3`. The kinds are in [step configs](step-configs.md).
    - A rank has a GPU to itself. Memory, `--batch` and the results of `--largest-batch` are those of a single rank.
    - If a config cannot be combined with the sharding, its row in the table contains the reason.
    - `--infer` and `--generate` cannot be sharded.

    ## `--generate`

    - The step is a single call of the model's `generate`. It processes the prompt, and then generates N tokens with a cache of
      keys and values.
    - Decoding is greedy, and no token ends it early. Beams, repetition rules and stop tokens in the model's configuration are
      ignored, and there is no padding. So lengths and bytes are exact, even on an emulated GPU, which does not compute tokens.
    - The model must be a causal language model or an encoder-decoder. In an encoder-decoder, the prompt is the encoder's input.
      The prompt and the new tokens must fit into the model's positions. Whisper can be measured only on a CPU or a real GPU,
      because it reads its own tokens to split the sound.
    - The search tries the configs for inference. `--config cache=off` generates without the cache.
    - `--largest-batch` finds how many prompts fit at once, and `--longest-sequence` finds how long a prompt may be.
    - A growing cache (`DynamicCache` in transformers) finally contains
      `2 x layers x key heads x head size x (prompt tokens + N - 1) x samples` numbers, because the last token is not fed back.
      While the cache grows, the keys or values of a single layer exist twice.
    - The peak with few tokens does not predict the peak with many tokens. With few tokens, the prompt decides the peak. For
      example, a small GPT-2 with prompts of `4x64` reserves 48.23 MB for 32, 64 and 96 tokens, and 56.62 MB for 384 tokens.
      With many tokens, the allocator reserves more and more unused memory, because a longer block rarely fits into the space
      of a shorter block. For example, a two-layer Llama with prompts of `128x4` reserves 94 MB for 67 MB in tensors after 32
      tokens, 170 MB for 109 MB after 96 tokens, and 3.11 GB for 299 MB after 384 tokens.
    - If N is 82 or more, an emulated GPU runs only 41 tokens: the first 28 tokens after the prompt, and the last 13 tokens
      after another prompt that is as long as all text before them. If the allocations repeat from token to token, PyTorch's
      allocator then repeats them for all N tokens. So allocated and reserved peaks are exact to the byte, but the peak's
      tensors are not listed. If the allocations do not repeat, for example because the text reaches a sliding window, all N
      tokens run.

    ## `--lora`

    - `r` is the rank of the adapters. `alpha` and `targets` are `lora_alpha` and `target_modules` in PEFT's `LoraConfig`.
    - PEFT knows default targets for many models from transformers. For other models from transformers, the default is
      `targets=all-linear`. Models from other libraries need `targets`.
    - The model's own weights have no gradients and no optimizer state. They are stored in the config's precision.
    - With `bf16`, the adapters are stored in bfloat16 as well, and the printed code does the same. PEFT's default is float32.
    - `--infer` and `--generate` are refused, because adapters are merged into the weights for inference and then need no
      memory.

    ## `--all`

    If no limit is given, the command recommends the config with the best saving for its extra time.

    ## `--largest-batch`

    - The step runs with the printed size and fits. It also runs with the next size and does not fit. With `accumulate=4`, the
      next size is 4 samples larger.
    - If the model itself limits the size, for example by its number of positions, the command prints the reason.
    - If no config fits with `--batch`, the command searches with the config of the smallest peak.

    ## `--blocks`

    The pattern is used by `checkpoint=ops`, `checkpoint=blocks`, and kinds of sharding that shard each block separately.

    ## Named models

    **Configuration.** From the hub, only `config.json` is fetched. The command refuses a configuration that would run foreign
    code or load files:

    - `auto_map`, if transformers does not have the model itself;
    - `trust_remote_code`, `use_kernels`, `kernel_config` or `attribute_map`;
    - a checkpoint, or a `backbone` in another repository;
    - attention or experts from outside transformers, for example `"attn_implementation": "org/kernel"`.

    The values `sdpa`, `eager` and `flash_attention_2` are accepted. If the package `kernels` is installed, transformers may
    load kernels of its own choice. `USE_HUB_KERNELS=NO` prevents most of them.

    **transformers.**

    - The class is the first entry of `architectures` that transformers has. Weights are made in the precision that the
      configuration names, or else in float32.
    - The random batch contains tokens, images or sounds, and the labels that the class expects. There is no padding and no
      mask.
    - Training uses no cache of keys and values.
    - If `--batch` sets a side other than the model's own, the model gets as many positions as an image has patches.
    - If the command cannot make a batch, for example for texts with images, the message says which function to write.

    **timm and torchvision.**

    - Images have the size for which the weights were trained. For torchvision, `get_model_weights(NAME).DEFAULT` has the size:
      crops, whole images for segmentation, or clips of 16 frames. For timm, a tag in the name (`resnet50.a1_in1k`) selects the
      image size and the classes.
    - The loss is the cross-entropy of the output, plus the cross-entropy of each auxiliary classifier.
    - A detector computes its own losses, for 7 objects in each image. It cannot run on an emulated GPU, because it reads the
      boxes on the host.

    **diffusers.**

    - `diffusers:CLASS` uses the default configuration of the class, `diffusers:ORG/NAME/unet` the configuration on the hub, and
      `diffusers:./unet` the configuration in a folder or file.
    - Supported classes are `UNet2DConditionModel` (also for SDXL), `UNet2DModel`, `AutoencoderKL`, `VQModel`, and the
      transformers of SD3, Flux and DiT. No pipeline runs.
    - A sample is the input of `forward`: latents, or for an autoencoder pixels. The title shows its shape
      (`batch 1 of 4x128x128`). The loss is the mean squared error against noise.

    ## Functions

    - `MODULE` is an installed module, or a module in the current folder. The returned `batch` may be a function that makes a
      batch.
    - `FACTORY` is called without arguments while the measured device is torch's default device. If this call fails, for example
      because `FACTORY` uses NumPy arrays or a random generator on the CPU, `FACTORY` is called again without a default device.
      The command then moves the model and the batch to the device.
    - For emulated GPUs, each measuring process imports `MODULE` and calls `FACTORY`. What they print goes to standard error.
    - A module must not be named like a source of models, such as `hf`. Write `my_project.hf:make` if the module is in a
      package, or else import the function into a module with another name.

    ## Search

    - `accumulate=N` splits the batch into N micro-batches, so the search tries only numbers that divide the samples evenly.
    - With a sharding by `fully_shard`, the search tries `mp-bf16` before `amp-bf16`. It skips configs if they cannot be
      combined with the sharding.
    - If a config cannot run here, fails or runs out of memory, its row in the table contains the reason. If `fp32`, the first
      config, fails with another error than missing memory, the search ends.
    - Steps are not timed on an emulated GPU, so the first config that fits is recommended. If faster precisions were not tried,
      a note names them. `--all` tries them.
    - On emulated GPUs, each config first runs with nearly unlimited memory. If its tensors would fit into the GPU but the
      reserved memory would not, the config runs again with the GPU's memory, because the allocator then releases its cache.
    - In the table, `lacks` is the missing memory. If there are more GPUs than configs, each GPU has a row.
    - "cannot run" means: torch has no kernels for the GPU, or the GPU lacks a feature. For example, flash attention
      needs compute capability 8.0.
    - A precision that torch has to emulate on the GPU, such as bfloat16 on a T4, is measured. It is recommended only if no
      other config fits.

    ## Output

    - The table, the code and the tensors at the peak go to standard output. Progress goes to standard error.
    - The CUDA context and other processes need GPU memory as well. The table does not count them.
    - `attention:` names the implementation that transformers chose for the model: `sdpa` or `eager`. Eager attention stores the
      scores for all pairs of tokens, so it can need much more memory.
    - The recommended config runs again with a recorder, on the first device for which it is recommended. The bytes in tensors
      at its peak are printed by category and module. The allocator reserves somewhat more.
    - Warnings below the table come from Python and from the model's libraries. Each warning is printed once. For example,
      transformers warns that it uses its reference code for Mamba, because `mamba_ssm` is not installed. The figures then
      describe the reference code.

    ## JSON

    | key | value |
    |---|---|
    | `format`, `exit_status` | 1, and the command's exit status |
    | `finished` | `false` after Ctrl-C |
    | `subject`, `step`, `new_tokens`, `lora` | the model, the kind of step, and the values of `--generate` and `--lora` |
    | `attention` | the implementation of attention; `null` if transformers chose none for the model |
    | `emulated`, `shard` | whether the devices are emulated, and the value of `--shard` |
    | `largest_of` | `samples` with `--largest-batch`, `tokens` with `--longest-sequence` |
    | `devices` | each device: `device`, `limit`, `recommended` and `configs` |
    | `recommended` | each recommended config: `config`, `device`, `code`, `made_of_bytes`, `phase`, `made_of`, `why_not` |
    | `notes`, `warnings` | the texts below the table |

    Each entry in `configs` has `config`, `peak` (the bytes that must fit), `peak_allocated` (the bytes in tensors in the same
    run), `step_time`, `fits`, `why_not`, `slow` and `largest` (with its `size`). `made_of` lists the categories with their
    modules. `made_of_bytes` is the sum of all categories: the peak of the recorded run.
    """
    is_typed = click.get_current_context().get_parameter_source("trains") != ParameterSource.DEFAULT
    with input_errors(ModelError):
        task = task_of(
            trains if is_typed else None, new_tokens, adapters, TaskWords("--train", "--infer", "--generate", "--lora")
        )
    if sharding is not None and not task.trains:
        option = "--infer" if new_tokens is None else "--generate"
        raise click.UsageError(
            f"--shard needs a training step, because inference cannot be sharded; leave out {option}"
        )
    shared = None if sharding is None else sharding.sharding
    if shared is not None and task.lora is not None and "tp" in dict(shared.parts):
        raise click.UsageError(
            "--lora cannot be combined with --shard tp, because the model's tensor-parallel plan does not name the adapters; "
            "leave out one of them"
        )
    if blocks is not None and not task.trains:
        raise click.UsageError("--blocks needs a training step, because inference recomputes nothing; leave it out")
    with input_errors(ConfigError):
        configs, refused = named_configs(words, sharding, blocks)
    if words and everything:
        raise click.UsageError(
            "--config selects configs, but --all measures all configs: use only one of these options"
        )
    if largest_batch and longest_sequence:
        raise click.UsageError(
            "--largest-batch and --longest-sequence exclude each other: run the command once with each"
        )
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
                raise click.UsageError(
                    f"{option} needs a named model such as hf:ORG/NAME, but {subject_name} is a function that makes its own "
                    "model and batch; leave it out"
                )
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
    """The command's argument MODEL: the name of a library's model, for example ``timm:resnet50``, or a user's function."""

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
        """Return the model for forks of this process, in which GPUs are emulated.

        This process must not use CUDA before it is forked. So a named model is made here while no GPU is visible. A user's
        function could use CUDA, so only the forks call it.
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
            hint = (
                f"; {name.source}: means a library's model here, so import your function into a module with another name "
                "and name that module"
            )
            raise InputError(f"{error}{hint if is_own_module else ''}") from None
        click.echo(model.title, err=True)
        return model


def _search(search: Search, model: _ModelArgument, device_names: Sequence[str], *, over_time: bool) -> Advice:
    """Search for a fitting config on each named device. Raises ``click.ClickException``."""
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
    """Error if a model was found, but cannot be made, or its first step fails."""

    exit_code = 1


def _gpus(names: Sequence[str]) -> list[Gpu]:
    """Return the GPUs to emulate, or an empty list if a device in ``names`` is not emulated. Raises `InputError`."""
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
    """Search for a fitting config on a device, and run all steps in this process."""
    if search.fits is None and (search.size_axis is not None or not (search.everything or search.configs)):
        alternative = "" if search.size_axis is not None else ", or measure every combination with --all"
        raise click.UsageError(
            f"{device_name} has no default limit: give the memory that the step may take, for example --fits 24GB{alternative}"
        )
    device = _device(device_name)
    subject = subject_on(device)

    def try_on_device(sized: AdviceSubject, config: StepConfig) -> tuple[Trial, str | None]:
        # On an emulated GPU, peaks may lack the workspaces that cuDNN's kernels need on a real GPU.
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
    """Search for a fitting config on each emulated GPU. Each config runs in its own process."""
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
    """Yield a note for each faster precision that the search did not try, with the names of the cards."""
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

    If several devices have the same recommended config, the composition comes from the first of these devices.
    """
    first_device: dict[StepConfig, str] = {}
    for device in advice.devices:
        if device.chosen is not None:
            first_device.setdefault(device.chosen.config, device.name)
    configs = []
    for config, device_name in first_device.items():
        code = tuple(code_of(config, device_type, subject.containers, subject.task))
        explanation: Explanation | str = ""
        # After Ctrl-C, run no more steps.
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
