"""Wrong arguments of `Gpumem.launch` are answered with a sentence that names the argument and the mend."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from pytest_gpumem.plugin.runtest.launch_arguments import (
    check_ranks,
    check_timeout,
    checked_command,
    checked_environment,
    checked_folder,
)

LIST = "a list with a program and its arguments"
EXAMPLE = "write for example ['python', 'train.py']"


class PathOfBytes:
    def __fspath__(self):
        return b"train.py"


def message_of(check, value, error):
    with pytest.raises(error) as raised:
        check(value)
    assert type(raised.value) is error
    return str(raised.value).removeprefix("gpumem.launch() needs ")


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "python -c 'x --password abc",
            f"a list of words, got a text with no closing quotation; {EXAMPLE}",
        ),
        (
            "python \\",
            f"a list of words, got a text with no escaped character; {EXAMPLE}",
        ),
        (" ", f"a list of words, got a text without words; {EXAMPLE}"),
        ("python x.py", "a list of words, got a text; write ['python', 'x.py']"),
        (b"ls", f"{LIST}, got only bytes; {EXAMPLE}"),
        (Path("x.py"), f"{LIST}, got only {type(Path()).__name__}; {EXAMPLE}"),
        ({"ls"}, f"{LIST}, got set"),
        ((), f"{LIST}, got an empty one"),
        (["ls", None], f"{LIST} as texts, got NoneType at index 1"),
        (["ls", 3], f"{LIST} as texts, got int at index 1; write str(...)"),
        ([b"ls"], f"{LIST} as texts, got bytes at index 0; write os.fsdecode(...)"),
        ([PathOfBytes()], f"{LIST} as texts, got bytes at index 0; write os.fsdecode(...)"),
    ],
)
def test_another_command_than_a_list_of_texts_is_refused(command, message):
    assert message_of(checked_command, command, TypeError) == message


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([""], f"{LIST}, got an empty text as the program"),
        (["ls", "a\0b"], f"{LIST} as texts, got a text with a NUL character at index 1"),
        (["\ud800"], f"{LIST} as texts, got a text with half a surrogate pair at index 0"),
    ],
)
def test_a_text_that_no_program_can_get_is_refused(command, message):
    assert message_of(checked_command, command, ValueError) == message


def test_texts_and_paths_are_a_command():
    name_from_the_system = os.fsdecode(b"\xff.py")
    command = [sys.executable, Path("train.py"), "", name_from_the_system]
    assert checked_command(command) == [sys.executable, "train.py", "", name_from_the_system]
    assert checked_command(tuple(command)) == checked_command(command)


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (["A=1"], TypeError, "a dictionary as env, got list; write for example {'SIZE': '8'}"),
        (0, TypeError, "a dictionary as env, got int; write for example {'SIZE': '8'}"),
        ({1: "x"}, TypeError, "texts in env, got int as a name: 1"),
        ({"A": None}, TypeError, "texts in env, got None for 'A'; remove a variable by monkeypatch.delenv('A')"),
        ({"A": 1}, TypeError, "texts in env, got int for 'A'; write str(...)"),
        ({"A": b"x"}, TypeError, "texts in env, got bytes for 'A'; write os.fsdecode(...)"),
        ({"": "x"}, ValueError, "texts in env with names without '=', got the name ''"),
        ({"A=B": "x"}, ValueError, "texts in env with names without '=', got the name 'A=B'"),
        ({"A": "x\0"}, ValueError, "texts in env, got a text with a NUL character for 'A'"),
        ({"A\0": "x"}, ValueError, "texts in env, got a text with a NUL character as a name"),
    ],
)
def test_wrong_environment_variables_are_refused(env, error, message):
    assert message_of(checked_environment, env, error) == message


def test_environment_variables_are_texts_and_paths():
    assert checked_environment(None) == {}
    assert checked_environment({"A": "1", "B": Path("b")}) == {"A": "1", "B": "b"}


def test_a_folder_is_a_text_or_a_path(tmp_path):
    assert checked_folder(tmp_path) == checked_folder(str(tmp_path)) == tmp_path
    assert checked_folder(None) == Path.cwd()
    assert message_of(checked_folder, b"x", TypeError) == "a text or path, got bytes as cwd; write os.fsdecode(...)"
    assert message_of(checked_folder, "a\0", ValueError) == "a text or path, got a text with a NUL character as cwd"


@pytest.mark.parametrize("number", [0, -1, True, "10"])
def test_a_timeout_and_ranks_are_positive_numbers(number):
    assert message_of(check_timeout, number, TypeError) == f"a number of seconds above 0 as timeout, got {number!r}"
    assert message_of(check_ranks, number, TypeError) == f"a whole number of 1 or more as ranks, got {number!r}"
    for check in (check_timeout, check_ranks):
        check(None)
        check(2)
    check_timeout(0.5)
