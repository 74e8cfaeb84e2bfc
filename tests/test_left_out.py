"""A run without a typed selection gates each test that has a baseline here, or names it with the setting that leaves it out."""

from __future__ import annotations

import pytest

MARKED = "@pytest.mark.gpumem\ndef test_{}():\n    torch.ones(10)\n\n\n"
FILE = "tests/sub/test_other.py"
LEFT = f"gpumem: {FILE} was not collected (*{{}}*), and 1 test in it has baselines on cpu-*: let pytest collect the file, or *"
DESELECTED = f"gpumem: 1 test that has baselines here was deselected, by {{}}: {FILE}::test_other"


@pytest.fixture
def two_files(project):
    """A project with baselines of two files, one of them in a folder of its own."""
    project.write(MARKED.format("it"), "tests/test_it.py")
    project.write(MARKED.format("other"), FILE)
    project.run("--gpumem-update=new").assert_outcomes(passed=2)
    return project


TRAINING = """\
def train():
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    while True:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()


"""


def ini(project, *lines):
    project.settings("\n".join(["[tool.pytest.ini_options]", *lines, ""]))


def conftest(project, source):
    (project.path / "conftest.py").write_text(source, encoding="utf-8")


DESELECTING = (
    "def pytest_collection_modifyitems(config, items):\n"
    "    config.hook.pytest_deselected(items=[one for one in items if one.name == 'test_other'])\n"
    "    items[:] = [one for one in items if one.name != 'test_other']\n"
)

WAYS = {
    "testpaths": (lambda project: ini(project, 'testpaths = ["tests/test_it.py"]'), LEFT.format("testpaths")),
    "patterns": (lambda project: ini(project, 'testpaths = ["tests/*_it.py"]'), LEFT.format("testpaths")),
    "norecursedirs": (lambda project: ini(project, 'norecursedirs = ["sub"]'), LEFT.format("norecursedirs")),
    "python_files": (lambda project: ini(project, 'python_files = ["test_i*.py"]'), LEFT.format("python_files")),
    "ignore": (lambda project: ini(project, 'addopts = "--ignore=tests/sub"'), LEFT.format("--ignore of addopts")),
    "paths": (lambda project: ini(project, 'addopts = "tests/test_it.py"'), LEFT.format("paths of addopts")),
    "collect_ignore": (
        lambda project: conftest(project, "collect_ignore = ['tests/sub']\n"),
        LEFT.format("collect_ignore"),
    ),
    "-k": (lambda project: ini(project, 'addopts = "-k test_it"'), DESELECTED.format("-k of addopts")),
    "a hook": (lambda project: conftest(project, DESELECTING), DESELECTED.format("a conftest.py or a plugin")),
}


@pytest.mark.parametrize("options", [[], pytest.param(["-n2"], marks=pytest.mark.thorough)], ids=["alone", "workers"])
@pytest.mark.parametrize(("leave_out", "said"), WAYS.values(), ids=WAYS)
def test_what_settings_leave_out_is_named_and_fails_in_strict_mode(two_files, leave_out, said, options):
    leave_out(two_files)
    separate = bool(options)
    result = two_files.run("--gpumem-baseline", *options, separate=separate)
    assert result.ret == 0
    result.stdout.fnmatch_lines([said, "gpumem: 1 gated"])
    strict = two_files.run("--gpumem-baseline", "--gpumem-strict", *options, separate=separate)
    assert strict.ret == pytest.ExitCode.TESTS_FAILED
    strict.stdout.fnmatch_lines([said, "gpumem: 1 gated"])


def test_a_test_of_any_name_in_a_file_that_is_left_out_is_named(project):
    naming = 'python_functions = ["check_*", "other_*"]'
    ini(project, naming)
    project.write(MARKED.format("it").replace("test_", "check_"), "tests/test_it.py")
    loop = "def check_loop(gpumem):\n    with gpumem.loop(4):\n        train()\n\n\n"
    project.write(TRAINING + loop + MARKED.format("other").replace("test_", "other_"), FILE)
    project.run("--gpumem-update=new").assert_outcomes(passed=3)
    ini(project, naming, 'python_files = ["test_i*.py"]')
    result = project.run("--gpumem-baseline")
    result.stdout.fnmatch_lines([LEFT.format("python_files").replace("1 test in it has", "2 tests in it have")])
    assert project.run("--gpumem-baseline", "--gpumem-strict").ret == pytest.ExitCode.TESTS_FAILED


IN_CLASS = "class {name}:\n    @pytest.mark.gpumem\n    def test_in_class(self):\n        torch.ones(10)\n\n\n"
BY_NAME = "gpumem: 1 test that has baselines here was not collected (left out by {}): tests/test_it.py::{}"


@pytest.mark.parametrize(
    ("setting", "test"),
    [("python_functions", "test_other"), ("python_classes", "TestOther::test_in_class")],
    ids=["functions", "classes"],
)
@pytest.mark.parametrize("quiet", [[], ["-q"]], ids=["usual", "quiet"])
def test_a_test_that_a_setting_of_names_leaves_out_is_named_and_not_gone(project, setting, test, quiet):
    kept = MARKED.format("kept") + IN_CLASS.format(name="TestKept")
    deleted = MARKED.format("deleted") + IN_CLASS.format(name="TestDeleted")
    other = MARKED.format("other") + IN_CLASS.format(name="TestOther")
    project.write(kept + deleted + other, "tests/test_it.py")
    project.run("--gpumem-update=new").assert_outcomes(passed=6)
    project.write(kept + other, "tests/test_it.py")
    patterns = '["test_k*", "test_i*"]' if setting == "python_functions" else '["TestKept"]'
    ini(project, f"{setting} = {patterns}")
    said = BY_NAME.format(setting, test)
    result = project.run("--gpumem-baseline", *quiet)
    assert result.ret == 0
    assert result.outlines.count(said) == 1
    result.stdout.no_fnmatch_line(f"*unused baseline*{test}*")
    if not quiet:
        result.stdout.fnmatch_lines(["gpumem store: 2 unused baselines: *test_deleted (call)*"])
    strict = project.run("--gpumem-baseline", "--gpumem-strict", *quiet)
    assert strict.ret == pytest.ExitCode.TESTS_FAILED
    strict.stdout.fnmatch_lines([said])


def test_prune_keeps_baselines_of_tests_that_settings_of_names_leave_out(two_files):
    ini(two_files, 'python_functions = ["test_it"]')
    result = two_files.gpumem("prune")
    assert "0 of 2 baselines were unused" in result.stdout
    two_files.write("", FILE)
    assert "1 of 2 baselines was unused" in two_files.gpumem("prune").stdout


@pytest.mark.parametrize("options", [[], pytest.param(["-n2"], marks=pytest.mark.thorough)], ids=["alone", "workers"])
def test_a_file_that_skips_itself_counts_its_tests_as_skipped(two_files, options):
    two_files.write("pytest.importorskip('nothing_of_that_name')\n\n\n" + MARKED.format("other"), FILE)
    result = two_files.run("--gpumem-baseline", *options, separate=bool(options))
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gpumem: 1 gated, 1 unmeasured (it was skipped)"])
    strict = two_files.run("--gpumem-baseline", "--gpumem-strict", *options, separate=bool(options))
    assert strict.ret == pytest.ExitCode.TESTS_FAILED
    said = f"{FILE} skipped itself, and 1 test in it has baselines here: let it run, or delete its file from the store"
    strict.stdout.fnmatch_lines([f"gpumem: {said}", "gpumem: 1 gated, 1 unmeasured (it was skipped)"])
    result.stdout.no_fnmatch_line("*was not collected*")


def test_a_gate_whose_files_all_skip_themselves_is_red(two_files):
    for name in ("tests/test_it.py", FILE):
        two_files.write("pytest.skip('not here', allow_module_level=True)\n", name)
    result = two_files.run("--gpumem-baseline")
    assert result.ret != 0
    result.stdout.fnmatch_lines(["gpumem: nothing was gated: 2 tests unmeasured, it was skipped"])


@pytest.mark.parametrize(
    "typed",
    [
        ["tests/test_it.py"],
        ["tests/test_it.py::test_it"],
        ["-k", "test_it"],
        ["--deselect", f"{FILE}::test_other"],
        ["--ignore=tests/sub"],
        ["-o", "norecursedirs=sub"],
        ["-m", "gpumem", "-k", "test_it"],
    ],
    ids=" ".join,
)
def test_what_is_typed_leaves_out_tests_without_a_word(two_files, typed):
    result = two_files.run("--gpumem-baseline", "--gpumem-strict", *typed)
    assert result.ret == 0
    assert "collected (" not in result.stdout.str()
    assert "that has baselines here" not in result.stdout.str()


def test_an_option_of_the_projects_own_may_select_tests(two_files):
    adds = "def pytest_addoption(parser):\n    parser.addoption('--part')\n\n\n"
    conftest(two_files, adds + DESELECTING)
    said = DESELECTED.format("a conftest.py or a plugin")
    two_files.run("--gpumem-baseline").stdout.fnmatch_lines([said])
    two_files.run("--gpumem-baseline", "--part=1").stdout.no_fnmatch_line(said)


def test_a_run_in_a_folder_is_about_that_folder(two_files, monkeypatch):
    monkeypatch.chdir(two_files.path / "tests" / "sub")
    (two_files.path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    result = two_files.run("--gpumem-baseline", "--gpumem-strict", f"--gpumem-store={two_files.store}")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*was not collected*")


def test_baselines_of_other_devices_of_scripts_and_of_typed_models_are_not_left_out(two_files):
    (text,) = (text for path, text in two_files.stored().items() if path.endswith("test_other.py.toml"))
    (path,) = two_files.store.rglob("test_other.py.toml")
    away = two_files.store / "nvidia-h100" / "tests" / "sub" / path.name
    away.parent.mkdir(parents=True)
    away.write_text(text.replace(path.parts[-4], "nvidia-h100"), encoding="utf-8")
    path.unlink()
    for file in ("train.py", "pyproject.toml"):
        two_files.write("", file) if file == "train.py" else ini(two_files, 'norecursedirs = ["sub"]')
        of_file = two_files.store / path.parts[-4] / f"{file}.toml"
        of_file.write_text(text.replace("tests.test_other.call", "tests.run.loop"), encoding="utf-8")
    result = two_files.run("--gpumem-baseline", "--gpumem-strict")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*was not collected*")


def test_a_test_that_is_gone_is_named_also_beside_what_settings_deselect(two_files):
    two_files.write(MARKED.format("new_name") + MARKED.format("it"), "tests/test_it.py")
    two_files.run("--gpumem-update=new")
    two_files.write(MARKED.format("it"), "tests/test_it.py")
    ini(two_files, 'addopts = "-k test_it"')
    result = two_files.run("--gpumem-baseline")
    result.stdout.fnmatch_lines(["gpumem store: 1 unused baseline: tests/test_it.py::test_new_name (call); *"])


def test_where_every_measured_test_is_gone_the_run_names_them(two_files):
    for name in ("tests/test_it.py", FILE):
        two_files.write("def test_plain(): ...\n", name)
    result = two_files.run("--gpumem-baseline")
    result.stdout.fnmatch_lines(["gpumem: store: 2 unused baselines: *", "gpumem: nothing to gate: *"])
