"""Tests that have baselines and are not measured any more: the gate fails them, an update tells of them, prune accepts them."""

from __future__ import annotations

import shlex

import pytest

CONFTEST = """
import os

from pytest_gpumem.base.errors import DeviceUnavailable
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.facts.measurement import Environment


class Second(CpuDevice):
    name = "second"

    def environment(self):
        return Environment("second-1", "Second 1", {})


def second():
    if "NO_SECOND" in os.environ:
        raise DeviceUnavailable("no second device")
    return Second()


def pytest_gpumem_devices(config):
    return {"second": second}
"""
"""A device beside the CPU, which a machine may lack."""
MARKED = "@pytest.mark.gpumem{}\ndef test_{}():\n    torch.ones(10)\n\n\n"
PLAIN = "def test_{}():\n    torch.ones(10)\n\n\n"
GONE = "Not measured any more: it no longer has the marker or the fixture gpumem, *"


@pytest.fixture
def two_devices(project):
    """A project on a machine with two devices."""
    project.write(CONFTEST, "conftest.py")
    return project


def test_a_gate_whose_pattern_of_measure_went_is_red_and_green_once_it_was_pruned(project, monkeypatch):
    project.settings('[tool.gpumem]\nbaseline = true\nmark = ["test_it.py"]\n')
    project.write(
        "@pytest.mark.parametrize('n', [1000, 2000])\ndef test_it(n):\n    torch.ones(n)\n\n\n"
        "@pytest.mark.skipif('GONE' in __import__('os').environ, reason='')\ndef test_skipped():\n    torch.ones(10)\n"
    )
    project.run("--gpumem-update=new").assert_outcomes(passed=3)
    project.settings("[tool.gpumem]\nbaseline = true\n")
    monkeypatch.setenv("GONE", "1")
    result = project.run()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=2, skipped=1)
    result.stdout.fnmatch_lines_random(
        [
            GONE,
            '  accept:   gpumem prune "test_it.py::test_it?1000?" --gpumem-device=cpu',
            '  accept:   gpumem prune "test_it.py::test_it?2000?" --gpumem-device=cpu',
            "gpumem: nothing was gated: 2 tests unmeasured, it no longer has *",
            "gpumem: 0 gated, 2 missing, 1 unmeasured (it was skipped)",
        ]
    )
    assert project.gpumem("prune", "test_it.py", "--gpumem-device=cpu").returncode == 0
    assert project.stored() == {}
    assert project.run().ret == 0


def test_a_deselected_or_xfailed_test_or_another_devices_baseline_is_not_missing(project):
    marked = "@pytest.mark.gpumem\ndef test_{}():\n    torch.ones(10)\n\n\n"
    project.write("".join(map(marked.format, ("measured", "deselected", "expected"))))
    project.write(marked.format("it"), "test_elsewhere.py")
    project.run("--gpumem-update=new").assert_outcomes(passed=4)
    (file,) = project.store.rglob("test_elsewhere.py.toml")
    (project.store / "nvidia-h100").mkdir()
    text = file.read_text(encoding="utf-8").replace("cpu-x86_64", "nvidia-h100")
    (project.store / "nvidia-h100" / file.name).write_text(text, encoding="utf-8")
    file.unlink()
    project.write(
        marked.format("measured")
        + "def test_deselected(): ...\n\n\n@pytest.mark.xfail\ndef test_expected():\n    assert False\n"
    )
    project.write("def test_it(): ...\n", "test_elsewhere.py")
    result = project.run("--gpumem-baseline", "--deselect=test_it.py::test_deselected", "--gpumem-strict")
    assert result.ret == 0
    result.assert_outcomes(passed=2, xfailed=1, deselected=1)


@pytest.mark.parametrize("beside", [MARKED.format("", "other"), ""], ids=["beside another", "alone"])
def test_a_test_that_named_another_device_than_the_sessions_is_missed(two_devices, beside):
    two_devices.write(beside + MARKED.format("(device='second')", "it"))
    assert two_devices.run("--gpumem-update=new").ret == 0
    assert two_devices.run("--gpumem-baseline").ret == 0
    two_devices.write(beside + PLAIN.format("it"))
    result = two_devices.run("--gpumem-baseline")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([GONE])


def test_a_test_with_a_device_from_its_file_or_class_is_missed_without_a_marker(two_devices):
    marks = "pytestmark = pytest.mark.gpumem(device='second')\n\n\n"
    two_devices.write(marks + "def test_it(gpumem):\n    gpumem.measure(lambda: torch.ones(10))\n", "test_file.py")
    two_devices.write(
        "@pytest.mark.gpumem(device='second')\nclass TestIt:\n    def test_it(self):\n        torch.ones(10)\n"
    )
    assert two_devices.run("--gpumem-update=new").ret == 0
    two_devices.write(PLAIN.format("it"), "test_file.py")
    two_devices.write("class TestIt:\n    def test_it(self):\n        torch.ones(10)\n")
    two_devices.run("--gpumem-baseline").assert_outcomes(failed=2)


def test_a_baseline_that_names_a_device_of_a_plugin_that_is_gone_is_another_machines(two_devices):
    two_devices.write(MARKED.format("", "other") + MARKED.format("(device='second')", "it"))
    two_devices.run("--gpumem-update=new")
    (two_devices.path / "conftest.py").unlink()
    two_devices.write(MARKED.format("", "other") + PLAIN.format("it"))
    assert two_devices.run("--gpumem-baseline").ret == 0


def test_a_machine_without_the_device_that_a_test_named_does_not_miss_it(two_devices, monkeypatch):
    two_devices.write(MARKED.format("", "other") + MARKED.format("(device='second')", "it"))
    two_devices.run("--gpumem-update=new")
    monkeypatch.setenv("NO_SECOND", "1")
    # A marker that depends on what the machine has.
    two_devices.write(MARKED.format("", "other") + PLAIN.format("it"))
    result = two_devices.run("--gpumem-baseline", "--gpumem-strict")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gpumem: 1 gated"])


def test_a_test_measured_only_on_another_device_is_not_missed_on_this_device(two_devices):
    two_devices.write(
        "def pytest_collection_modifyitems(config, items):\n    for item in items:\n"
        "        if item.name == 'test_other' or config.getoption('gpumem_device') == 'second':\n"
        "            item.add_marker('gpumem')\n",
        "folder/conftest.py",
    )
    two_devices.write(PLAIN.format("other") + PLAIN.format("it"), "folder/test_it.py")
    two_devices.run("--gpumem-update=new").assert_outcomes(passed=2)
    two_devices.run("--gpumem-update=new", device="second").assert_outcomes(passed=2)
    result = two_devices.run("--gpumem-baseline", "--gpumem-strict")
    assert result.ret == 0
    result.assert_outcomes(passed=2)


def test_the_device_that_a_marker_names_is_stored_and_added_where_it_is_named_later(two_devices):
    two_devices.write(MARKED.format("(device='second')", "it"))
    two_devices.run("--gpumem-update=new")
    stored = two_devices.stored()
    assert '\nnamed_device = "second"\n' in stored["second-1/test_it.py.toml"]
    for mode in ("new", "improved", "all"):
        two_devices.run(f"--gpumem-update={mode}")
        assert two_devices.stored() == stored
    two_devices.write(MARKED.format("", "it"))
    two_devices.run("--gpumem-update=all", device="second")
    assert "named_device" not in two_devices.stored()["second-1/test_it.py.toml"]
    two_devices.write(MARKED.format("(device='second')", "it"))
    two_devices.run("--gpumem-update=new")
    assert two_devices.stored() == stored


def accepted(project, result):
    """Runs the commands that failures tell, and returns what they print."""
    told = [line.partition("accept:")[2].split("gpumem ", 1)[1] for line in result.outlines if "  accept:   " in line]
    return [project.gpumem(*shlex.split(command)).stdout for command in told]


def test_the_command_of_a_failure_accepts_that_test_and_no_other_that_is_gone(project):
    project.write("".join(MARKED.format("", name) for name in ("kept", "gone", "it")))
    project.write(MARKED.format("", "moved"), "test_gone.py")
    project.write(
        "class TestIt:\n    @pytest.mark.gpumem\n    def test_it(self):\n        torch.ones(10)\n", "test_b.py"
    )
    project.run("--gpumem-update=new")
    before = project.stored()
    project.write(MARKED.format("", "kept") + PLAIN.format("it"))
    (project.path / "test_gone.py").unlink()
    project.write("class TestIt:\n    def test_it(self):\n        torch.ones(10)\n", "test_b.py")
    result = project.run("--gpumem-baseline")
    result.assert_outcomes(passed=1, failed=2)
    assert len(accepted(project, result)) == 2
    after = project.stored()
    (folder,) = {path.partition("/")[0] for path in after}
    assert sorted(after) == [f"{folder}/test_gone.py.toml", f"{folder}/test_it.py.toml"]
    text = after[f"{folder}/test_it.py.toml"]
    assert [name for name in ("kept", "gone", "it") if f"[tests.test_{name}." in text] == ["kept", "gone"]
    assert f"{folder}/test_b.py.toml" in before
    assert project.run("--gpumem-baseline").ret == 0


def test_pruning_by_id_leaves_measured_and_deselected_tests(project):
    project.write(MARKED.format("", "kept") + MARKED.format("", "it"))
    project.run("--gpumem-update=new")
    before = project.stored()
    project.write(MARKED.format("", "kept") + PLAIN.format("it"))
    for arguments in (["test_it.py::test_kept"], ["test_it.py::test_it", "-k", "kept"]):
        assert "0 of 2 baselines were unused" in project.gpumem("prune", *arguments, "--gpumem-device=cpu").stdout
    assert project.stored() == before
    assert "1 of 2 baselines was unused" in project.gpumem("prune", "test_it.py::test_it", "--gpumem-device=cpu").stdout


def test_pruning_a_test_by_its_id_leaves_its_baselines_of_devices_that_are_not_here(two_devices, monkeypatch):
    two_devices.write(MARKED.format("", "it"))
    two_devices.run("--gpumem-update=new")
    two_devices.run("--gpumem-update=new", device="second")
    two_devices.write(PLAIN.format("it"))
    monkeypatch.setenv("NO_SECOND", "1")
    result = two_devices.gpumem("prune", "test_it.py::test_it", "--gpumem-device=cpu")
    assert "this machine does not have the device (second-1)" in result.stdout
    assert list(two_devices.stored()) == ["second-1/test_it.py.toml"]


@pytest.mark.parametrize(
    ("mode", "beside"),
    [
        pytest.param("new", MARKED.format("", "other"), id="new"),
        pytest.param("improved", MARKED.format("", "other"), id="improved"),
        pytest.param("all", MARKED.format("", "other"), id="all"),
        pytest.param("all", "", id="beside no other"),
    ],
)
def test_an_update_names_a_no_longer_measured_test_and_keeps_its_baseline(project, mode, beside):
    project.write(beside + MARKED.format("", "it"))
    project.run("--gpumem-update=new")
    before = project.stored()
    project.write(beside + PLAIN.format("it"))
    result = project.run(f"--gpumem-update={mode}")
    # Without the other test, nothing was recorded.
    assert result.ret == (0 if beside else 1)
    result.stdout.fnmatch_lines(
        [
            (
                "gpumem store: 1 test has baselines here and is not measured any more (test_it.py::test_it); no update changes "
                "them: mark the test again, or remove its baselines with `gpumem prune test_it.py::test_it`"
            ),
            f"gpumem: {int(bool(beside))} gated, 1 missing",
        ]
    )
    result.stdout.no_fnmatch_line("*unused baseline*")
    assert project.stored() == before


def test_an_update_counts_tests_that_are_not_measured_any_more_and_names_the_first(project):
    names = ("a", "b", "c")
    project.write("".join(MARKED.format("", name) for name in names))
    project.run("--gpumem-update=new")
    project.write("".join(PLAIN.format(name) for name in names))
    result = project.run("--gpumem-update=all")
    result.stdout.fnmatch_lines(
        ["gpumem store: 3 tests have baselines here and are not measured any more (*test_a, ...);*"]
    )


def test_an_update_that_gates_as_well_fails_a_test_that_is_not_measured_any_more(project):
    project.write(MARKED.format("", "other") + MARKED.format("", "it"))
    project.run("--gpumem-update=new")
    project.write(MARKED.format("", "other") + PLAIN.format("it"))
    result = project.run("--gpumem-update=all", "--gpumem-baseline")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines([GONE])


SKIPS = "def test_{}():\n    pytest.skip('no data')\n\n\n"
SKIPPED_BY_MARK = "@pytest.mark.skip\ndef test_{}(): ...\n\n\n"
SKIPPED_IN_SET_UP = (
    "@pytest.fixture\ndef data():\n    pytest.skip('no data')\n\n\ndef test_{}(data):\n    torch.ones(10)\n\n\n"
)


@pytest.mark.parametrize(
    ("marker", "skips"),
    [
        pytest.param("@pytest.mark.gpumem\n", SKIPS, id="marked"),
        pytest.param("", SKIPS, id="not measured any more"),
        pytest.param("", SKIPPED_BY_MARK, id="by a marker"),
    ],
)
def test_a_test_that_skips_is_unmeasured_whether_its_marker_went_or_not(project, marker, skips):
    project.write(MARKED.format("", "other") + MARKED.format("", "it"))
    project.run("--gpumem-update=new")
    project.write(MARKED.format("", "other") + marker + skips.format("it"))
    beside = project.run("--gpumem-baseline", "--gpumem-strict")
    assert beside.ret == 0
    beside.stdout.fnmatch_lines(["gpumem: 1 gated, 1 unmeasured (it was skipped)"])
    alone = project.run("--gpumem-baseline", "-k", "test_it and not other")
    assert alone.ret == pytest.ExitCode.TESTS_FAILED
    alone.stdout.fnmatch_lines(
        [
            "gpumem: nothing was gated: 1 test unmeasured, it was skipped",
            "gpumem: 0 gated, 1 unmeasured (it was skipped)",
        ]
    )


@pytest.mark.thorough
def test_workers_say_which_tests_are_not_measured_any_more(two_devices):
    named = MARKED.format("(device='second')", "named")
    two_devices.write("".join(MARKED.format("", name) for name in ("other", "it", "skips")) + named)
    two_devices.run("--gpumem-update=new")
    before = two_devices.stored()
    two_devices.write(
        MARKED.format("", "other") + PLAIN.format("it") + SKIPPED_BY_MARK.format("skips") + PLAIN.format("named")
    )
    result = two_devices.run("--gpumem-baseline", "--gpumem-update=all", "-n1", separate=True)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=2, skipped=1)
    result.stdout.fnmatch_lines_random(
        [
            GONE,
            "gpumem store: 2 tests have baselines here and are not measured any more (*",
            "gpumem: 1 gated, 2 missing, 1 unmeasured (it was skipped)",
        ]
    )
    assert two_devices.stored() == before


def test_a_no_longer_measured_test_that_skips_or_fails_counts_as_such(project):
    project.write(MARKED.format("", "other") + MARKED.format("", "skips") + MARKED.format("", "fails"))
    project.run("--gpumem-update=new")
    fails = "def test_fails():\n    assert False\n"
    project.write(MARKED.format("", "other") + SKIPPED_IN_SET_UP.format("skips") + fails)
    result = project.run("--gpumem-baseline")
    result.assert_outcomes(passed=1, skipped=1, failed=1)
    result.stdout.fnmatch_lines(["gpumem: 1 gated, 1 unmeasured (it was skipped), 1 failed by itself"])


@pytest.mark.parametrize(
    ("source", "workers"),
    [
        pytest.param(PLAIN, [], id="runs"),
        pytest.param(SKIPS, [], id="skips"),
        pytest.param(PLAIN, ["-n1"], id="workers", marks=pytest.mark.thorough),
    ],
)
def test_a_gate_without_any_markers_left_is_red_on_a_machine_without_the_device(
    two_devices, workers, source, monkeypatch
):
    two_devices.write(MARKED.format("", "it") + MARKED.format("(device='second')", "other"))
    two_devices.run("--gpumem-update=new", device="second")
    monkeypatch.setenv("NO_SECOND", "1")
    two_devices.write(source.format("it") + source.format("other"))
    result = two_devices.run("--gpumem-baseline", *workers, device="second", separate=bool(workers))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            (
                "gpumem: nothing was gated: no measured test was selected, and 2 tests have baselines of other devices "
                "(second-1): test_it.py::test_it, ..."
            )
        ]
    )


def test_a_gate_is_not_red_for_tests_without_baselines_or_that_were_deselected(two_devices, monkeypatch):
    two_devices.write(MARKED.format("", "it"))
    two_devices.run("--gpumem-update=new", device="second")
    monkeypatch.setenv("NO_SECOND", "1")
    two_devices.write(PLAIN.format("it") + PLAIN.format("plain") + SKIPS.format("skips"))
    # A shard without a measured test of its own.
    result = two_devices.run("--gpumem-baseline", "--deselect=test_it.py::test_it")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gpumem: nothing to gate: no measured test was selected"])


def test_a_gate_with_something_to_compare_is_green_beside_tests_of_another_device(two_devices, monkeypatch):
    two_devices.write(MARKED.format("", "it") + MARKED.format("(device='second')", "other"))
    two_devices.run("--gpumem-update=new")
    monkeypatch.setenv("NO_SECOND", "1")
    two_devices.write(MARKED.format("", "it") + SKIPS.format("other"))
    assert two_devices.run("--gpumem-baseline", "--gpumem-strict").ret == 0


def test_an_update_tells_why_a_test_that_has_the_fixture_measured_nothing(project):
    source = "def test_it(gpumem):\n    {}\n    gpumem.measure(lambda: torch.ones(10))\n"
    project.write(source.format("pass"))
    project.run("--gpumem-update=new")
    before = project.stored()
    project.write(source.format("return"))
    result = project.run("--gpumem-update=all")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "gpumem store: 1 test has baselines here *: it has the gpumem fixture but measured nothing with it",
            "gpumem: nothing was recorded: 1 test unmeasured, it has the gpumem fixture but measured nothing with it",
            "*1 missing",
        ]
    )
    assert project.stored() == before


WITH_FIXTURE = "@pytest.mark.gpumem{}\ndef test_{}(gpumem):\n    gpumem.measure(lambda: torch.ones(10))\n\n\n"
ELSEWHERE = "Not measured any more: no second device"


@pytest.mark.parametrize("source", [MARKED, WITH_FIXTURE], ids=["marker", "fixture"])
@pytest.mark.parametrize(
    ("options", "strict"),
    [
        pytest.param([], [], id="alone"),
        pytest.param(["-n2"], [], id="workers", marks=pytest.mark.thorough),
        pytest.param([], ["--gpumem-strict"], id="strict"),
    ],
)
def test_a_marker_that_turns_to_a_device_that_is_not_here_leaves_a_gap(
    two_devices, monkeypatch, options, strict, source
):
    two_devices.write(source.format("", "other") + source.format("", "it"))
    two_devices.run("--gpumem-update=new").assert_outcomes(passed=2)
    two_devices.write(source.format("", "other") + source.format("(device='second')", "it"))
    monkeypatch.setenv("NO_SECOND", "1")
    result = two_devices.run("--gpumem-baseline", *options, *strict, separate=bool(options))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            f"{ELSEWHERE}*",
            "  baseline: * on cpu-*, but no figures were compared with it",
            "  accept:   gpumem prune test_it.py::test_it --gpumem-device=cpu*",
            "gpumem: 1 gated, 1 missing",
        ]
    )
    if not options:
        assert len(accepted(two_devices, result)) == 1
        text = "".join(two_devices.stored().values())
        assert [name for name in ("other", "it") if f"[tests.test_{name}." in text] == ["other"]
        assert two_devices.run("--gpumem-baseline").ret == 0


def device_of_the_session(project):
    return ["--gpumem-device=second"]


def device_of_the_settings(project):
    project.settings('[tool.gpumem]\ndevice = "second"\n')
    return []


@pytest.mark.parametrize("name_second", [device_of_the_session, device_of_the_settings])
def test_settings_that_turn_to_a_device_that_is_not_here_leave_a_gap(two_devices, monkeypatch, name_second):
    two_devices.write(MARKED.format("(device='cpu')", "other") + MARKED.format("", "it"))
    two_devices.run("--gpumem-update=new").assert_outcomes(passed=2)
    monkeypatch.setenv("NO_SECOND", "1")
    result = two_devices.run("--gpumem-baseline", *name_second(two_devices), device=None)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines([f"{ELSEWHERE}*"])
