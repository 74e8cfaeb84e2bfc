"""The gate from end to end: record, compare, fail, accept."""

from __future__ import annotations

import pytest

SIMPLE = """
@pytest.mark.gpumem
def test_simple():
    torch.ones({count}).sum()
"""


@pytest.fixture
def grown(project):
    """A project whose test needs 8 MB, and 4 MB in its baseline."""
    project.write(SIMPLE.format(count=1_000_000))
    project.run("--gpumem-update=new")
    project.write(SIMPLE.format(count=2_000_000))
    return project


def test_a_first_run_is_new_and_tells_how_to_record_it(project):
    project.write(SIMPLE.format(count=1_000_000))
    result = project.run("--gpumem-baseline")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(
        [
            "gpumem: nothing was gated: 1 test new, there is no baseline for CPU * yet*--gpumem-update=new*",
            "gpumem: 0 gated, 1 new",
        ]
    )


def test_growth_fails_the_test_with_figures_and_the_accepting_command(grown):
    result = grown.run("--gpumem-baseline", "--junitxml=report.xml")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "Memory regressed: peak 8.00 MB, baseline 4.00 MB: +4.00 MB (+100.0 %), allowed +1.6 %",
            "  metric *baseline *now *change *allowed*",
            "  peak allocated *4.00 MB *8.00 MB *+100.0 % *regressed",
            "  baseline: 20*, CPU (*), torch *",
            "  accept:   pytest test_it.py::test_simple --gpumem-update=all --gpumem-device=cpu",
            "gpumem: 1 gated, 1 regressed",
        ]
    )
    assert 'failures="1"' in (grown.path / "report.xml").read_text()


@pytest.mark.parametrize("on_ci", [True, False])
def test_a_failure_is_told_once_and_in_one_line_of_the_summary(grown, monkeypatch, on_ci):
    # On CI pytest does not cut the messages of its summary.
    for name in ("CI", "BUILD_NUMBER"):
        monkeypatch.delenv(name, raising=False)
    if on_ci:
        monkeypatch.setenv("CI", "true")
    result = grown.run("--gpumem-baseline", "--junitxml=report.xml")
    assert sum("peak allocated" in line and "regressed" in line for line in result.outlines) == 1
    summary = result.outlines[
        result.outlines.index("=========================== short test summary info ============================") + 1 :
    ]
    headline = "Memory regressed: peak 8.00 MB, baseline 4.00 MB: +4.00 MB (+100.0 %), allowed +1.6 %"
    assert summary[0].startswith("FAILED test_it.py::test_simple - Memory regressed: peak")
    assert not on_ci or summary[0].endswith(headline)
    assert len(summary) == 2
    assert f'failure message="{headline}">' in (grown.path / "report.xml").read_text()


def test_growth_is_not_a_failure_unless_the_comparison_was_asked_for(grown):
    result = grown.run()
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gpumem: 0 gated, 1 recorded (no budget, and no --gpumem-baseline)"])


def test_update_all_accepts_growth_and_changes_only_that_test(project):
    other = "\n\n@pytest.mark.gpumem\ndef test_other():\n    torch.ones(3_000_000)\n"
    project.write(SIMPLE.format(count=1_000_000) + other)
    project.run("--gpumem-update=new")
    (before,) = project.stored().values()
    project.write(SIMPLE.format(count=2_000_000) + other)
    assert project.run("--gpumem-update=all", "--gpumem-baseline").ret == 0
    (after,) = project.stored().values()
    changed = [pair for pair in zip(before.splitlines(), after.splitlines(), strict=True) if pair[0] != pair[1]]
    assert changed == [
        ("peak_allocated = 4000004", "peak_allocated = 8000004"),
        tuple(
            f'    "temporary |  | ones | test_it.py:8 |  | 1 x float32[{count}] | {4 * count}",'
            for count in (1_000_000, 2_000_000)
        ),
    ]
    assert project.run("--gpumem-baseline").ret == 0


def test_update_new_and_improved_leave_a_regression_alone(project):
    project.write(SIMPLE.format(count=1_000_000))
    project.run("--gpumem-update=new")
    before = project.stored()
    project.write(SIMPLE.format(count=2_000_000))
    for mode in ("new", "improved"):
        assert project.run(f"--gpumem-update={mode}", "--gpumem-baseline").ret == pytest.ExitCode.TESTS_FAILED
        assert project.run(f"--gpumem-update={mode}").ret == 0
    assert project.stored() == before


def test_over_budget_fails_without_any_baseline_and_is_never_written(project):
    project.write("@pytest.mark.gpumem(max_memory='2 MB')\ndef test_big():\n    torch.ones(1_000_000)\n")
    result = project.run("--gpumem-update=all")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(
        [
            "Memory over budget: peak 4.00 MB, budget 2.00 MB: +2.00 MB (+100.0 %)",
            "  budget:   set by the test's @pytest.mark.gpumem, or by *budget*",
            "gpumem store: 0 baselines written*1 not written*",
            "gpumem: 1 gated, 1 over budget",
        ]
    )
    assert project.stored() == {}


def test_a_changed_batch_is_stale_and_says_what_changed(project):
    source = "def test_step(gpumem):\n    gpumem.infer_step(lambda: torch.nn.Linear(64, 64), torch.ones({rows}, 64))\n"
    project.write(source.format(rows=4))
    project.run("--gpumem-update=new")
    project.write(source.format(rows=8))
    result = project.run("--gpumem-baseline")
    result.stdout.fnmatch_lines(
        [
            "stale: batch float32?8, 64?, was float32?4, 64?; peak *, baseline * kB",
            "gpumem: 0 gated, 1 stale (the baseline has another workload: --gpumem-update=all replaces it)",
        ]
    )
    strict = project.run("--gpumem-baseline", "--gpumem-strict")
    strict.assert_outcomes(failed=1)
    strict.stdout.fnmatch_lines(
        ["*(required by --gpumem-strict): stale, batch float32?8, 64?, was float32?4, 64?", "*--gpumem-update=all*"]
    )
    assert project.run("--gpumem-update=all").ret == 0
    assert project.run("--gpumem-baseline").ret == 0


def test_a_baseline_of_another_device_is_foreign_and_named(project):
    project.write(SIMPLE.format(count=1_000_000))
    project.run("--gpumem-update=new")
    (path,) = project.store.glob("cpu-*/test_it.py.toml")
    foreign = project.store / "nvidia-a100" / path.name
    foreign.parent.mkdir()
    text = path.read_text().replace("cpu-x86_64", "nvidia-a100").replace("CPU (x86_64)", "NVIDIA A100")
    foreign.write_text(text)
    path.unlink()
    result = project.run("--gpumem-baseline")
    result.stdout.fnmatch_lines(
        ["foreign: there are baselines for NVIDIA A100, but this is CPU *", "gpumem: 0 gated, 1 foreign (NVIDIA A100)"]
    )
    project.run("--gpumem-baseline", "--gpumem-strict").assert_outcomes(failed=1)
    recording = project.run("--gpumem-update=new")
    recording.stdout.fnmatch_lines(["gpumem store: 1 baseline written (new), *", "gpumem: 1 recorded, new"])
    recording.stdout.no_fnmatch_line("foreign: *")
    project.run("--gpumem-baseline").stdout.fnmatch_lines(["gpumem: 1 gated"])


def test_strict_fails_what_is_new_but_not_while_it_is_recorded(project):
    project.write(SIMPLE.format(count=1_000_000))
    strict = project.run("--gpumem-baseline", "--gpumem-strict")
    strict.assert_outcomes(failed=1)
    strict.stdout.fnmatch_lines(
        ["*(required by --gpumem-strict): new, there is no baseline for CPU * yet", "*--gpumem-update=new*"]
    )
    project.run("--gpumem-strict", "--gpumem-update=new").assert_outcomes(passed=1)
    project.run("--gpumem-baseline", "--gpumem-strict").assert_outcomes(passed=1)


def test_strict_alone_fails_a_test_that_is_held_against_nothing(project):
    project.write(SIMPLE.format(count=1_000_000))
    result = project.run("--gpumem-strict")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["*(required by --gpumem-strict): recorded, the test has no budget, and --gpumem-baseline was not given"]
    )


def test_tolerance_replaces_the_tolerance(project):
    source = "@pytest.mark.gpumem(tolerance={growth!r})\ndef test_it():\n    torch.ones({count})\n"
    project.write(source.format(growth="0 %", count=1_000_000))
    project.run("--gpumem-update=new")
    project.write(source.format(growth="0 %", count=1_000_001))
    project.run("--gpumem-baseline").assert_outcomes(failed=1)
    project.write(source.format(growth="60 %", count=1_500_000))
    project.run("--gpumem-baseline").assert_outcomes(passed=1)


def test_an_expected_failure_of_the_gate_is_an_expected_failure(project):
    project.write(
        "@pytest.mark.xfail(reason='known')\n@pytest.mark.gpumem(max_gb=0.001)\ndef test_big():\n    torch.ones(1_000_000)\n"
    )
    result = project.run("--gpumem-update=all")
    result.assert_outcomes(xfailed=1)
    assert project.stored() == {}


def test_last_failed_runs_what_the_gate_failed(project, pytester):
    project.write(
        "@pytest.mark.gpumem(max_gb=0.001)\ndef test_big():\n    torch.ones(1_000_000)\n\n\ndef test_small(): ...\n"
    )
    pytester.runpytest_inprocess("--gpumem-device=cpu").assert_outcomes(failed=1, passed=1)
    pytester.runpytest_inprocess("--gpumem-device=cpu", "--last-failed").assert_outcomes(failed=1)


def test_a_rerun_replaces_what_was_measured_before(project):
    project.plugins.append("pytest_rerunfailures")
    project.write(
        "TRIES = []\n\n\n@pytest.mark.flaky(reruns=1)\n@pytest.mark.gpumem(max_memory='2 MB')\ndef test_flaky():\n"
        "    TRIES.append(1)\n    torch.ones(1_000_000 if len(TRIES) == 1 else 1000)\n"
    )
    result = project.run("--gpumem-update=new")
    result.stdout.fnmatch_lines(["gpumem store: 1 baseline written*", "gpumem: 1 recorded, new", "*1 passed, 1 rerun*"])


def test_a_renamed_measurement_is_unused_and_goes_with_update_all(project):
    source = "def test_it(gpumem):\n    gpumem.measure(lambda: torch.ones(1000), name={name!r})\n"
    project.write(source.format(name="old"))
    project.run("--gpumem-update=new")
    project.write(source.format(name="fresh"))
    project.run("--gpumem-update=all")
    (text,) = project.stored().values()
    assert "[tests.test_it.fresh]" in text
    assert "[tests.test_it.old]" not in text


def test_baselines_of_tests_that_are_gone_are_listed_on_complete_runs_only(project):
    project.write(SIMPLE.format(count=1000) + SIMPLE.format(count=1000).replace("test_simple", "test_gone"))
    project.run("--gpumem-update=new")
    project.write(SIMPLE.format(count=1000))
    line = "gpumem store: 1 unused baseline: test_it.py::test_gone (call); `gpumem prune` removes it"
    project.run("--gpumem-baseline").stdout.fnmatch_lines([line])
    project.run("--gpumem-baseline", "-k", "simple").stdout.fnmatch_lines([line])
    project.write(SIMPLE.format(count=1000) + "\n\ndef test_more(): ...\n")
    # A test that is not measured has no baseline that this could be.
    project.run("--gpumem-baseline", "-k", "simple").stdout.fnmatch_lines([line])
    project.write(SIMPLE.format(count=1000) + SIMPLE.format(count=1000).replace("test_simple", "test_more"))
    project.run("--gpumem-baseline", "-k", "simple").stdout.no_fnmatch_line(line)
    project.run("--gpumem-baseline", "test_it.py::test_simple").stdout.no_fnmatch_line(line)


def test_a_store_named_on_the_command_line_counts_from_where_pytest_was_started(project, pytester, monkeypatch):
    project.write(SIMPLE.format(count=1_000_000))
    (project.path / "inner").mkdir()
    monkeypatch.chdir(project.path / "inner")
    project.run("--gpumem-update=new", "--gpumem-store=mine", "--rootdir=..", "..")
    assert len(list((project.path / "inner" / "mine").glob("cpu-*/test_it.py.toml"))) == 1
    project.write(SIMPLE.format(count=2_000_000))
    result = project.run("--gpumem-baseline", "--gpumem-store=mine", "--rootdir=..", "..")
    result.stdout.fnmatch_lines(
        ["  accept:   pytest ../test_it.py::test_simple --gpumem-update=all --gpumem-device=cpu --gpumem-store=mine"]
    )


def test_units_iec_shows_binary_units(project):
    project.settings('[tool.gpumem]\nunits = "iec"\n')
    project.write("@pytest.mark.gpumem\ndef test_it():\n    torch.ones(262144)\n")
    project.run().stdout.fnmatch_lines(["test_it.py::test_it *1.00 MiB*"])


@pytest.mark.parametrize("options", [[], ["--gpumem-baseline", "--gpumem-strict"]], ids=["update", "gate"])
def test_growth_that_an_update_accepts_is_told_as_accepted(grown, options):
    result = grown.run("--gpumem-update=all", "--gpumem-report=report.md", *options)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["test_it.py::*  accepted", "gpumem: 1 gated, 1 accepted"])
    result.stdout.no_fnmatch_line("*regressed*")
    assert "regressed" not in (grown.path / "report.md").read_text(encoding="utf-8")


def test_a_test_whose_tear_down_failed_is_new_and_not_recorded(project):
    fails = "@pytest.fixture\ndef broken():\n    yield\n    assert False\n\n\n"
    project.write(f"{fails}@pytest.mark.gpumem\ndef test_a(broken):\n    torch.ones(10)\n{SIMPLE.format(count=10)}")
    result = project.run("--gpumem-update=new")
    result.stdout.fnmatch_lines(
        [
            "gpumem store: 1 baseline written (new), *; 1 not written, because the test failed or was skipped",
            "gpumem: 1 recorded, new; 1 not recorded, new",
        ]
    )
