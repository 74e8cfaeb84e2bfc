"""A pyproject.toml that nothing can be read from, or whose settings are wrong: one sentence, and nothing is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.base.errors import SettingsError
from pytest_gpumem.plugin.config.settings import read_table
from pytest_gpumem.tools.main import main

TEST = "import torch\n\n\ndef test_it():\n    torch.nn.Linear(8, 8)(torch.ones(3, 8))\n"
UNREADABLE = {
    b"\xff\xfe": "is not UTF-8 (byte 0)",
    b"tool = 3\n": "tool is 3, expected a table",
    b'[tool]\ngpumem = "x"\n': "[tool.gpumem] is 'x', expected a table",
}
COMMANDS = (
    ["doctor"],
    ["show"],
    ["prune"],
    ["why", "test_it"],
    ["compare", "main", "HEAD"],
    ["init", "--dry-run"],
    ["init", "--yes"],
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "test_it.py").write_text(TEST, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly -p no:cacheprovider")
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_names_a_pyproject_that_cannot_be_read_in_one_sentence(folder, command):
    for content, said in UNREADABLE.items():
        if command[0] in ("why", "prune") and b"tool]" in content:
            continue  # one reads no settings, and the other shows what pytest says
        (folder / "pyproject.toml").write_bytes(content)
        done = CliRunner().invoke(main, command)
        assert done.exit_code == 2, done.output
        (line,) = [one for one in done.output.splitlines() if one.startswith("Error: ")]
        assert "pyproject.toml" in line
        assert said in line
        assert "Traceback" not in done.output
        assert {path.name for path in folder.iterdir() if path.name != "__pycache__"} == {
            "pyproject.toml",
            "test_it.py",
        }


@pytest.mark.parametrize("command", ["show", "init"])
def test_a_command_names_a_pyproject_that_may_not_be_read(folder, command, monkeypatch):
    (folder / "pyproject.toml").write_text("[tool.gpumem]\n")
    opened = Path.open

    def refuse(path, *arguments, **more):
        if path.name == "pyproject.toml":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **more)

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", lambda path, **more: refuse(path))
    done = CliRunner().invoke(main, [command])
    assert done.exit_code == 2
    assert done.output.endswith("pyproject.toml cannot be read: Permission denied\n")


def test_a_session_names_a_table_that_is_not_utf_8(tmp_path):
    (tmp_path / "pyproject.toml").write_bytes(b"# gpumem \xff")
    with pytest.raises(SettingsError, match=r"^pyproject\.toml is not UTF-8 \(byte 9\)"):
        read_table(tmp_path / "pyproject.toml")


@pytest.mark.parametrize("way", ["--yes", "--dry-run"])
@pytest.mark.parametrize(("key", "said"), [('marks = ["*"]', "did you mean 'mark'?"), ("foo = 1", "unknown key 'foo'")])
def test_a_wrong_section_is_told_before_anything_is_written_beside_it(folder, way, key, said):
    (folder / "pyproject.toml").write_text(f"[tool.gpumem]\n{key}\n", encoding="utf-8")
    done = CliRunner().invoke(main, ["init", way])
    assert done.exit_code == 2
    assert said in done.output
    assert {path.name for path in folder.iterdir()} == {"pyproject.toml", "test_it.py"}
