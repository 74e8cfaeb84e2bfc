"""``gpumem init`` runs a project's tests once, and sees which of them run a model."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.base import processes
from pytest_gpumem.plugin.config.settings import matches_test
from pytest_gpumem.tools.console import streams
from pytest_gpumem.tools.init import command, observing
from pytest_gpumem.tools.init.observing import ObservedRun, observe, summary
from pytest_gpumem.tools.init.patterns import patterns_of
from pytest_gpumem.tools.init.project_tests import ProjectTest, ProjectTests, read_tests
from pytest_gpumem.tools.init.proposal import Machine
from pytest_gpumem.tools.main import main
from tests.support.processes import fork_runs

ROOT = Path(__file__).parents[1]
HEAD = "import pytest\nimport torch\nfrom torch import nn\n\n"
RUNS = "nn.Linear(64, 64)(torch.ones(8, 64))"
MODEL = f"{HEAD}\ndef test_model():\n    {RUNS}\n"


@pytest.fixture
def folder(project, monkeypatch):
    """Write files into a project, whose tests run in a fork of a process with torch."""
    monkeypatch.chdir(project.path)
    fork_runs(monkeypatch, observing)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:randomly")

    def write(**files):
        for name, text in files.items():
            path = project.path / f"{name.replace('__', '/')}.py"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return project

    return write


@pytest.fixture
def separately(folder, monkeypatch):
    """As `folder`, but the tests run as a user's tests do: in a process without torch, and with pytest-xdist."""
    monkeypatch.setattr(observing, "run", processes.run)
    return folder


def seen(*options: str, **limits: float) -> ObservedRun:
    return observe(Path.cwd(), dict(os.environ), options, **limits)


def names(tests) -> list[str]:
    return [test.nodeid.partition("::")[2] for test in tests]


def init(*options, **more):
    return CliRunner().invoke(main, ["init", *options], **more)


# Which tests run a model

FORMS = {
    "helpers": "import torch\n\n\ndef check(net):\n    net(torch.ones(8, 64))\n",
    "models": "from torch import nn\n\nMODELS = [nn.Linear(64, 64), nn.ReLU()]\n\n\nclass Net(nn.Linear):\n    def __init__(self):\n        super().__init__(64, 64)\n",
    "test_forms": HEAD
    + '''import unittest

from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import check
from models import MODELS, Net


@pytest.fixture
def net():
    return Net()


@pytest.fixture(scope="module")
def trained():
    net = Net()
    check(net)
    return net


@pytest.fixture
def dynamic(request):
    return request.getfixturevalue("trained")


def test_fixture(net):
    net(torch.ones(8, 64))


def test_shared_fixture(trained):
    assert trained.bias is not None


def test_shared_fixture_of_an_earlier_test(dynamic):
    assert dynamic.bias is not None


def test_helper(net):
    check(net)


@pytest.mark.parametrize("model", MODELS)
def test_parametrize(model):
    model(torch.ones(8, 64))


class TestClass:
    def setup_method(self):
        self.net = Net()

    def test_method(self):
        check(self.net)


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.output = Net()(torch.ones(8, 64))

    def test_case(self):
        assert self.output is not None

    def test_second_case(self):
        assert self.output is not None


@settings(deadline=None, max_examples=3)
@given(st.integers(1, 8))
def test_property(size):
    Net()(torch.ones(size, 64))


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.mark.anyio
async def test_coroutine():
    Net()(torch.ones(8, 64))


def test_backward():
    torch.ones(8, requires_grad=True).sum().backward()


def test_optimizer():
    parameter = nn.Parameter(torch.ones(8))
    parameter.grad = torch.ones(8)
    torch.optim.SGD([parameter]).step()


def test_compiled(net):
    torch.compile(net, backend="eager", fullgraph=True)(torch.ones(8, 64))


def test_scripted(net):
    torch.jit.script(net)(torch.ones(8, 64))


def test_profiler(net):
    with torch.profiler.profile():
        net(torch.ones(8, 64))


def documented():
    """
    >>> documented()(torch.ones(8, 64)).shape
    torch.Size([8, 64])
    """
    return Net()


def test_builds(net):
    assert net.bias is not None


def test_computes():
    assert torch.ones(8).sum() == 8


def test_fails(net):
    net(torch.ones(8, 63))


@pytest.mark.xfail
def test_is_expected_to_fail(net):
    net(torch.ones(8, 63))


@pytest.mark.skip
def test_skips():
    check(Net())


@pytest.mark.gpumem
def test_is_measured():
    raise SystemExit("a test that is measured already does not run")
''',
}
LEFT_OUT = ["test_builds", "test_computes", "test_fails", "test_is_expected_to_fail", "test_skips", "test_is_measured"]


def test_a_test_of_any_form_is_seen_if_it_runs_a_model(folder):
    folder(**FORMS)
    observed = seen("--doctest-modules", "-panyio.pytest_plugin", "-p_hypothesis_pytestplugin")
    assert observed.why_ended == ""
    tests = {test.nodeid.partition("::")[2]: test for test in observed.tests.tests}
    assert [name for name, test in tests.items() if not test.is_proposed] == LEFT_OUT
    assert {"test_forms.documented", "Case::test_second_case", "test_shared_fixture_of_an_earlier_test"} <= {*tests}
    assert [name for name, test in tests.items() if test.has_parameters] == ["test_parametrize"]
    assert [tests[name].outcome for name in LEFT_OUT] == [
        "passed",
        "passed",
        "failed",
        "failed",
        "skipped",
        "not run",
    ]
    assert tests["test_fixture"].nbytes == 4 * (64 * 64 + 64 + 2 * 8 * 64)
    text = "\n".join(summary(observed))
    assert text.startswith(f"test functions that run a model: {len(tests) - 4} of {len(tests)} (")
    assert "; measured already: 1\n" in text
    assert "they ran a model and failed, or were expected to fail (2):\n  test_forms.py::test_fails\n" in text
    assert "they were skipped, so nobody saw whether they run models (1):\n  test_forms.py::test_skips" in text


def test_a_model_without_memory_is_not_proposed(folder):
    folder(
        test_it=f"{HEAD}NET = nn.Identity()\nX = torch.ones(8)\n\n\ndef test_empty():\n    NET(X)\n",
    )
    observed = seen()
    assert names(observed.tests.tests) == ["test_empty"]
    assert observed.tests.proposed == []
    assert "they run models without allocating memory (1):\n  test_it.py::test_empty" in "\n".join(summary(observed))


def test_torch_is_seen_if_only_the_body_of_a_test_imports_it(separately):
    separately(test_it="def test_lazy():\n    import torch\n\n    torch.nn.ReLU()(torch.ones(64))\n")
    assert names(seen().tests.proposed) == ["test_lazy"]


def test_torch_is_not_imported_for_tests_without_torch(separately):
    project = separately(
        conftest="import sys\n\n\ndef pytest_unconfigure():\n    print('torch' in sys.modules, file=open('torch', 'w'))\n",
        test_it="def test_it():\n    pass\n",
    )
    done = init("--yes")
    assert done.exit_code == 1, done.output
    assert "\nnothing is proposed, because no test imports torch. Mark the tests to measure with" in done.output
    assert (project.path / "torch").read_text() == "False\n"


ASKS = "import torch\n\ntorch.cuda.is_available()\n"


@pytest.mark.parametrize(
    ("files", "on_gpu"),
    [
        ({"conftest": ASKS}, True),
        ({"tests__helpers": ASKS, "tests__conftest": "import helpers\n"}, True),
        ({"library": ASKS, "conftest": "import library\n"}, False),
        ({"tests__test_more": f"{ASKS}\n\ndef test_more():\n    torch.ones(8).cuda()\n"}, True),
        ({"tests__test_more": "import torch\n\n\ndef test_more():\n    torch.ones(8).to('cuda')\n"}, True),
        ({"other__test_more": ASKS}, False),
        ({"site-packages__library": ASKS, "tests__conftest": "import library\n"}, False),
    ],
)
def test_a_gpu_is_used_if_a_file_beside_the_tests_asks_for_it(folder, monkeypatch, files, on_gpu):
    project = folder(tests__test_it=MODEL, **files)
    paths = [str(project.path), str(project.path / "site-packages"), os.environ["PYTHONPATH"]]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    observed = seen()
    assert "test_model" in names(observed.tests.proposed)
    assert observed.tests.on_gpu == on_gpu


# A run that ends early


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("os._exit(3)", "pytest ended with exit status 3"),
        ("os._exit(0)", "a test ended pytest"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV ended pytest"),
    ],
)
def test_a_crash_keeps_the_tests_before_it(folder, code, why):
    ends = f"import os\nimport signal\n\n\ndef test_ends():\n    {code}\n\n\ndef test_after():\n    pass\n"
    folder(test_a=MODEL, test_b=ends)
    done = init("--yes", "--dry-run")
    assert done.exit_code == 0, done.output
    said = f"{why} during test_b.py::test_ends, so 2 tests have no result; the proposal is from the other tests"
    assert said in done.output.splitlines()
    assert '+    "test_a.py",' in done.output.splitlines()


def test_a_time_limit_keeps_the_tests_before_it(folder):
    waits = "import time\n\n\ndef test_waits():\n    time.sleep(600)\n"
    folder(test_a=MODEL, test_b=waits)
    observed = seen(seconds=6.0)
    assert names(observed.tests.proposed) == ["test_model"]
    assert observed.why_ended == (
        "the time limit of 6.00 s is over during test_b.py::test_waits, so 1 test has no result"
    )


INTERRUPTS = "import os\nimport signal\nimport time\n\n\ndef test_ends():\n    os.kill(os.getppid(), signal.SIGINT)\n    time.sleep(600)\n"


def test_ctrl_c_keeps_the_tests_before_it_and_asks_before_it_writes(separately, monkeypatch):
    project = separately(test_a=MODEL, test_b=f"{INTERRUPTS}\n\ndef test_after():\n    pass\n")
    monkeypatch.setattr(command, "_has_terminal", lambda: True)
    done = init("--yes", input="n\n")
    assert done.exit_code == 0, done.output
    assert "you interrupted the tests, so 2 tests have no result; the proposal is from the other tests" in done.output
    assert '+    "test_a.py",' in done.output.splitlines()
    assert done.output.endswith("[Y/n]: n\nnothing was written\n")
    assert not (project.path / "pyproject.toml").exists()


def test_ctrl_c_without_a_terminal_writes_nothing(separately):
    project = separately(test_a=MODEL, test_b=INTERRUPTS)
    done = init("--yes")
    assert done.exit_code == 130, done.output
    assert "nothing was written, because the tests were interrupted" in done.output
    assert not (project.path / "pyproject.toml").exists()


def test_files_that_cannot_be_collected_are_named_and_the_others_run(folder):
    folder(test_a=MODEL, test_b="import there_is_no_such_module\n", test_c="def test_(:\n")
    (folder().path / "pytest.ini").write_text("[pytest]\naddopts = -x\n")
    (project_line, *lines) = summary(seen())
    assert project_line.startswith("test functions that run a model: 1 of 1 (")
    assert lines == [
        (
            "test_b.py could not be collected, so its tests were not run: ModuleNotFoundError: No module named "
            "'there_is_no_such_module'"
        ),
        "test_c.py could not be collected, so its tests were not run: SyntaxError: invalid syntax",
    ]


def test_a_suite_that_pytest_cannot_run_is_one_sentence_with_the_end_of_the_output(folder):
    folder(test_a=MODEL, conftest="import there_is_no_such_module\n")
    done = init("--yes")
    assert done.exit_code == 2, done.output
    assert "Error: no test was run, because pytest ended with exit status 4. The end of pytest's output:" in done.output
    assert "No module named 'there_is_no_such_module'" in done.output


def test_the_first_failure_does_not_end_the_run(folder):
    folder(test_a="def test_fails():\n    assert False\n", test_b=MODEL)
    (folder().path / "pytest.ini").write_text("[pytest]\naddopts = -x\n")
    assert names(seen().tests.proposed) == ["test_model"]


# pytest-xdist


def test_workers_of_xdist_see_the_same_as_a_single_process(separately):
    project = separately(test_a=MODEL, test_b=f"{MODEL.replace('model', 'more')}\n\ndef test_other():\n    pass\n")
    (project.path / "pytest.ini").write_text("[pytest]\naddopts = -n 2\n")
    observed = seen()
    assert observed.why_ended == ""
    assert names(observed.tests.tests) == ["test_model", "test_more", "test_other"]
    assert names(observed.tests.proposed) == ["test_model", "test_more"]


def test_a_crash_of_a_worker_keeps_the_tests_of_the_others(separately):
    project = separately(test_a=MODEL, test_b="import os\n\n\ndef test_ends():\n    os._exit(3)\n")
    (project.path / "pytest.ini").write_text("[pytest]\naddopts = -n 2\n")
    observed = seen()
    assert names(observed.tests.proposed) == ["test_model"]
    assert observed.why_ended == "a process ended during test_b.py::test_ends, so 1 test has no result"


# Without a run


@pytest.mark.parametrize("options", [("--no-run",), ()])
def test_settings_without_a_run_have_a_comment_in_place_of_patterns(folder, monkeypatch, options):
    project = folder(test_a=MODEL, conftest="import pathlib\n\npathlib.Path('ran').touch()\n")
    monkeypatch.setattr(command, "_has_terminal", lambda: True)
    done = init(*options, input="y\n" if options else "n\ny\n")
    assert done.exit_code == 0, done.output
    assert not (project.path / "ran").exists()
    assert not (project.path / "gpumem-baselines").exists()
    text = (project.path / "pyproject.toml").read_text()
    assert '\n# mark = ["tests/test_model.py", "tests/test_train.py::test_step*"]\n' in text
    assert "the tests were not run. Name the tests to measure in mark" in done.output
    gate = project.run("--gpumem-update=new", device=None)
    gate.assert_outcomes(passed=1)


# Progress


def test_progress_is_a_single_line_on_a_terminal(folder, monkeypatch, capsys):
    folder(test_a=MODEL, test_b="import time\n\n\ndef test_waits():\n    time.sleep(1)\n")
    monkeypatch.setattr(streams, "can_redraw", lambda _: True)
    seen()
    shown = capsys.readouterr().err
    assert "\n" not in shown
    texts = shown.split("\r")
    assert "0:00 pytest collects the tests" in texts
    assert any(text.endswith(" 1 of 2 tests, 1 with a model, now test_b.py::test_waits") for text in texts)
    assert texts[-1] == ""


def test_progress_is_not_written_to_a_file(folder, capsys):
    folder(test_a=MODEL)
    seen()
    assert capsys.readouterr().err == ""


def test_sigterm_ends_the_tests_and_the_command(folder, monkeypatch):
    project = folder(test_a=MODEL)

    def terminated(_words, *, stop, **_how):
        os.kill(os.getpid(), signal.SIGTERM)
        stop.check()

    monkeypatch.setattr(observing, "run", terminated)
    done = init("--yes")
    assert (done.exit_code, done.output) == (143, "\ninterrupted\n")
    assert not (project.path / "pyproject.toml").exists()


def test_files_that_cannot_be_written_are_said_before_the_tests_run(folder):
    project = folder(test_a=MODEL, conftest="import pathlib\n\npathlib.Path('ran').touch()\n")
    (project.path / "pyproject.toml").write_text("tool = {x = 1}\n")
    done = init("--yes")
    assert (done.exit_code, "inline table" in done.output) == (2, True), done.output
    assert not (project.path / "ran").exists()


@pytest.mark.parametrize(("device", "runner"), [("cpu", "cpu"), ("auto", "self-hosted")])
def test_the_runner_follows_the_device_in_existing_settings(folder, monkeypatch, device, runner):
    project = folder(test_a=MODEL)
    (project.path / "pyproject.toml").write_text(f'[tool.gpumem]\ndevice = "{device}"\nmark = ["test_a.py"]\n')
    monkeypatch.setattr(command, "_this_machine", lambda _: Machine(has_gpu=True))
    done = init("--yes", "--dry-run")
    assert "test functions that run a model: 0 of 1; measured already: 1" in done.output
    assert f"the workflow is for --runner={runner}, because " in done.output


# Values


def line(kind, **values):
    return json.dumps({"kind": kind, **values}) + "\n"


def item(nodeid, function=None, **more):
    plain = {"measured": False, "markable": True, "parametrized": function is not None}
    return {"id": nodeid, "function": function or nodeid, **plain, **more}


def ended(nodeid, outcome="passed", ran=(), nbytes=None):
    return line("ended", id=nodeid, outcome=outcome, ran=list(ran), seconds=1.0, bytes=nbytes, torch=True)


def test_items_of_a_parametrized_test_are_one_test_with_the_best_outcome():
    items = [item(f"a.py::test_x[{name}]", "a.py::test_x") for name in "abc"]
    lines = [
        line("collected", items=items),
        line("collected", items=items),
        ended("a.py::test_x[a]", "failed"),
        ended("a.py::test_x[b]", ran=["module"], nbytes={"cpu": 8, "cuda": 64}),
    ]
    (test,) = read_tests(lines).tests
    assert test == ProjectTest("a.py::test_x", True, has_parameters=True, seconds=2.0, nbytes=64)
    assert read_tests(lines).on_gpu


def test_a_line_that_a_crash_cut_off_is_left_out():
    lines = [line("collected", items=[item("a.py::test_x")]), line("began", id="a.py::test_x"), '{"kind": "en']
    tests = read_tests(lines)
    assert (names(tests.with_outcome("not run")), tests.crashed) == (["test_x"], ("a.py::test_x",))


def test_items_of_other_plugins_are_named_and_not_proposed():
    lint = item("a.py::lint", markable=False)
    tests = read_tests(
        [line("collected", items=[lint]), ended("a.py::lint", ran=["module"]), line("ended session", torch=1)]
    )
    assert tests.proposed == []
    assert "`mark` can name only test functions and doctests (1):\n  a.py::lint" in "\n".join(
        summary(ObservedRun(tests))
    )


def test_long_lists_of_tests_are_cut():
    tests = ProjectTests(tuple(ProjectTest(f"a.py::test_{number}", outcome="skipped") for number in range(12)))
    assert summary(ObservedRun(tests))[-2:] == ["  a.py::test_9", "  and 2 more"]


# Patterns


def patterns(**tests: bool | None):
    """The patterns of tests, by ``file__name``: True runs a model, False does not, None is measured already."""
    made = [
        ProjectTest(name.replace("__", "::").replace("_py", ".py"), bool(runs), runs is None)
        for name, runs in tests.items()
    ]
    return patterns_of(made), made


@pytest.mark.parametrize(
    ("tests", "expected"),
    [
        ({"a_py__test_x": True, "a_py__test_y": True}, ("a.py",)),
        ({"a_py__test_x": True, "a_py__test_y": False}, ("a.py::test_x",)),
        ({"a_py__test_x": True, "a_py__test_y": None}, ("a.py",)),
        ({"a_py__T__test_x": True, "a_py__T__test_z": True, "a_py__test_y": False}, ("a.py::T",)),
        ({"a_py__T__test_x": True, "a_py__T__test_y": False}, ("a.py::T::test_x",)),
        ({"a_py__test_run_x": True, "a_py__test_run_y": True, "a_py__test_y": False}, ("a.py::test_run*",)),
        (
            {"a_py__test_run_x": True, "a_py__test_run_y": True, "a_py__test_run": False},
            ("a.py::test_run_x", "a.py::test_run_y"),
        ),
        ({"a_py__test_x": False}, ()),
    ],
)
def test_patterns_are_few_and_name_exactly_the_tests_that_run_models(tests, expected):
    made, of = patterns(**tests)
    assert made == expected
    for one in of:
        if not one.is_measured:
            assert any(matches_test(pattern, one.nodeid) for pattern in made) == one.runs_model


def test_a_folder_of_tests_that_all_run_models_is_one_pattern():
    tests = [ProjectTest(f"tests/models/{name}::test_x", True) for name in ("test_a.py", "deep/test_b.py")]
    assert patterns_of([*tests, ProjectTest("tests/test_c.py::test_x", False)]) == ("tests/models/*",)


@pytest.mark.parametrize("outcome", ["failed", "skipped", "not run"])
def test_patterns_leave_out_tests_that_did_not_pass(outcome):
    tests = [ProjectTest("a.py::test_x", True), ProjectTest("a.py::test_y", True, outcome=outcome)]
    assert patterns_of(tests) == ("a.py::test_x",)


def test_parametrized_tests_are_named_with_their_brackets():
    one, other = ProjectTest("a.py::test_x", True, has_parameters=True), ProjectTest("a.py::test_xy", False)
    (pattern,) = patterns_of([one, other])
    assert matches_test(pattern, "a.py::test_x[1]")
    assert not matches_test(pattern, "a.py::test_xy")
