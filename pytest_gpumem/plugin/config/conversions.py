"""Check and convert the values of options and settings, by `Kind`. To keep pytest's start fast, a check imports other
modules only when there is a value to check.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import SettingsError
from pytest_gpumem.plugin.config.kinds import DURATION, FOLDER, LINE, MODELS, PATTERNS, REPORTS, SECONDS, STORE
from pytest_gpumem.reporting.reports.formats import ENDINGS, format_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pytest_gpumem.measuring.models.name import ModelName
    from pytest_gpumem.plugin.config.kinds import Kind


def read_value(kind: Kind, value: Any, where: str) -> Any:
    """Check a value in ``[tool.gpumem]``, and convert it to the value in `Settings`.

    Args:
        kind: The value's kind.
        value: The value from TOML.
        where: The file, table and key, for messages: ``"pyproject.toml: [tool.gpumem]: units"``.

    Raises:
        SettingsError: The value has a wrong type, is not among the choices, or cannot be converted.
    """
    # Reject True and False as numbers, although bool is a subclass of int.
    fits = isinstance(value, kind.types) and (not isinstance(value, bool) or kind.types is bool)
    if not fits or (kind.is_array and not all(isinstance(text, str) and text for text in value)):
        raise SettingsError(f"{where} is {value!r}, expected {kind.expected}")
    if kind.choices is not None and value not in kind.choices:
        from pytest_gpumem.base.units import nearest

        raise SettingsError(f"{where} is {value!r}; {nearest(value, list(kind.choices))}")
    check_in_file(kind, value, where)
    return convert(kind, value, where)


def convert(kind: Kind, value: Any, where: str) -> Any:
    """Convert a value with the right type to the value in `Settings`. Raises `SettingsError` with ``where`` in its message.

    For example, ``convert(DURATION, "500 ms", "pyproject.toml: time_budget")`` returns 0.5.
    """
    conversion = _CONVERSIONS.get(kind)
    return value if conversion is None else conversion(value, where)


def _line(text: str, where: str) -> str:
    # Escape bytes that are not UTF-8. A command-line argument may contain them, but a store file may not.
    line = " ".join(text.encode("utf-8", "backslashreplace").decode("utf-8").split())
    if not line:
        raise SettingsError(f"{where} is empty, expected the reason for accepting the change")
    return line


def _not_empty(expected: str) -> Callable[[str, str], str]:
    def check(text: str, where: str) -> str:
        if not text:
            raise SettingsError(f"{where} is empty, expected {expected}")
        return text

    return check


def check_in_file(kind: Kind, value: Any, where: str) -> None:
    """Raise `SettingsError` if a project's file names a store on another host.

    Such a store must be named on the command line, because a pull request can change a project's file.
    """
    if kind is not STORE:
        return
    from pytest_gpumem.judging.baselines.location import names_host

    if names_host(value):
        raise SettingsError(
            f"{where} is {value!r}: a project's file may only name a folder or a bucket (s3://, gs://, az://). A store on "
            f"another host has to be typed, because a pull request can change the file: --gpumem-store={value}"
        )


def _reports(files: list[str], where: str) -> tuple[str, ...]:
    for file in files:
        form = format_of(file)
        if file == "-":
            raise SettingsError(
                f"{where}: '-' is not a file, and pytest itself writes to standard output; name a file that ends with "
                f"{ENDINGS}, for example gpumem.json"
            )
        if form is None:
            hint = "; for JUnit XML, use pytest's --junitxml=FILE" if Path(file).suffix == ".xml" else ""
            raise SettingsError(f"{where}: {file!r} has to end with {ENDINGS}{hint}")
    return tuple(files)


def _duration(text: str, where: str) -> float:
    from pytest_gpumem.base.units import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


def _seconds(value: float | str, where: str) -> float:
    from pytest_gpumem.base.units import parse_seconds

    try:
        text = value if isinstance(value, str) else f"{value:f}"
        return parse_seconds(f"{text} s" if text.replace(".", "", 1).isdigit() else text)
    except (ValueError, OverflowError):
        raise SettingsError(f"{where} is {value!r}, expected a duration above zero: '300 s' or '10 min'") from None


def model_of(text: str, where: str) -> ModelName:
    """Parse a model's name such as ``hf:ORG/NAME``. Raises `SettingsError`."""
    from pytest_gpumem.base.errors import ModelError
    from pytest_gpumem.measuring.models.sources import SOURCES, model_name

    try:
        name = model_name(text)
    except ModelError as error:
        raise SettingsError(f"{where}: {error}") from None
    if name is None:
        other_forms = ", ".join(f"{source}:NAME" for source in SOURCES if not source.startswith("hf"))
        raise SettingsError(
            f"{where} is {text!r}, expected the name of a model: hf:ORG/NAME, hf-tiny:ORG/NAME for two of its layers, hf:PATH "
            f"for a folder with config.json, or {other_forms}"
        )
    return name


def _models(names: list[str], where: str) -> tuple[ModelName, ...]:
    return tuple(model_of(name, where) for name in names)


_CONVERSIONS: Mapping[Kind, Callable[[Any, str], Any]] = {
    LINE: _line,
    FOLDER: _not_empty("a folder"),
    STORE: _not_empty("a folder or a URL"),
    REPORTS: _reports,
    PATTERNS: lambda patterns, _: tuple(patterns),
    MODELS: _models,
    DURATION: _duration,
    SECONDS: _seconds,
}
"""The conversion for each kind of value. Values of all other kinds are used as they are."""
