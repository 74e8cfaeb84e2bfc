"""A renamed test does not hide that it grew: a gate compares it with the baseline that nobody uses any more."""

from __future__ import annotations

import re
import shlex

import pytest

TEST = "@pytest.mark.gpumem\ndef test_{}():\n    torch.ones({})\n\n\n"
SMALL, WIDE = 1_000_000, 4_000_000
RENAMED = (
    "gpumem: test_it.py::test_block: renamed? It has no baseline, and an unused baseline (test_it.py::test_own) has the same "
    "step, batch and device: peak allocated went from 4.00 MB to 16.00 MB (+300.0 %). Accept it with "
)
OTHERS = TEST.format("one", 10) + TEST.format("two", 20)


@pytest.fixture
def recorded(project):
    """A project with baselines of three tests."""
    project.write(OTHERS + TEST.format("own", SMALL))
    project.run("--gpumem-update=new").assert_outcomes(passed=3)
    return project


@pytest.mark.parametrize("options", [[], pytest.param(["-n2"], marks=pytest.mark.thorough)], ids=["alone", "workers"])
def test_a_renamed_test_that_grew_fails_until_it_is_accepted(recorded, options):
    recorded.write(OTHERS + TEST.format("block", WIDE))
    result = recorded.run("--gpumem-baseline", *options, separate=bool(options))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    (line,) = (line for line in result.outlines if line.startswith(RENAMED))
    assert line.endswith(
        "; if they are different tests, remove the unused baseline with `gpumem prune test_it.py --gpumem-device=cpu`"
    )
    (command,) = re.findall(r"`pytest (test_it.py::test_block --gpumem-update=all [^`]*)`", line)
    words = [word for word in shlex.split(command) if not word.startswith("--gpumem-device")]
    assert recorded.run(*words).ret == 0
    assert recorded.run("--gpumem-baseline").ret == 0


def test_pruning_the_old_baseline_says_that_they_are_different_tests(recorded):
    recorded.write(OTHERS + TEST.format("block", WIDE))
    assert recorded.run("--gpumem-baseline").ret == pytest.ExitCode.TESTS_FAILED
    assert "1 of 3 baselines was unused" in recorded.gpumem("prune", "test_it.py").stdout
    result = recorded.run("--gpumem-baseline")
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*renamed?*")


@pytest.mark.parametrize("peak", [SMALL, SMALL // 2], ids=["the same", "less"])
def test_a_renamed_test_that_did_not_grow_is_named_and_passes(recorded, peak):
    recorded.write(OTHERS + TEST.format("block", peak))
    result = recorded.run("--gpumem-baseline")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            (
                "gpumem: renamed? 1 new test has figures no worse than an unused baseline for the same step, batch and device: "
                "test_it.py::test_block (was test_it.py::test_own)"
            )
        ]
    )


def test_an_update_of_what_is_new_leaves_a_renamed_test_that_grew_unwritten(recorded):
    before = recorded.stored()
    recorded.write(OTHERS + TEST.format("block", WIDE))
    result = recorded.run("--gpumem-update=new")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            f"{RENAMED}*",
            (
                "gpumem store: 0 baselines written (new), 2 left as they were; 1 not written, because it may be a renamed test "
                "whose memory grew"
            ),
            "gpumem: 2 gated; 1 not recorded, new",
        ]
    )
    assert recorded.stored() == before
    assert recorded.run("--gpumem-update=new", "--gpumem-baseline").ret == pytest.ExitCode.TESTS_FAILED
    accepted = recorded.run("--gpumem-update=all", "--gpumem-baseline")
    assert accepted.ret == 0
    assert any("[tests.test_block." in text for text in recorded.stored().values())


def test_an_update_of_what_is_new_writes_a_renamed_test_that_did_not_grow(recorded):
    recorded.write(OTHERS + TEST.format("block", SMALL))
    recorded.run("--gpumem-update=new").stdout.fnmatch_lines(["gpumem: renamed? 1 new test has *", "*1 recorded, new"])


RENAMES = {
    "class": (
        "class TestA:\n    @pytest.mark.gpumem\n    def test_it(self):\n        torch.ones({})\n",
        "TestA",
        "TestB",
    ),
    "parameter": (
        "@pytest.mark.gpumem\n@pytest.mark.parametrize('n', [{}], ids=['a'])\ndef test_it(n):\n    torch.ones(n)\n",
        "'a'",
        "'b'",
    ),
}


@pytest.mark.parametrize(("source", "old", "new"), RENAMES.values(), ids=RENAMES)
def test_a_renamed_class_or_parameter_hides_no_growth(project, source, old, new):
    project.write(OTHERS + source.format(SMALL))
    project.run("--gpumem-update=new")
    project.write(OTHERS + source.format(SMALL).replace(old, new))
    assert project.run("--gpumem-baseline").ret == 0
    project.write(OTHERS + source.format(WIDE).replace(old, new))
    result = project.run("--gpumem-baseline")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["gpumem: test_it.py::*: renamed? *(+300.0 %)*"])


@pytest.mark.parametrize("is_gone", [True, False], ids=["renamed file", "moved test"])
def test_a_test_in_another_file_is_found_by_its_name(recorded, is_gone):
    recorded.write(TEST.format("own", WIDE), "test_new.py")
    recorded.write(OTHERS if not is_gone else "", "test_it.py")
    if is_gone:
        (recorded.path / "test_it.py").unlink()
        recorded.write(OTHERS + TEST.format("own", WIDE), "test_new.py")
    result = recorded.run("--gpumem-baseline")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["gpumem: test_new.py::test_own: renamed? *(test_it.py::test_own)*(+300.0 %)*"])


@pytest.mark.parametrize(
    "typed", [["-k", "block"], ["test_it.py::test_block"], ["--deselect=test_it.py::test_one"]], ids=" ".join
)
def test_a_run_of_some_tests_of_a_file_says_nothing(recorded, typed):
    recorded.write(OTHERS + TEST.format("block", WIDE))
    result = recorded.run("--gpumem-update=new", *typed)
    assert result.ret == 0
    result.stdout.no_fnmatch_line("*renamed?*")


def test_an_added_test_beside_a_deselected_or_unmeasured_one_is_new(recorded):
    recorded.write(OTHERS + "def test_own(): ...\n\n\n" + TEST.format("block", WIDE))
    result = recorded.run("--gpumem-baseline")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.no_fnmatch_line("*renamed?*")


def test_the_tolerance_of_the_test_itself_counts(recorded):
    marked = TEST.format("block", SMALL + SMALL // 10)
    recorded.write(OTHERS + marked)
    assert recorded.run("--gpumem-baseline").ret == pytest.ExitCode.TESTS_FAILED
    recorded.write(OTHERS + marked.replace("gpumem", "gpumem(tolerance='20 %')"))
    assert recorded.run("--gpumem-baseline").ret == 0


def test_a_step_of_the_same_batch_is_compared_whatever_its_parameters(project):
    source = (
        "def test_{}(gpumem):\n    layer = torch.nn.Sequential(torch.nn.Linear(64, {}), torch.nn.Linear({}, 64))\n"
        "    gpumem.train_step(layer, torch.ones(8, 64), loss=lambda out, _: out.sum())\n\n\n"
    )
    project.write(OTHERS + source.format("own", 512, 512))
    project.run("--gpumem-update=new").assert_outcomes(passed=3)
    project.write(OTHERS + source.format("block", 2048, 2048))
    result = project.run("--gpumem-baseline")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["gpumem: test_it.py::test_block: renamed? *peak allocated went from*"])
