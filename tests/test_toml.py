"""TOML of strangers: what would keep the parser busy for minutes is refused before it is parsed."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pytest_gpumem.base import toml
from pytest_gpumem.base.errors import FormatError, ProposalError, SettingsError
from pytest_gpumem.base.toml import read_toml
from pytest_gpumem.judging.baselines.format import parse
from pytest_gpumem.plugin.config.settings import check_readable
from pytest_gpumem.tools.console.files import read_text
from pytest_gpumem.tools.init.proposal import Project
from tests.git_store import Repository, entry
from tests.hostile import ALL

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LONG = "a." * 50_000
KEYS = {
    "key": f"{LONG}a = 1\n",
    "spaces": f"{LONG.replace('.', ' . ')}a = 1\n",
    "quoted": '"a".' * 50_000 + "a = 1\n",
    "literal": "'a.b'." * 50_000 + "a = 1\n",
    "header": f"[{LONG}a]\n",
    "array": f"[[{LONG}a]]\n",
    "inline": f"x = {{{LONG}a = 1}}\n",
    "in an array": f"x = [{{{LONG}a = 1}}]\n",
    "after a comment": f'# "\n{LONG}a = 1\n',
    "after a quote": f'x = {{y = "\\"", {LONG}a = 1, z = ""}}\n',
    "after a backslash": f'x = {{y = "\\\\", {LONG}a = 1, z = ""}}\n',
    "after a literal": f"x = {{y = '\\', {LONG}a = 1, z = ''}}\n",
    "after quotes": f'x = {{y = """a"""", {LONG}a = 1, z = ""}}\n',
    "after more quotes": f'x = {{y = """a""""", {LONG}a = 1, z = ""}}\n',
    "many": "".join(f"{'a.' * 128}k{number} = 1\n" for number in range(400)),
    "below a header": f"[{'a.' * 128}a]\n" + "".join(f"k{number} = 1\n" for number in range(20_000)),
    "after nothing": f'x = {{y = """""", {LONG}a = 1, z = ""}}\n',
    "after literal quotes": f"x = {{y = '''a'''', {LONG}a = 1, z = ''}}\n",
}


@pytest.fixture
def unparsed(monkeypatch):
    """Let no test wait for the parser."""
    monkeypatch.setattr(toml.tomllib, "loads", lambda text: pytest.fail("the text was parsed"))


@pytest.mark.parametrize("text", KEYS.values(), ids=KEYS)
def test_a_key_of_very_many_parts_is_refused_unparsed(unparsed, text):
    with pytest.raises(ValueError, match=r"^a key has too many parts \(\d{3,5}\): \S.*\.\.\.$"):
        read_toml(text)


@pytest.mark.parametrize("text", ["x = " + "[" * 100_000, "x = " + "{a = " * 100_000])
def test_nesting_that_the_parser_gives_up_at_is_an_error(text):
    with pytest.raises(ValueError, match="nested too deeply"):
        read_toml(text)


STRINGS = st.text(st.sampled_from("a.\"'\\#\n,= \u00e9"), max_size=60)


@given(st.dictionaries(st.text("ab._-", min_size=1, max_size=30), STRINGS, max_size=4))
@example({"a." * 100: "b." * 100, "c": ALL})
@example({"x": "a" * 3 + ".a" * 1000})
def test_dots_in_strings_and_quoted_keys_are_no_parts(table):
    import tomli_w

    text = tomli_w.dumps({"tests": table})
    assert read_toml(text) == tomllib.loads(text)


def test_dots_in_comments_numbers_and_long_strings_are_no_parts():
    dots = "a." * 100
    numbers = ", ".join(["1.5"] * 100)
    strings = f'y = """\n{dots}\n\\""" {dots}"""\n' + f"z = '''\n{dots}'''\n"
    text = f"# {dots}\nx = [{numbers}]  # {dots}\n{strings}"
    assert read_toml(text) == tomllib.loads(text)


def test_a_key_of_another_tool_may_be_long(project):
    dots, header = "a." * 100, "a." * 30
    text = f"[tool.other]\n{dots}a = 1\n\n[tool.third.{header}a]\nx = 1\n\n[tool.gpumem]\nstore = 'baselines'\n"
    assert read_toml(text) == tomllib.loads(text)
    repository = Repository(project.path)
    repository.store({"test_step": entry()})
    (project.path / "gpumem-baselines").rename(project.path / "baselines")
    project.settings(text)
    shown = project.gpumem("show")
    assert shown.returncode == 0, shown.stderr
    assert "test_step" in shown.stdout


# Where strangers write it


def test_a_file_of_the_store_with_such_a_key_is_refused(unparsed):
    with pytest.raises(
        FormatError, match=r"^not TOML: a key has too many parts \(50001\): .*; restore the file from version control"
    ):
        parse(f"format = 1\n{KEYS['key']}", "test_it.py")


def test_a_file_of_the_store_that_is_too_large_is_refused(tmp_path, unparsed, monkeypatch):
    monkeypatch.setattr("pytest_gpumem.judging.baselines.format.LARGEST", 100)
    with pytest.raises(FormatError, match=r"^has more than 100 characters; restore it from version control"):
        parse("#" * 101, "test_it.py")


def test_showing_a_store_with_a_huge_file_or_key_is_an_error_with_its_path(project, tmp_path):
    repository = Repository(tmp_path / "project")
    repository.store({"test_step": entry()})
    (file,) = repository.path.rglob("*.py.toml")
    for text, why in ((KEYS["key"], "a key has too many parts"), (None, "more than 33554432 bytes")):
        if text is None:
            with file.open("wb") as sparse:
                sparse.truncate(2**25 + 1)
        else:
            file.write_text(text, encoding="utf-8")
        result = project.gpumem("show", folder=repository.path)
        assert result.returncode == 2
        assert f"{file}: " in result.stderr
        assert why in result.stderr


def test_settings_with_such_a_key_are_refused(tmp_path, unparsed):
    (tmp_path / "pyproject.toml").write_text(f"[tool.gpumem]\n{KEYS['key']}", encoding="utf-8")
    with pytest.raises(SettingsError, match=r"pyproject\.toml: not TOML: a key has too many parts"):
        check_readable(tmp_path / "pyproject.toml")
    with pytest.raises(ProposalError, match=r"pyproject\.toml cannot be parsed: a key has too many parts"):
        _ = Project(settings=KEYS["header"]).parsed_settings


def test_a_report_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("pytest_gpumem.tools.console.files.LARGEST_REPORT", 100)
    (tmp_path / "report.json").write_text("1" * 100, encoding="utf-8")
    assert len(read_text(tmp_path / "report.json")) == 100
    (tmp_path / "report.json").write_text("1" * 101, encoding="utf-8")
    with pytest.raises(OSError, match="the report has more than 100 characters, the limit"):
        read_text(tmp_path / "report.json")
