"""``gpumem prune``: baselines of tests that are gone, and only those."""

from __future__ import annotations

import pytest

ONE = "@pytest.mark.gpumem\ndef test_{name}():\n    torch.ones(10)\n\n\n"


def prune(project, *args):
    return project.gpumem("prune", *args)


def write(project, source, name):
    """A file that is not run any more, only collected: without torch, which takes seconds to load."""
    (project.path / name).write_text(f"import pytest\n\n\n{source}", encoding="utf-8")


@pytest.fixture
def shrunk(project):
    """A project that lost a test in one file, and a whole other file."""
    project.write(ONE.format(name="kept") + ONE.format(name="gone"), "test_one.py")
    project.write(ONE.format(name="moved"), "test_two.py")
    project.run("--gpumem-update=new")
    write(project, ONE.format(name="kept"), "test_one.py")
    (project.path / "test_two.py").unlink()
    return project


def test_a_dry_run_lists_and_leaves_everything(shrunk):
    before = shrunk.stored()
    result = prune(shrunk, "--dry-run")
    assert result.returncode == 0
    assert "test_one.py::test_gone (call)" in result.stdout
    assert "test_two.py::test_moved (call)" in result.stdout
    assert "2 of 3 baselines are unused" in result.stdout
    # Where tests of a file are left out, none of that file is known to be gone.
    result = prune(shrunk, "--dry-run", "-k", "not kept")
    assert "1 of 3 baselines is unused" in result.stdout
    assert "test_one.py" not in result.stdout
    assert shrunk.stored() == before


def test_pruning_removes_entries_and_files_of_tests_that_are_gone(shrunk):
    assert prune(shrunk).returncode == 0
    ((path, text),) = shrunk.stored().items()
    assert path.endswith("/test_one.py.toml")
    assert "test_kept" in text
    assert "test_gone" not in text
    assert "0 of 1 baseline were unused" in prune(shrunk).stdout


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["removing", "dry-run"])
def test_a_store_none_of_whose_files_is_there_is_taken_for_another_projects(shrunk, options):
    before = shrunk.stored()
    folder = shrunk.path / "sub"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n", encoding="utf-8")
    write(shrunk, ONE.format(name="other"), "sub/test_other.py")
    result = shrunk.gpumem("prune", *options, f"--gpumem-store={shrunk.store}", folder=folder)
    assert result.returncode == 1
    assert f"none of its 2 test files is below {folder}; nothing was removed" in result.stderr
    assert "would remove" not in result.stdout
    assert shrunk.stored() == before


def test_a_collection_error_removes_nothing(shrunk):
    before = shrunk.stored()
    write(shrunk, "raise RuntimeError\n", "test_three.py")
    result = prune(shrunk)
    assert result.returncode == 1
    assert "nothing was removed" in result.stderr
    assert shrunk.stored() == before


def test_a_broken_file_is_named_and_nothing_is_removed(shrunk):
    (path,) = shrunk.store.rglob("test_one.py.toml")
    path.write_text("format = 99\n")
    before = shrunk.stored()
    result = prune(shrunk)
    assert result.returncode == 1
    assert str(path) in result.stderr
    assert shrunk.stored() == before


def test_a_project_whose_warnings_are_errors_can_be_pruned(shrunk):
    shrunk.settings('[tool.pytest.ini_options]\nfilterwarnings = ["error"]\n')
    assert "2 of 3 baselines were unused" in prune(shrunk).stdout


def elsewhere(project, file, slug="nvidia-h100"):
    """Baselines of a test file as another device has them, for tests that are only collected where it is."""
    (path,) = project.store.rglob(f"{file}.toml")
    text = path.read_text(encoding="utf-8").replace(f'slug = "{path.parent.name}"', f'slug = "{slug}"')
    moved = project.store / slug / path.name
    moved.parent.mkdir(exist_ok=True)
    moved.write_text(text.replace("test_gone", '"test_gone[cuda:0]"'), encoding="utf-8")


@pytest.mark.parametrize("options", [[], ["--dry-run"]], ids=["removing", "dry-run"])
def test_tests_that_may_be_collected_where_another_device_is_keep_their_baselines(shrunk, options):
    elsewhere(shrunk, "test_one.py")
    elsewhere(shrunk, "test_two.py")
    before = shrunk.stored()
    result = prune(shrunk, *options)
    assert result.returncode == 0
    word = "would remove" if options else "removed"
    (cpu,) = {path.partition("/")[0] for path in before} - {"nvidia-h100"}
    assert [line for line in result.stdout.splitlines() if line.startswith(word)] == [
        f"{word} {cpu}: test_one.py::test_gone (call)",
        f"{word} {cpu}: test_two.py::test_moved (call)",
        f"{word} nvidia-h100: test_two.py::test_moved (call)",
    ]
    assert (
        "1 baseline has no test here and was kept: this machine does not have the device (nvidia-h100)" in result.stdout
    )
    if not options:
        assert "test_gone[cuda:0]" in shrunk.stored()["nvidia-h100/test_one.py.toml"]
        assert "nvidia-h100/test_two.py.toml" not in shrunk.stored()


def test_a_gate_among_the_arguments_does_not_keep_tests_from_being_collected(shrunk):
    assert "2 of 3 baselines are unused" in prune(shrunk, "--dry-run", "--gpumem-baseline").stdout
