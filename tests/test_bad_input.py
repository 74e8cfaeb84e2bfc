"""Wrong input ends in a usage error of one or two lines that names the place and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pytest_gpumem.tools.main import main

RIGHT = "@pytest.mark.gpumem\ndef test_it():\n    torch.ones(1_000_000).sum()\n"


def usage_error(result: pytest.RunResult) -> str:
    """The message of a run that ended in a usage error of one or two lines."""
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    lines = [line for line in result.errlines if line.strip()]
    start = next(number for number, line in enumerate(lines) if line.startswith("ERROR: "))
    assert len(lines) - start <= 2
    assert not any("Traceback" in line for line in result.errlines + result.outlines)
    return " ".join(lines[start:])


@pytest.mark.parametrize(
    ("arguments", "said", "workers"),
    [
        ("max_bg=1", "unknown argument 'max_bg'; did you mean 'max_gb'?", []),
        ("max_bg=1", "unknown argument 'max_bg'; did you mean 'max_gb'?", ["-n1"]),
        ("6.5", "takes keyword arguments only, got 6.5; write max_gb=6.5", []),
        ("device='gpu'", "device 'gpu': no such device; did you mean 'cuda'?", []),
        (
            "device='l4'",
            "device 'l4': no such device; to emulate a GPU for the whole session, use --gpumem-device=emulated:l4",
            [],
        ),
        (
            "max_retained=None",
            "max_retained is None, which is not a limit; give a value, or leave the argument out",
            [],
        ),
    ],
)
def test_a_wrong_marker_names_the_test_and_what_would_be_right(project, workers, arguments, said):
    # Without torch, which every worker would load only to collect it.
    source = f"import pytest\n\n\n@pytest.mark.gpumem({arguments})\ndef test_it(): ...\n"
    (project.path / "test_it.py").write_text(source, encoding="utf-8")
    message = usage_error(project.run(*workers, separate=bool(workers)))
    assert "test_it.py::test_it: " in message
    assert said in message


def test_a_wrong_marker_is_told_also_when_its_test_is_deselected(project):
    project.write("@pytest.mark.gpumem(max_bg=1)\ndef test_it(): ...\n\n\ndef test_other(): ...\n")
    assert "max_bg" in usage_error(project.run("-k", "other"))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("stroe = 'x'", "unknown key 'stroe'; did you mean 'store'?"),
        ("device = 'gpu'", "device = 'gpu': no such device; did you mean 'cuda'?"),
        ("device = 'emulated'", "device = 'emulated': no such device; did you mean 'emulated:h100'?"),
        ("device = 'l4'", "device = 'l4': no such device; did you mean 'emulated:l4'?"),
        ("device = 'H100x8'", "device = 'H100x8': no such device; did you mean 'emulated:h100x8'?"),
        ("device = '24GB'", "device = '24GB': no such device; did you mean 'emulated:24gb'?"),
        (
            "device = 'lab'\n[tool.gpumem.gpus.lab]\nlike = 'l4'",
            "device = 'lab': no such device; did you mean 'emulated:lab'?",
        ),
        ("rank_timeout = '٣'", "rank_timeout is '٣', expected a duration above zero"),
    ],
)
def test_wrong_settings_name_the_file_and_the_key(project, table, said):
    project.settings(f"[tool.gpumem]\n{table}\n")
    project.write(RIGHT)
    message = usage_error(project.run(device=None))
    assert said in message
    assert "pyproject.toml: [tool.gpumem]" in message


def test_wrong_settings_are_told_once_under_workers(project):
    project.settings("[tool.gpumem]\nstroe = 'x'\n")
    project.write(RIGHT)
    message = usage_error(project.run("-n1", device=None, separate=True))
    assert "pyproject.toml: [tool.gpumem]: unknown key 'stroe'" in message


@pytest.mark.parametrize(
    ("option", "workers"),
    [("--gpumem-baseline", []), ("--gpumem-update=all", []), ("--gpumem-baseline", ["-n1"])],
    ids=["gate", "update", "workers"],
)
def test_a_broken_store_file_is_named_and_left_as_it_was(project, option, workers):
    project.write(RIGHT)
    project.run("--gpumem-update=new")
    (path,) = project.store.rglob("*.toml")
    spoiled = path.read_text().replace("format = 1", "format = 99")
    path.write_text(spoiled)
    message = usage_error(project.run(option, *workers, separate=bool(workers)))
    assert str(path) in message
    assert "format is 99" in message
    assert path.read_text() == spoiled


@pytest.mark.parametrize(
    ("option", "valid"), [("update", "*new*improved*all*"), ("explain", "*on-failure*always*never*")]
)
def test_an_unknown_word_of_an_option_is_refused_by_the_command_line(project, option, valid):
    project.write(RIGHT)
    result = project.run(f"--gpumem-{option}=some")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--gpumem-{option}*'some'{valid}"])


@pytest.mark.parametrize(
    "option", ["--gpumem-artifacts=afile", "--gpumem-artifacts=afile/within", "--gpumem-store=afile"]
)
def test_a_file_in_place_of_a_folder_is_refused(project, option):
    project.write(RIGHT)
    (project.path / "afile").write_text("", encoding="utf-8")
    assert f"{project.path / 'afile'} is a file, expected a folder" in usage_error(
        project.run("--gpumem-update=new", option)
    )


@pytest.mark.parametrize(
    "command", [["prune", "--nope"], ["prune", "nowhere.py"], ["run", "a.py", "--steps", "٩"], ["merge", "--nope"]]
)
def test_what_a_command_does_not_understand_is_wrong_usage(project, command):
    (project.path / "a.py").touch()
    result = project.gpumem(*command)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr


NAMES = ("::error file=test_it.py::broken out", "  ::warning::broken out", "a ##[error]broken out", "::group::x")


def test_the_name_of_a_measurement_is_no_command_of_a_log(project):
    source = "def test_it(gpumem):\n    import os\n    size = 9_000_000 if 'LARGE' in os.environ else 1_000_000\n"
    source += "".join(f"    gpumem.measure(lambda: torch.ones(size), name={name!r})\n" for name in NAMES)
    project.write(f"{source}    assert 'FAILS' not in os.environ\n")
    with pytest.MonkeyPatch.context() as patch:
        outputs = [project.run("--gpumem-update=new", "-v")]
        patch.setenv("LARGE", "1")
        outputs.append(project.run("--gpumem-baseline", "-vv", "--gpumem-explain=always"))
        patch.setenv("FAILS", "1")
        outputs.append(project.run("--gpumem-baseline"))
    outputs[1].assert_outcomes(failed=1)
    for one in outputs:
        begun = [line for line in one.outlines if line.lstrip().startswith(("::", "##", *NAMES))]
        assert begun == []
        assert not any("##[" in line for line in one.outlines if "name=" not in line)
    commands = [project.gpumem(*words).stdout for words in (["show"], ["show", "test_it.py::test_it"])]
    assert [line for text in commands for line in text.splitlines() if line.lstrip().startswith("::")] == []


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
        ("[gpumem.measure(lambda: 0, name='a') for _ in '12']", "already has a measurement called 'a'"),
        (
            "gpumem.measure(lambda: torch.ones(9), name=5)",
            "TypeError: name=5: the name of a measurement is a string*name='5'",
        ),
        ("gpumem.measure(lambda: torch.ones(9), name='')", "name='' is empty; without this argument"),
        ("gpumem.measure(lambda: torch.ones(9), name='a' * 5000)", "has 5000 characters; * has at most 200"),
        ("gpumem.measure(lambda: torch.ones(9), name='a\\ud800')", "its character 2 is a lone surrogate*"),
        ("gpumem.track(5).__enter__()", "TypeError: name=5: the name of a measurement is a string"),
        (
            "gpumem.loop().callback()",
            "gpumem.loop() returns a context manager. Write `with gpumem.loop() as training:`, and then `training.callback`*",
        ),
        (
            "[step for step in gpumem.loop()]",
            "TypeError: gpumem.loop() runs no steps itself: *`with gpumem.loop() as training:`*",
        ),
        (
            "for step in gpumem.loop().__enter__(): pass",
            "TypeError: gpumem.loop() runs no steps itself: *step_ended()*",
        ),
        (
            "gpumem.loop().__enter__().step()",
            "the loop of gpumem.loop() has no attribute 'step'; did you mean 'step_ended'?",
        ),
        (
            "for item in gpumem.track(): pass",
            "TypeError: gpumem.track() returns a context manager. Write `with gpumem.track() as region:`",
        ),
        (
            "gpumem.track('a').measurement",
            "gpumem.track() returns a context manager. Write `with gpumem.track() as region:`, and then `region.measurement`*",
        ),
        (
            "gpumem.train_step(torch.nn.Linear, torch.ones(9), config='shard=fsdp,world=99999999999')",
            "shard=fsdp: 99999999999 ranks are more than the maximum of 131072",
        ),
        (
            "gpumem.train_step(lambda: torch.nn.Linear(4, 4), torch.ones(9), config='shard=tp:999999')",
            "ranks are more than the maximum of 131072",
        ),
        (
            "gpumem.train_step(torch.nn.Linear, torch.ones(9), config='accumulate=٢')",
            "expected a whole number, 1 or more",
        ),
        ("gpumem.train_step(torch.nn.Linear, torch.ones(9), config='clip=٢')", "clip=*expected a number"),
        ("gpumem.measure(lambda: torch.ones(9)).peak_reserved", "has no peak_reserved; it has peak_allocated*"),
    ],
)
def test_a_step_that_cannot_be_made_is_explained(project, call, said):
    project.write(f"def test_it(gpumem):\n    {call}\n")
    result = project.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines([f"E *{said}*"])


@pytest.mark.parametrize(
    ("option", "workers"),
    [
        pytest.param("--gpumem-baseline", [], id="gate"),
        pytest.param("--gpumem-update=new", [], id="update"),
        pytest.param("--gpumem-baseline", ["-n1"], id="workers", marks=pytest.mark.thorough),
    ],
)
def test_a_test_file_outside_of_the_root_directory_is_named_with_what_mends_it(project, option, workers):
    project.write(RIGHT, "outside/test_it.py")
    project.write("", "root/conftest.py")
    words = ["outside/test_it.py", "--rootdir=root"]
    message = usage_error(project.run(*words, option, *workers, separate=bool(workers)))
    outside, root = project.path / "outside/test_it.py", project.path / "root"
    assert f"the test file {outside} is outside of the root directory {root}" in message
    assert f"add --rootdir={project.path}, and --gpumem-store=FOLDER" in message
    project.run(*words).assert_outcomes(passed=1)
    mended = project.run("outside/test_it.py", f"--rootdir={project.path}", "--gpumem-update=new")
    mended.assert_outcomes(passed=1)
    assert list(project.stored()) == ["cpu-x86_64/outside/test_it.py.toml"]


MEASURED = "@pytest.mark.gpumem\ndef test_it():\n    torch.ones(10)\n"


@pytest.mark.parametrize("file", ["pytest.ini", "tox.ini", "pyproject.toml"])
@pytest.mark.parametrize("source", [MEASURED, "def test_it(): ..."], ids=["measured", "not measured"])
def test_settings_above_the_root_directory_are_pointed_out(project, monkeypatch, file, source):
    project.settings("[tool.gpumem]\nbaseline = true\n")
    (project.path / ".git").mkdir()
    inner = project.path / "packages" / "inner"
    project.write(source, "packages/inner/test_it.py")
    (inner / file).write_text("[tool.pytest.ini_options]\n" if file == "pyproject.toml" else "[pytest]\n")
    monkeypatch.chdir(inner)
    told = (
        f"gpumem: [tool.gpumem] in {Path('..', '..', 'pyproject.toml')} has no effect: pytest's root directory is . "
        f"({file}); move the table into the pyproject.toml of that folder, or add --rootdir={Path('..', '..')}"
    )
    result, quiet = project.run(), project.run("-q")
    result.assert_outcomes(passed=1)
    is_measured = source == MEASURED
    assert result.outlines.count(told) == 1 + is_measured  # in the header, and at the end
    assert quiet.outlines.count(told) == is_measured


@pytest.mark.parametrize(
    "reason", ["a table of its own", "a repository of its own", "the root directory is named", "no repository"]
)
def test_settings_above_the_root_directory_of_another_project_are_left_alone(project, monkeypatch, reason):
    project.settings("[tool.gpumem]\ndevice = 'cpu'\n")
    if reason != "no repository":
        (project.path / ".git").mkdir()
    inner = project.path / "inner"
    project.write(MEASURED, "inner/test_it.py")
    (inner / "pytest.ini").write_text("[pytest]\n")
    if reason == "a table of its own":
        (inner / "pyproject.toml").write_text("[tool.gpumem]\ndevice = 'cpu'\n")
    if reason == "a repository of its own":
        (inner / ".git").mkdir()
    monkeypatch.chdir(inner)
    arguments = [f"--rootdir={project.path}"] if reason == "the root directory is named" else []
    result = project.run(*arguments)
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*has no effect*")


def test_settings_between_the_start_folder_and_the_root_directory_are_noted(project):
    project.settings("[tool.gpumem]\ndevice = 'cpu'\n")
    project.write(MEASURED, "inner/test_it.py")
    (project.path / "inner" / "pytest.ini").write_text("[pytest]\n")
    told = "gpumem: [tool.gpumem] in pyproject.toml has no effect: pytest's root directory is inner (pytest.ini); *=."
    project.run("inner").stdout.fnmatch_lines([told.replace("[", "[[]")])


MISTYPED = {
    "[tool.gpumen]": "did you mean [tool.gpumem]?",
    "[tool.gpu_mem]": "did you mean [tool.gpumem]?",
    "[tool.GPUMEM]": "did you mean [tool.gpumem]?",
    "[tool.pytest-gpumem]": "did you mean [tool.gpumem]?",
    "[tool.pytest.gpumem]": "did you mean [tool.gpumem]?",
    "[gpumem]": "did you mean [tool.gpumem]?",
    "[tools.gpumem]": "did you mean [tool.gpumem]?",
    "[tool.gpumm.budget]": "did you mean [tool.gpumem]?",
}


@pytest.mark.parametrize("header", MISTYPED)
def test_a_mistyped_table_is_pointed_out(project, header):
    project.settings(f"{header}\nbaseline = true\n")
    project.write(MEASURED)
    told = f"gpumem: {header} in pyproject.toml has no effect; {MISTYPED[header]}"
    result = project.run()
    result.assert_outcomes(passed=1)
    assert result.outlines.count(told) == 2  # in the header, and at the end
    done = CliRunner().invoke(main, ["show"])
    assert told in done.output
    assert project.run("-q").outlines.count(told) == 1


@pytest.mark.parametrize(
    "header",
    [
        "[tool.gpumem]",
        "[tool.gpumon]",
        "[tool.memray]",
        "[tool.hatch.envs.gpumem]",
        "[tool.mem]",
        "[project.urls]",
        "# [tool.gpumen]",
    ],
)
def test_a_table_of_another_tool_is_left_alone(project, header):
    project.settings(f"{header}\n")
    project.write(MEASURED)
    project.run().stdout.no_fnmatch_line("*has no effect*")


@pytest.mark.parametrize(
    ("file", "header"),
    [("pytest.ini", "[gpumem]"), ("tox.ini", "[tool:gpumem]"), ("setup.cfg", "[tool:pytest_gpumem]")],
)
def test_a_section_among_pytests_settings_is_pointed_out(project, file, header):
    section = "[tool:pytest]" if file == "setup.cfg" else "[pytest]"
    (project.path / file).write_text(f"{section}\n{header}\nbaseline = true\n", encoding="utf-8")
    project.write(MEASURED)
    told = f"gpumem: {header} in {file} has no effect; write [tool.gpumem] into pyproject.toml"
    assert told in project.run().outlines
