"""Tests for models that the settings or ``--gpumem-model`` name: one test for each model and config, without a test file."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_gpumem.judging.gate.verdict import Cell
from pytest_gpumem.plugin.config.models import chosen, from_root
from pytest_gpumem.plugin.config.options import ARGUMENT, CELL, MARKER

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from pytest_gpumem.plugin.config.models import ModelStep
    from pytest_gpumem.plugin.config.settings import Settings
    from pytest_gpumem.plugin.fixture import Gpumem

_FLAG = "--gpumem-model"
Place = Literal["alone", "added", "in its file"]


class ModelTests:
    """A plugin that collects the models' tests as items in ``pyproject.toml``, so pytest can run a printed test id again.

    pytest collects these tests if it collects ``pyproject.toml``, for example with
    ``pytest "pyproject.toml::timm:resnet18[8-fp32]"``. It also adds them to a run without paths that collects
    ``testpaths``, and to each run with ``--gpumem-model``. If you type ``--gpumem-model`` without a path, only these tests
    run.
    """

    def __init__(self, config: pytest.Config, settings: Settings) -> None:
        root = config.rootpath
        steps = [replace(step, model=from_root(step.model, root, root)) for step in settings.models]
        typed = [from_root(name, settings.model_base, root) for name in settings.model]
        self._path = root / "pyproject.toml"
        self._steps = chosen(steps, typed) if typed else tuple(steps)
        # A pytest-xdist worker gets the controller's typed arguments, so both compute the same `Place`.
        self._place = self._place_in(config, bool(typed))

    def _place_in(self, config: pytest.Config, typed: bool) -> Place:
        """Return how the models' tests join the collection: ``"alone"`` (only they run), ``"added"`` to the other tests, or
        only if pytest collects ``pyproject.toml`` (``"in its file"``).
        """
        folder, source = config.invocation_params.dir, config.args_source
        # If ``--gpumem-model`` is in ``addopts``, it applies to every run, so it must not exclude all other tests.
        is_typed_by_hand = any(word.partition("=")[0] == _FLAG for word in map(str, config.invocation_params.args))
        if typed and is_typed_by_hand and source is not pytest.Config.ArgsSource.ARGS:
            return "alone"
        paths = [Path(os.path.abspath(folder / word.partition("::")[0])) for word in config.args]  # noqa: PTH100
        if self._path.is_file() and any(path in (self._path, *self._path.parents) for path in paths):
            return "in its file"
        return "added" if typed or source is pytest.Config.ArgsSource.TESTPATHS else "in its file"

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
        return self._file(parent) if file_path == self._path else None

    @pytest.hookimpl(wrapper=True)
    def pytest_make_collect_report(
        self, collector: pytest.Collector
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        if isinstance(collector, pytest.Session) and report.passed and self._place != "in its file":
            report.result = [*(report.result or () if self._place == "added" else ()), self._file(collector)]
        return report

    def _file(self, parent: pytest.Collector) -> pytest.Collector:
        return ModelFile.from_parent(parent, path=self._path, steps=self._steps)


class ModelFile(pytest.File):
    """A collector for the file ``pyproject.toml``, which yields a test for each model's step."""

    def __init__(self, *, steps: Sequence[ModelStep], **more: Any) -> None:
        super().__init__(**more)
        self._steps = steps

    def collect(self) -> Iterator[pytest.Item]:
        lines = lines_of(self._steps, self.path.read_text(encoding="utf-8") if self.path.is_file() else "")
        configs = Counter(step.matrix for step in self._steps)
        for step, line in zip(self._steps, lines, strict=True):
            test = ModelTest.from_parent(self, name=step.name, step=step, line=line)
            if configs[step.matrix] > 1:
                test.stash[CELL] = Cell(f"{self.nodeid}::{step.matrix}", str(step.config), step.index)
            yield test


class ModelTest(pytest.Function):
    """A test for a step of a model.

    It is a test function with the fixture ``gpumem``, so markers, autouse fixtures and hooks apply as to any test.
    """

    def __init__(self, *, step: ModelStep, line: int | None, **more: Any) -> None:
        root = more["parent"].config.rootpath

        def measure_step(gpumem: Gpumem) -> None:
            measure(self, step, root, gpumem)

        super().__init__(callobj=measure_step, **more)
        self._line = line
        self.add_marker(getattr(pytest.mark, MARKER)(**step.limits))
        if step.entry is None:
            self.stash[ARGUMENT] = f"{_FLAG}={step.model}"

    def reportinfo(self) -> tuple[Path, int | None, str]:
        """Return the file, line and name of the model's entry in the settings.

        A model from ``--gpumem-model`` has no line.
        """
        return self.path, self._line, self.name


def lines_of(steps: Sequence[ModelStep], text: str) -> list[int | None]:
    """Return the line of each step's entry in the settings, counted from 0.

    Entries are searched in order, and an entry's line is the next line that contains the model's name. For example, if
    lines 3 and 9 in ``text`` name ``timm:resnet18``, they belong to the first and the second entry with this model.

    Args:
        steps: The steps, in the order of their entries.
        text: The content of ``pyproject.toml``.
    """
    lines = text.splitlines()
    line_by_entry: dict[int, int | None] = {}
    begin = 0
    for step in steps:
        if step.entry is not None and step.entry not in line_by_entry:
            line = next((number for number in range(begin, len(lines)) if step.written in lines[number]), None)
            line_by_entry[step.entry] = line
            begin = begin if line is None else line + 1
    return [None if step.entry is None else line_by_entry[step.entry] for step in steps]


def measure(item: pytest.Item, step: ModelStep, root: Path, gpumem: Gpumem) -> None:
    """Measure the step of a model, as a test function would.

    If no step can be made from the model and the config, fail the test with one sentence, without a traceback.
    """
    import torch

    from pytest_gpumem.base.errors import ConfigError, ModelError, NotAStep
    from pytest_gpumem.measuring.measure.random_numbers import restored_random_numbers
    from pytest_gpumem.measuring.models.sources import named_model
    from pytest_gpumem.measuring.steps.precision import dtype_of_weights
    from pytest_gpumem.plugin.runtest.hooks import refuse, run_of

    run = run_of(item) or refuse(item)
    dtype = dtype_of_weights(step.config.precision)
    try:
        model = named_model(replace(step.model, base=root), step.batch, step.task)
        with restored_random_numbers(run.device):
            # Use the same weights in each run, because the memory of some models depends on values. For example, weights
            # decide which expert gets a token.
            torch.manual_seed(0)
            if step.task.trains:
                gpumem.train_step(lambda: model.build(dtype), model.batch, config=step.config, loss=model.loss)
            else:
                new_tokens = step.task.new_tokens
                gpumem.infer_step(lambda: model.build(dtype), model.batch, config=step.config, new_tokens=new_tokens)
    except (ModelError, ConfigError, NotAStep) as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
