"""Read a session's `Settings` from ``[tool.gpumem]`` and from the options."""

from __future__ import annotations

import difflib
import fnmatch
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from pytest_gpumem.base.errors import BudgetError, SettingsError
from pytest_gpumem.base.toml import read_toml
from pytest_gpumem.base.units import UnitSystem, nearest, parse_ratio
from pytest_gpumem.base.variables import PYTEST_ADDOPTS
from pytest_gpumem.facts.metrics import METRICS, Tolerance
from pytest_gpumem.facts.values.option_words import (
    DEFAULT_DEVICE,
    EMULATED,
    EMULATED_SLUG,
    Routing,
    UpdateMode,
)
from pytest_gpumem.judging.gate.baseline import Budget
from pytest_gpumem.measuring.timing.sampling import DEFAULT_SECONDS
from pytest_gpumem.plugin.config.conversions import check_in_file, convert, read_value
from pytest_gpumem.plugin.config.keys import BUDGET_KEYS, OTHER_KEYS
from pytest_gpumem.plugin.config.kinds import TABLE, Kind
from pytest_gpumem.plugin.config.marker import budget_from_arguments
from pytest_gpumem.plugin.config.options import (
    DEFAULT_EXPLAIN,
    DEFAULT_RANK_TIMEOUT,
    DEFAULT_STORE,
    OPTIONS,
    ExplainMode,
    Option,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import pytest

    from pytest_gpumem.emulating.emulation.gpus import Gpu
    from pytest_gpumem.measuring.models.name import ModelName
    from pytest_gpumem.plugin.config.models import ModelStep


def matches_test(tests: str, nodeid: str) -> bool:
    """Return whether a pattern with wildcards matches a test's node id, its file or its class.

    For example, ``tests/*`` and ``tests/test_gpt.py::TestTrain`` match ``tests/test_gpt.py::TestTrain::test_step``.
    """
    parts = nodeid.split("::")
    prefixes = ("::".join(parts[:count]) for count in range(1, len(parts) + 1))
    # In fnmatch, brackets are a set of characters. In a node id they are parameters, so escape them.
    pattern = tests.replace("[", "[[]")
    return any(fnmatch.fnmatchcase(prefix, pattern) for prefix in prefixes)


@dataclass(frozen=True, slots=True)
class PatternBudget:
    """An entry in ``[[tool.gpumem.budget]]``: the budget for all tests that match the pattern ``tests``."""

    tests: str
    budget: Budget


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings for a session, from ``[tool.gpumem]`` and the options. They stay the same until the session ends."""

    baseline: bool = False
    update: UpdateMode | None = None
    reason: str | None = None
    """The user's reason for the changes that ``update`` writes, as a single line."""
    store: str = DEFAULT_STORE
    """The store's folder or URL. A relative path starts in ``store_base``."""
    store_base: Path = field(default_factory=Path)
    device: str = DEFAULT_DEVICE
    against: str | None = None
    """The slug of a real GPU. Its baselines are compared with the figures from an emulated GPU."""
    strict: bool = False
    time: bool | None = None
    """True to time all steps, False to time no step. With ``None``, steps are timed if their times are compared, recorded
    or shown."""
    processes: bool = True
    """True to measure other processes that a test or its fixtures start."""
    pack: bool = False
    """True if several tests may use a GPU at the same time, as long as their known peaks fit into its memory."""
    explain: ExplainMode = DEFAULT_EXPLAIN
    artifacts: str | None = None
    """The folder for timelines and snapshots. A relative path starts in ``artifacts_base``."""
    artifacts_base: Path = field(default_factory=Path)
    report: tuple[str, ...] = ()
    """The files for reports. Relative paths start in ``report_base``."""
    report_base: Path = field(default_factory=Path)
    model: tuple[ModelName, ...] = ()
    """The models from ``--gpumem-model``. If a model's name is a relative path, it starts in ``model_base``."""
    model_base: Path = field(default_factory=Path)
    models: tuple[ModelStep, ...] = ()
    """The steps from ``[[tool.gpumem.models]]``. Relative paths to models start in the root directory."""
    rank_timeout: float = DEFAULT_RANK_TIMEOUT
    """If a rank makes no progress for this many seconds while other ranks wait for it, the session ends."""
    routing: Routing | None = None
    """The assumption on an emulated GPU about which experts get each token."""
    units: UnitSystem = "si"
    time_budget: float = DEFAULT_SECONDS
    """The time limit, in seconds, for timing all steps in a test once. Timing them again has a limit of the same length."""
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    budgets: tuple[PatternBudget, ...] = ()
    mark: tuple[str, ...] = ()
    """Patterns for tests that are measured as if they had the marker."""
    gpus: Mapping[str, Gpu] = field(default_factory=dict)
    """The user's own cards for emulation, by name."""
    explicit: bool = False
    """True if the user typed an option, or if there is a table ``[tool.gpumem]``."""

    def compared_slug(self, slug: str) -> str:
        """Return the slug of the device whose baselines are compared with figures from the device ``slug``.

        The two differ only with ``--gpumem-against``.
        """
        return self.against or slug

    @property
    def artifacts_folder(self) -> Path | None:
        """The folder for timelines and snapshots; ``None`` if the session does not write them."""
        return None if self.artifacts is None else self.artifacts_base / self.artifacts

    @property
    def gates(self) -> bool:
        """True if the session is a gate (``--gpumem-baseline`` or ``--gpumem-strict``).

        A gate ends with exit code 0 only if its report passed.
        """
        return self.baseline or self.strict

    @property
    def may_be_accepted_later(self) -> bool:
        """True if the session writes a report from which `gpumem accept` can write baselines.

        Such a report needs all data that a baseline stores.
        """
        return self.baseline and self.against is None and any(file.endswith(".json") for file in self.report)

    def budget_for(self, nodeid: str) -> Budget:
        """Return the limits for a test from ``[[tool.gpumem.budget]]``.

        Each limit comes from the first matching entry that sets it.
        """
        budget = Budget()
        for entry in self.budgets:
            if matches_test(entry.tests, nodeid):
                budget = budget.or_else(entry.budget)
        return budget


DEFAULT_TOLERANCES: Mapping[str, Tolerance] = MappingProxyType(
    {name: metric.tolerance for name, metric in METRICS.items() if metric.tolerance is not None}
)

KEYS: Mapping[str, Kind] = MappingProxyType(
    {
        **{option.name: option.kind for option in OPTIONS if option.is_key},
        **{name: key.kind for name, key in OTHER_KEYS.items()},
    }
)
"""The keys in ``[tool.gpumem]``."""


def is_loaded(config: pytest.Config) -> bool:
    """Return whether this plugin's options are registered with pytest."""
    return all(hasattr(config.option, option.dest) for option in OPTIONS)


def settings_of(config: pytest.Config) -> Settings:
    """Return a session's settings.

    A typed option takes precedence over the key in ``[tool.gpumem]``, and the key takes precedence over the default.

    Raises:
        SettingsError: A setting is wrong.
    """
    options = {option.name: config.getoption(option.dest) for option in OPTIONS}
    return settings_from(config.rootpath, config.invocation_params.dir, options, _only_in_file(config))


def settings_from(
    root: Path, started_in: Path, option_values: Mapping[str, Any], only_in_file: Collection[str] = ()
) -> Settings:
    """Return the settings from the options' values and the root directory's pyproject.toml.

    Args:
        root: pytest's root directory.
        started_in: The folder in which pytest was started. Relative paths in options start in this folder.
        option_values: pytest's parsed values for options, by name. Other names are ignored.
        only_in_file: The names of options whose values come from ``addopts`` in a file, because the user did not type them.

    Raises:
        SettingsError: A setting is wrong.
    """
    path = root / "pyproject.toml"
    table = read_table(path)
    settings = settings_from_table(table, f"{path.name}: [tool.gpumem]") if table is not None else Settings()
    in_root: dict[str, Any] = {f"{option.name}_base": root for option in OPTIONS if option.kind.is_path}
    settings = replace(settings, explicit=table is not None, **in_root)
    options = [option for option in OPTIONS if option_values.get(option.name) is not None]
    if not options:
        return settings
    for option in options:
        if option.name in only_in_file:
            check_in_file(option.kind, option_values[option.name], f"addopts: {option.flag}")
    values = {option.name: _converted(option, option_values[option.name]) for option in options}
    bases: dict[str, Any] = {f"{option.name}_base": started_in for option in options if option.kind.is_path}
    settings = replace(settings, explicit=True, **values, **bases)
    if settings.reason is not None and settings.update is None:
        raise SettingsError(
            "--gpumem-reason is stored with new baselines, and this session writes none: add --gpumem-update=all"
        )
    _check_artifacts(settings)
    _check_against(settings)
    _check_pack(settings, typed="pack" in values)
    return settings


def _only_in_file(config: pytest.Config) -> Collection[str]:
    """Return the names of options that are neither typed nor in ``PYTEST_ADDOPTS``.

    In a pytest-xdist worker, return an empty collection, because the controller has checked the same options.
    """
    if hasattr(config, "workerinput"):
        return ()
    words = [*os.environ.get(PYTEST_ADDOPTS, "").split(), *config.invocation_params.args]
    typed = {str(word).partition("=")[0].lstrip("'\"") for word in words}
    return [option.name for option in OPTIONS if option.flag not in typed]


def _converted(option: Option, value: Any) -> Any:
    """Convert an option's value to the value in `Settings`. Raises `SettingsError`."""
    # `gpumem ab` passes an empty mode to switch off the key `update` in [tool.gpumem].
    return None if option.name == "update" and not value else convert(option.kind, value, option.flag)


def _check_artifacts(settings: Settings) -> None:
    folder = settings.artifacts_folder
    if folder is None:
        return
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        raise SettingsError(f"--gpumem-artifacts={settings.artifacts}: {existing} is a file, expected a folder")


def _check_against(settings: Settings) -> None:
    if settings.against is None:
        return
    option = f"--gpumem-against={settings.against}"
    if not settings.device.startswith(EMULATED):
        raise SettingsError(
            f"{option} compares the figures of an emulated GPU with the baselines of a real one, and this session measures on "
            f"{settings.device}: add --gpumem-device=emulated:h100, say"
        )
    if settings.against.startswith(EMULATED_SLUG):
        raise SettingsError(
            f"{option} does not name a real GPU; to compare with baselines of an emulated GPU, leave the option out"
        )
    if settings.update is not None:
        raise SettingsError(
            f"{option} only compares, because baselines for a real GPU must not come from an emulated GPU: leave "
            f"--gpumem-update={settings.update} out"
        )
    if not settings.baseline:
        raise SettingsError(f"{option} has no effect without a comparison: add --gpumem-baseline")


def _check_pack(settings: Settings, *, typed: bool) -> None:
    from pytest_gpumem.measuring.devices.registry import may_share_memory

    # On the CPU, the typed option is an error. The key in pyproject.toml is allowed, because other sessions may use a GPU.
    if typed and not may_share_memory(settings.device):
        raise SettingsError(
            "--gpumem-pack lets tests share the memory of a GPU, and this session measures on the CPU: leave it out, or add "
            "--gpumem-device=cuda"
        )


def read_table(path: Path) -> dict[str, Any] | None:
    """Return the table ``[tool.gpumem]`` in a pyproject.toml; ``None`` if there is no such table.

    Raises `SettingsError`.
    """
    text = _text(path, path.name)
    return _table(text, path.name) if text is not None and "gpumem" in text else None


def check_readable(path: Path) -> None:
    """Raise `SettingsError` if a pyproject.toml cannot be read.

    Without this check, pytest would later raise a less helpful error for this file.
    """
    text = _text(path, str(path))
    if text is not None:
        _table(text, str(path))


def _text(path: Path, name: str) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{name} is not UTF-8 (byte {error.start}): save it as UTF-8") from None
    except OSError as error:
        raise SettingsError(f"{name} cannot be read: {error.strerror}") from None


def _table(text: str, name: str) -> dict[str, Any] | None:
    try:
        tools = read_toml(text).get("tool", {})
    except ValueError as error:
        raise SettingsError(f"{name}: not TOML: {error}") from None
    if not isinstance(tools, dict):
        raise SettingsError(f"{name}: tool is {tools!r}, expected a table: [tool.gpumem]")
    table = tools.get("gpumem")
    if table is not None and not isinstance(table, dict):
        raise SettingsError(f"{name}: [tool.gpumem] is {table!r}, expected a table")
    return table


def settings_from_table(table: Mapping[str, Any], where: str) -> Settings:
    """Convert a ``[tool.gpumem]`` table to `Settings`. Raises `SettingsError`."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in KEYS:
            raise SettingsError(f"{where}: unknown key {key!r}; {nearest(key, list(KEYS))}")
        values[key] = read_value(KEYS[key], value, f"{where}: {key}")
    tolerances = values.pop("tolerance", {})
    budgets = values.pop("budget", [])
    gpus = own_gpus_in(table, where)
    values.pop("gpus", None)
    models = values.pop("models", [])
    return Settings(
        **values,
        tolerances=MappingProxyType(_tolerances(tolerances, f"{where}: tolerance")),
        budgets=tuple(_budget(entry, f"{where}: budget {number}") for number, entry in enumerate(budgets, start=1)),
        gpus=MappingProxyType(gpus),
        models=_models(models, f"{where}: models"),
    )


def own_gpus_in(table: Mapping[str, Any], where: str) -> dict[str, Gpu]:
    """Return the user's own cards from a table ``[tool.gpumem]``, by name. Raises `SettingsError`."""
    if "gpus" not in table:
        return {}
    from pytest_gpumem.plugin.config.own_gpus import own_gpus

    return own_gpus(read_value(TABLE, table["gpus"], f"{where}: gpus"), f"{where}: gpus")


def _models(entries: Sequence[object], where: str) -> tuple[ModelStep, ...]:
    if not entries:
        return ()
    # Import here, because most projects have no models and do not need the step configs that this module imports.
    from pytest_gpumem.plugin.config.models import model_steps

    return model_steps(entries, where)


def _tolerances(table: Mapping[str, Any], where: str) -> dict[str, Tolerance]:
    tolerances = {}
    for name, text in table.items():
        if name not in DEFAULT_TOLERANCES:
            raise SettingsError(f"{where}: unknown metric {name!r}; {nearest(name, list(DEFAULT_TOLERANCES))}")
        try:
            tolerances[name] = Tolerance(relative=parse_ratio(text))
        except ValueError as error:
            raise SettingsError(f"{where}.{name}: {error}") from None
    return tolerances


def _budget(entry: object, where: str) -> PatternBudget:
    if not isinstance(entry, dict):
        raise SettingsError(f"{where} is {entry!r}, expected a table: [[tool.gpumem.budget]]")
    arguments = {name: value for name, value in entry.items() if name not in BUDGET_KEYS}
    tests = entry.get("tests")
    if not isinstance(tests, str) or not tests:
        close = difflib.get_close_matches("tests", list(arguments), n=1)
        hint = f"; did you mean tests instead of {close[0]!r}?" if close else ', like tests = "tests/test_gpt.py::*"'
        raise SettingsError(f"{where} needs tests, a pattern of test ids{hint}")
    try:
        budget = budget_from_arguments(arguments)
    except BudgetError as error:
        raise SettingsError(f"{where} (tests = {tests!r}): {error}") from None
    if budget == Budget():
        raise SettingsError(f"{where} (tests = {tests!r}) sets no limit; write max_gb = 6.5, say")
    return PatternBudget(tests, budget)


def named_device(word: str, *, typed: bool) -> str:
    """Return the text that names a device in an error message: the option if the device was ``typed``, otherwise the key in
    pyproject.toml.
    """
    return f"--gpumem-device={word}" if typed else f"pyproject.toml: [tool.gpumem]: device = {word!r}"


def check_device(settings: Settings, valid: list[str], *, typed: bool = True) -> None:
    """Raise `SettingsError` if the device in the settings is not in ``valid``.

    Args:
        settings: The settings.
        valid: The names of all devices.
        typed: Whether the device comes from the command line.
    """
    if settings.device not in valid:
        from pytest_gpumem.emulating.emulation.gpus import nearest_device_or_emulated

        near = nearest_device_or_emulated(settings.device, valid, settings.gpus)
        raise SettingsError(f"{named_device(settings.device, typed=typed)}: no such device; {near}")


def options_to_repeat(config: pytest.Config) -> list[str]:
    """Return the typed options that affect measurements, such as ``["--gpumem-device=cpu"]``. The command that a failure
    prints for accepting new figures repeats them.

    With ``--gpumem-against``, the command must run on the default device instead of the emulated GPU, because baselines for
    a real GPU have to be measured on that GPU.
    """
    from pytest_gpumem.judging.baselines.bucket import without_credentials

    options: list[str] = []
    for option in OPTIONS:
        value = cast("str | None", config.getoption(option.dest)) if option.in_accept else None
        if option.name == "device" and config.getoption("gpumem_against") is not None:
            value = DEFAULT_DEVICE
        if value is not None:
            options.append(f"{option.flag}={without_credentials(value)}")
    return options
