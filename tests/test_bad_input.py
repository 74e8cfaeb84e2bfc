"""Wrong input ends in a usage error of one or two lines that names the place and what would be right."""

from __future__ import annotations

import re

import pytest

RIGHT = "@pytest.mark.gpumem\ndef test_it():\n    torch.ones(1_000_000).sum()\n"
WORKERS = [pytest.param([], id="alone"), pytest.param(["-n", "2"], id="workers")]


def usage_error(result: pytest.RunResult) -> str:
    """The message of a run that ended in a usage error of one or two lines."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in result.errlines if line.strip()]
    start = next(number for number, line in enumerate(lines) if line.startswith("ERROR: "))
    assert len(lines) - start <= 2
    assert not any("Traceback" in line for line in result.errlines + result.outlines)
    return " ".join(lines[start:])


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("max_bg=1", "unknown argument 'max_bg'; did you mean 'max_gb'?"),
        ("max_memory='6.5 Gigs'", "max_memory: '6.5 Gigs': unknown unit 'Gigs'"),
    ],
)
def test_a_wrong_marker_names_the_test_and_the_nearest_word(project, workers, arguments, said):
    # Without torch, which every worker would load only to collect it.
    source = f"import pytest\n\n\n@pytest.mark.gpumem({arguments})\ndef test_it(): ...\n"
    (project.path / "test_it.py").write_text(source, encoding="utf-8")
    message = usage_error(project.run(*workers, separate=bool(workers)))
    assert "test_it.py::test_it: " in message
    assert said in message


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("6.5", "takes keyword arguments only, got 6.5; write max_gb=6.5"),
        ("max_gb=-1", "max_gb: -1 is negative"),
        ("max_gb='6'", "max_gb: '6' is not a number of GB"),
        ("max_memory='6'", "max_memory: '6' has no unit; write it like '6 GB'"),
        ("max_memory=6", "max_memory: 6 is not a size; write it with its unit"),
        ("max_growth='2'", "max_growth: '2' is not a percentage; write it like '2 %'"),
        ("max_growth=0.02", "max_growth: 0.02 is not a percentage"),
        ("max_gb=1, max_memory='1 GB'", "max_gb and max_memory say the same thing"),
        ("device='gpu'", "device 'gpu': no such device; did you mean 'cuda'?"),
    ],
)
def test_a_wrong_marker_argument_is_explained(project, arguments, said):
    project.write(f"@pytest.mark.gpumem({arguments})\ndef test_it(): ...\n")
    assert said in usage_error(project.run())


def test_a_wrong_marker_is_told_also_when_its_test_is_deselected(project):
    project.write("@pytest.mark.gpumem(max_bg=1)\ndef test_it(): ...\n\n\ndef test_other(): ...\n")
    assert "max_bg" in usage_error(project.run("-k", "other"))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("stroe = 'x'", "unknown key 'stroe'; did you mean 'store'?"),
        ("strict = 'yes'", "strict is 'yes', expected true or false"),
        ("update = 'everything'", "update is 'everything'; valid: new, improved, all"),
        ("device = 'gpu'", "gpu: no such device; did you mean 'cuda'?"),
        ("units = 'metric'", "units is 'metric'"),
        ("explain = 'on_failure'", "explain is 'on_failure'; did you mean 'on-failure'?"),
        ("artifacts = ''", "artifacts is empty, expected a folder"),
        (
            "[tool.gpumem.tolerance]\npeak_alocated = '1 %'",
            "unknown metric 'peak_alocated'; did you mean 'peak_allocated'?",
        ),
        ("[tool.gpumem.tolerance]\npeak_allocated = 1", "tolerance.peak_allocated: 1 is not a percentage"),
        ("[[tool.gpumem.budget]]\nmax_gb = 1", "budget 1 needs tests"),
        ("[[tool.gpumem.budget]]\ntests = 'x'", "sets no limit"),
        ("[[tool.gpumem.budget]]\ntests = 'x'\nmax_gb = -1", "max_gb: -1 is negative"),
    ],
)
@pytest.mark.parametrize("workers", [[], ["-n1"]])
def test_wrong_settings_name_the_file_and_the_key(project, table, said, workers):
    project.settings(f"[tool.gpumem]\n{table}\n")
    project.write(RIGHT)
    message = usage_error(project.run(*workers, device=None, separate=bool(workers)))
    assert said in message
    assert "pyproject.toml: [tool.gpumem]" in message or "device" in table


BROKEN = {
    "truncated in a table": (
        lambda text: text[: text.index("peak_allocated")],
        "which [environments] does not have",
    ),
    "truncated in a number": (lambda text: text[: text.index("peak_allocated") + 20], "truncated"),
    "truncated in a word": (lambda text: text[: text.index("peak_allocated") + 5], "not TOML"),
    "an unknown format": (lambda text: text.replace("format = 1", "format = 99"), "format is 99"),
    "a wrong type": (
        lambda text: text.replace("peak_allocated = 4000004", "peak_allocated = 'many'"),
        "tests.test_it.call.peak_allocated is 'many', expected int",
    ),
    "a wrong key": (
        lambda text: text.replace("peak_allocated", "peak_alocated"),
        "tests.test_it.call.peak_alocated: unknown key; did you mean 'peak_allocated'?",
    ),
    "a category that there is not": (
        lambda text: text.replace('"temporary |', '"temporal |'),
        "'temporal' is no category; did you mean 'temporary'?",
    ),
    "a row that is cut short": (
        lambda text: text.replace(" | 4000000", ""),
        "has 6 parts, expected 7: category | module | operator | line | library's line | count x dtype[shape] | bytes",
    ),
    "rows that hold more than the peak": (
        lambda text: text.replace("| 4000000", "| 9000000"),
        "tests.test_it.call.composition: its rows hold 9000004 bytes, more than peak_allocated (4000004)",
    ),
    "a composition that is no array": (
        lambda text: re.sub(r"composition = \[.*?\n\]", "composition = 'all of it'", text, flags=re.DOTALL),
        "tests.test_it.call.composition is 'all of it', expected an array of strings",
    ),
    "merge-conflict marks": (
        lambda text: text.replace("peak_allocated", "<<<<<<< HEAD\npeak_allocated"),
        "is a merge-conflict mark; keep one side of the conflict",
    ),
}


@pytest.mark.parametrize("option", ["--gpumem-baseline", "--gpumem-update=all"])
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_store_file_is_named_and_left_as_it_was(project, case, option):
    spoil, said = BROKEN[case]
    project.write(RIGHT)
    project.run("--gpumem-update=new")
    (path,) = project.store.rglob("*.toml")
    path.write_text(spoil(path.read_text()))
    spoiled = path.read_text()
    message = usage_error(project.run(option))
    assert str(path) in message
    assert said in message
    assert path.read_text() == spoiled


def test_a_broken_store_is_a_usage_error_under_workers_too(project):
    project.write(RIGHT)
    project.run("--gpumem-update=new")
    (path,) = project.store.rglob("*.toml")
    path.write_text("format = 99\n")
    assert "format is 99" in usage_error(project.run("--gpumem-baseline", "-n2", separate=True))


def test_an_unknown_word_for_update_is_refused_by_the_command_line(project):
    project.write(RIGHT)
    result = project.run("--gpumem-update=some")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--gpumem-update*'some'*new*improved*all*"])


def test_an_unknown_word_for_explain_is_refused_by_the_command_line(project):
    project.write(RIGHT)
    result = project.run("--gpumem-explain=sometimes")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--gpumem-explain*'sometimes'*on-failure*always*never*"])


def test_an_artifacts_folder_without_a_name_is_refused(project):
    project.write(RIGHT)
    assert "artifacts" in usage_error(project.run("--gpumem-artifacts="))


def test_the_baseline_flag_takes_no_value(project):
    project.write(RIGHT)
    project.run("--gpumem-update=new")
    result = project.run("--gpumem-baseline", "test_it.py")
    result.assert_outcomes(passed=1)


def test_a_store_url_of_an_unknown_kind_is_refused(project):
    project.write(RIGHT)
    assert "nonsense://here" in usage_error(project.run("--gpumem-baseline", "--gpumem-store=nonsense://here"))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            "gpumem.train_step(torch.nn.Linear(4, 4), torch.ones(2, 4))",
            "there is no scalar loss: the model returned float32?2, 4?",
        ),
        ("gpumem.train_step(42, torch.ones(2, 4))", "expected a torch.nn.Module or a function that builds one, got 42"),
        ("gpumem.train_step(lambda: 42, torch.ones(2, 4))", "returned int, not a torch.nn.Module"),
        ("gpumem.train_step(torch.nn.Flatten(), torch.ones(2, 4))", "no parameter that requires a gradient*infer_step"),
        (
            "gpumem.infer_step(torch.nn.Linear(4, 4, device='meta'), torch.ones(2, 4))",
            "the model is on meta*gpumem.device",
        ),
        ("[gpumem.measure(lambda: 0, name='a') for _ in '12']", "already has a measurement called 'a'"),
        ("gpumem.measure(lambda: torch.ones(9)).peak_reserved", "has no peak_reserved; it has peak_allocated*"),
    ],
)
def test_a_step_that_cannot_be_made_is_explained(project, call, said):
    project.write(f"def test_it(gpumem):\n    {call}\n")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E *{said}*"])
