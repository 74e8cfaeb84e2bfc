"""Kinds of values for options and for keys in ``[tool.gpumem]``, with a check for each kind.

Every pytest run loads this module, so a check imports other modules only when it has a value to check.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_gpumem.config.errors import SettingsError
from pytest_gpumem.reports.formats import ENDINGS, format_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.models.name import ModelName


class Kind(NamedTuple):
    """A kind of value.

    For example, ``DURATION`` is a string in TOML, and ``DURATION.read("500 ms", "pyproject.toml: time_budget")`` is 0.5.
    """

    types: type | tuple[type, ...]
    """The value's types in TOML."""
    expected: str
    """The words for the kind in messages: ``"a string"``."""
    convert: Callable[[Any, str], Any] = lambda value, _: value
    """Checks a value and returns the setting. The second argument is its place, for messages. Raises
    `SettingsError`."""
    choices: tuple[str, ...] | None = None
    is_array: bool = False
    """True for an array of nonempty strings. Such an option may be repeated."""
    is_path: bool = False
    """True for a path. A relative path in pyproject.toml starts in the root directory, and a typed path in the current folder.

    `Settings` stores this folder in a second field, for example ``store_base`` for ``store``.
    """
    check_in_file: Callable[[Any, str], None] = lambda _value, _where: None
    """Raises `SettingsError` for a value that must be typed and not be in a file, because a pull request can change a file."""

    def read(self, value: Any, where: str) -> Any:
        """Return the setting for a value in ``[tool.gpumem]``.

        Args:
            value: The value from TOML.
            where: The value's place, for messages: ``"pyproject.toml: [tool.gpumem]: units"``.

        Raises:
            SettingsError: The value has another type, is not among the choices, or ``convert`` refuses it.
        """
        # In Python, True and False are numbers.
        fits = isinstance(value, self.types) and (not isinstance(value, bool) or self.types is bool)
        if not fits or (self.is_array and not all(isinstance(text, str) and text for text in value)):
            raise SettingsError(f"{where} is {value!r}, expected {self.expected}")
        if self.choices is not None and value not in self.choices:
            from pytest_gpumem.units import nearest

            raise SettingsError(f"{where} is {value!r}; {nearest(value, list(self.choices))}")
        self.check_in_file(value, where)
        return self.convert(value, where)


def one_of(choices: tuple[str, ...]) -> Kind:
    """Return the kind for a string among ``choices``."""
    return Kind(str, "a string", choices=choices)


def _line(text: str, where: str) -> str:
    # A command-line argument can contain bytes that are not UTF-8, but a file of the store cannot.
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


def _no_host(location: str, where: str) -> None:
    from pytest_gpumem.baselines.location import names_a_host
    from pytest_gpumem.baselines.url_backend import without_credentials

    if names_a_host(location):
        url = without_credentials(location)
        raise SettingsError(
            f"{where} is {url!r}: a file of the project may name a folder or a bucket (s3://, gs://, az://). Another place has "
            f"to be typed, because a pull request can change the file: --gpumem-store={url}"
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
        problem = form.lacking()
        if problem is not None:
            raise SettingsError(f"{where}: {problem}")
    return tuple(files)


def _duration(text: str, where: str) -> float:
    from pytest_gpumem.units import parse_seconds

    try:
        return parse_seconds(text)
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


def _seconds(value: float | str, where: str) -> float:
    from pytest_gpumem.units import parse_seconds

    try:
        text = value if isinstance(value, str) else f"{value:f}"
        return parse_seconds(f"{text} s" if text.replace(".", "", 1).isdigit() else text)
    except (ValueError, OverflowError):
        raise SettingsError(f"{where} is {value!r}, expected a duration above zero: '300 s' or '10 min'") from None


def model_of(text: str, where: str) -> ModelName:
    """Return the model with a name such as ``hf:ORG/NAME``. Raises `SettingsError`."""
    from pytest_gpumem.models.errors import ModelError
    from pytest_gpumem.models.sources import SOURCES, model_name

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


FLAG = Kind(bool, "true or false")
TEXT = Kind(str, "a string")
LINE = Kind(str, "a string", _line)
FOLDER = Kind(str, "a string", _not_empty("a folder"), is_path=True)
STORE = Kind(str, "a string", _not_empty("a folder or a URL"), is_path=True, check_in_file=_no_host)
REPORTS = Kind(list, "an array of file names", _reports, is_array=True, is_path=True)
PATTERNS = Kind(list, "an array of patterns of tests", lambda patterns, _: tuple(patterns), is_array=True)
MODELS = Kind(
    list,
    "an array of models",
    lambda names, where: tuple(model_of(name, where) for name in names),
    is_array=True,
    is_path=True,
)
DURATION = Kind(str, "a string", _duration)
SECONDS = Kind((int, float, str), "a number of seconds or a string", _seconds)
"""A duration, or a number of seconds."""
TABLE = Kind(dict, "a table")
TABLES = Kind(list, "an array of tables")
