"""A file of the store that speaks of another device, or of a path: refused wherever it is read, and nothing is written."""

from __future__ import annotations

import pytest

from tests.git_store import Repository, entry

TEST = "@pytest.mark.gpumem\ndef test_step():\n    torch.ones({count})\n"


@pytest.fixture(params=["cpu-other", "../../outside"])
def moved(request, project):
    """A project whose baselines have become those of another device by hand."""
    project.write(TEST.format(count=2_000_000))
    project.run("--gpumem-update=new")
    (path,) = project.store.rglob("*.toml")
    slug = path.parent.name
    path.write_text(path.read_text().replace(f'slug = "{slug}"', f'slug = "{request.param}"'), encoding="utf-8")
    project.write(TEST.format(count=1_000_000))
    return project


def test_a_session_refuses_it_with_file_and_key(moved):
    before = {path: path.read_bytes() for path in moved.path.rglob("*.toml")}
    (file,) = before
    result = moved.run("--gpumem-update=all")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f"ERROR: {file}: environments.torch-*.slug is '*', but the file is in the folder '*'; *"]
    )
    assert {path: path.read_bytes() for path in moved.path.rglob("*.toml")} == before
    assert not (moved.path.parent / "outside").exists()


@pytest.mark.parametrize(
    "command",
    [["show"], ["history", "test_step"], ["compare", "HEAD"], ["prune", "-p", "no:randomly"]],
    ids=lambda command: command[0],
)
def test_commands_refuse_it_with_file_and_key(project, tmp_path, command):
    repository = Repository(tmp_path / "project")
    (repository.path / "test_it.py").write_text("def test_step(): ...\n", encoding="utf-8")
    repository.store({"test_step": entry()}, "test_it.py", "h200")
    repository.git("add", "--all")
    repository.git("commit", "--quiet", "--message", "some")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.toml")}
    # In a process of its own: collecting leaves modules behind.
    result = project.gpumem(*command, folder=repository.path)
    assert result.returncode in (1, 2)
    assert ".slug is 'h100', but the file is in the folder 'h200'" in result.stderr
    assert "h200/test_it.py.toml" in result.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.toml")} == before
