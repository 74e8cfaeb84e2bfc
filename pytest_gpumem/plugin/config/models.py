"""Read ``[[tool.gpumem.models]]``. Each entry defines tests for a model from a library, without a test file."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import BudgetError, ConfigError, ModelError, SettingsError
from pytest_gpumem.base.units import nearest
from pytest_gpumem.measuring.models.lora import lora
from pytest_gpumem.measuring.models.name import BatchSize, ModelName, batch_size
from pytest_gpumem.measuring.models.sources import check_task
from pytest_gpumem.measuring.models.task import TRAINING, Task, TaskWords, task_of
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.generation import only_for_generation
from pytest_gpumem.plugin.config.conversions import model_of
from pytest_gpumem.plugin.config.keys import MODEL_KEYS
from pytest_gpumem.plugin.config.marker import budget_from_arguments
from pytest_gpumem.plugin.config.marker_arguments import MARKER_ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_WORDS = TaskWords("train = true", "train = false", "generate", "lora")
_PLAIN = StepConfig("fp32")


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A test without a test file. It measures one step of a named model, with one step config."""

    model: ModelName
    batch: BatchSize | None = None
    """The batch's size; ``None`` for one sample of a usual length."""
    config: StepConfig = _PLAIN
    task: Task = TRAINING
    limits: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of the test's marker ``gpumem``."""
    entry: int | None = None
    """The index of the test's entry in ``[[tool.gpumem.models]]``; ``None`` for a model from ``--gpumem-model``."""
    written: str = ""
    """The model's name as the user wrote it in this entry."""
    index: int = 0
    """The index of the test's config among the configs in this entry."""

    @property
    def matrix(self) -> str:
        """The part of the test's name that all tests from the same entry share, which is the name without the config:
        ``"hf-tiny:openai-community/gpt2[4x128]"``.
        """
        return self._named(self._size)

    @property
    def name(self) -> str:
        """The test's name: ``"hf-tiny:openai-community/gpt2[4x128-amp-bf16]"``."""
        return self._named([*self._size, self.config.id])

    @property
    def _size(self) -> list[str]:
        return [*([] if self.batch is None else [str(self.batch)]), *filter(None, [self.task.id])]

    def _named(self, parameters: Sequence[str]) -> str:
        return f"{self.model}[{'-'.join(parameters)}]" if parameters else str(self.model)


def model_steps(entries: Sequence[object], where: str) -> tuple[ModelStep, ...]:
    """Return a step for each config of each entry in ``models``. Raises `SettingsError`."""
    steps: dict[str, ModelStep] = {}
    for number, entry in enumerate(entries):
        for step in _steps_of(entry, number, f"{where} {number + 1}"):
            other = steps.setdefault(step.name, step)
            if other is not step:
                raise SettingsError(
                    f"{where} {number + 1} (model = '{step.model}') and models {(other.entry or 0) + 1} both make the test "
                    f"{step.name}: remove one entry, or give them different batches"
                )
    return tuple(steps.values())


def _steps_of(entry: object, number: int, where: str) -> list[ModelStep]:
    if not isinstance(entry, dict):
        raise SettingsError(f"{where} is {entry!r}, expected a table: [[tool.gpumem.models]]")
    text = entry.get("model")
    if not isinstance(text, str):
        raise SettingsError(f'{where} needs the key model, like model = "hf-tiny:openai-community/gpt2"')
    model = model_of(text, f"{where}: model")
    where = f"{where} (model = {text!r})"
    limits = {name: value for name, value in entry.items() if name not in MODEL_KEYS}
    for name in limits:
        if name not in MARKER_ARGUMENTS:
            raise SettingsError(f"{where}: unknown key {name!r}; {nearest(name, [*MODEL_KEYS, *MARKER_ARGUMENTS])}")
    try:
        budget_from_arguments(limits)
        task = _task(entry)
        check_task(model, task)
        # A batch may also be a whole number, so convert the value to text. `batch_size` raises an error for any other
        # value.
        size = batch_size(str(entry["batch"])) if "batch" in entry else None
        configs = _configs(entry["config"], task) if "config" in entry else [_PLAIN]
    except (BudgetError, ConfigError, ModelError) as error:
        raise SettingsError(f"{where}: {error}") from None
    return [
        ModelStep(model, size, config, task, MappingProxyType(limits), number, text, index)
        for index, config in enumerate(configs)
    ]


def _task(entry: Mapping[str, object]) -> Task:
    # TOML has no null value, so None means that the key is missing.
    trains, tokens, adapters = (entry.get(key) for key in ("train", "generate", "lora"))
    if trains is not None and not isinstance(trains, bool):
        raise ModelError(f"train is {trains!r}, expected true for a training step, or false for inference")
    if adapters is not None and not isinstance(adapters, str):
        raise ModelError(f'lora is {adapters!r}, expected its settings, like lora = "r=8"')
    return task_of(trains, tokens, None if adapters is None else lora(adapters), _WORDS)


def _configs(value: object, task: Task) -> list[StepConfig]:
    words = value if isinstance(value, list) else [value]
    if not words:
        raise ConfigError("config is empty, so the entry makes no test; leave it out for fp32")
    configs = list(dict.fromkeys(map(StepConfig.parse, words)))
    for config in configs:
        config.only_for("train_step" if task.trains else "infer_step")
        if task.new_tokens is not None:
            only_for_generation(config)
    return configs


def chosen(steps: Sequence[ModelStep], typed: Iterable[ModelName]) -> tuple[ModelStep, ...]:
    """Return the steps for the ``typed`` models.

    A typed model without a step in ``steps`` gets a step with one sample and the config ``fp32``.
    """
    groups = [[step for step in steps if step.model == name] or [ModelStep(name)] for name in dict.fromkeys(typed)]
    return tuple(step for group in groups for step in group)


def from_root(model: ModelName, base: Path, root: Path) -> ModelName:
    """Return a model with its path written relative to ``root`` instead of ``base``.

    For example, the model ``hf:nets/gpt``, typed in ``/repo/tests``, becomes ``hf:tests/nets/gpt`` in the root ``/repo``. A
    model whose name is not a path, such as ``hf:openai-community/gpt2``, is returned unchanged.
    """
    path = base / Path(model.name).expanduser()
    if not path.exists():
        return model
    # Do not resolve symbolic links, because this would change the model's name.
    path = Path(os.path.abspath(path))  # noqa: PTH100
    return replace(model, name=(path.relative_to(root) if path.is_relative_to(root) else path).as_posix())
