"""How ranks are found in the environment, and which mistakes in it are told."""

from __future__ import annotations

import pytest

from pytest_gpumem.base.errors import LaunchError
from pytest_gpumem.facts.values.rank import Rank, in_words, name_on, rank_in, without_rank
from pytest_gpumem.measuring.ranks.launch import launch_of

TORCHRUN = {
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "RANK": "5",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "1",
}


MEASURES = "import torch\n\ndef test_it(gpumem):\n    gpumem.measure(lambda: torch.ones(1000))\n"
MEASURES_NOTHING = "def test_it():\n    pass\n"


@pytest.fixture
def run(project, monkeypatch):
    """Run a session of one test in an environment; it is wrong usage for a reason that is ``said``."""

    def started(test, environ, *arguments, said=None, **more):
        (project.path / "test_it.py").write_text(test, encoding="utf-8")
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        result = project.run(*arguments, **more)
        if said is not None:
            assert result.ret == pytest.ExitCode.USAGE_ERROR
            result.stderr.fnmatch_lines([f"ERROR: {said}"])
        return result

    return started


def test_the_variables_of_torchrun_make_a_rank():
    launch = launch_of(TORCHRUN)
    assert launch is not None
    assert (str(launch.rank), launch.local_rank, launch.port) == ("rank 5 of 8", 1, 29500)
    assert (launch.agent_store, launch.attempt) == (True, "job/1")
    assert launch.command == ("torchrun", "--nnodes=2", "--nproc-per-node=4", "-m", "pytest")


def test_machines_of_different_numbers_of_ranks_are_named_by_all_of_them():
    launch = launch_of({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"})
    assert launch is not None
    assert launch.command == ("torchrun", "--nproc-per-node=8", "-m", "pytest")


@pytest.mark.parametrize("environ", [{"WORLD_SIZE": ""}, {**TORCHRUN, "WORLD_SIZE": "1"}, {"RANK": "0"}])
def test_one_process_is_no_rank(environ):
    assert launch_of(environ) is None


def test_of_another_launcher_rank_0_serves_the_store():
    launch = launch_of(
        {name: TORCHRUN[name] for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    )
    assert launch is not None
    assert not launch.agent_store
    assert launch.command == ("torchrun", "--nproc-per-node=8", "-m", "pytest")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": ""}, "WORLD_SIZE is 8, and RANK is not set: launch the ranks with `torchrun --nproc-per-node=8"),
        ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"RANK": "8"}, "RANK is '8', expected a whole number from 0 to 7, as torchrun sets it"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK is 'one', expected a whole number from 0 to 7"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE is 'many', expected a whole number from 1"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000', expected a whole number from 1 to 65535"),
    ],
)
def test_a_mistake_in_the_environment_is_told(changes, said):
    with pytest.raises(LaunchError) as error:
        launch_of({**TORCHRUN, **changes})
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("launched", "arguments"),
    [({"WORLD_SIZE": "2"}, ["-n", "1"]), ({**TORCHRUN, "MASTER_PORT": "9"}, [])],
    ids=["xdist", "alone"],
)
def test_a_session_that_measures_nothing_is_no_rank(project, run, launched, arguments):
    project.settings('[tool.gpumem]\nrank_timeout = "1 s"\n')
    result = run(MEASURES_NOTHING, launched, *arguments)
    assert result.ret == pytest.ExitCode.OK
    result.assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("test", "gate"), [(MEASURES, []), (MEASURES_NOTHING, ["--gpumem-baseline"])], ids=["measured", "typed"]
)
@pytest.mark.parametrize(
    ("launched", "arguments", "said"),
    [
        (
            {"WORLD_SIZE": "2"},
            [],
            "WORLD_SIZE is 2, and RANK and LOCAL_RANK and MASTER_ADDR and MASTER_PORT are not set*",
        ),
        (TORCHRUN, ["-n", "1"], "this is rank 5 of 8, started by torchrun, and pytest-xdist*leave -n out*"),
        (
            {**TORCHRUN, "MASTER_PORT": "9"},
            ["--gpumem-rank-timeout=1"],
            "rank 5 of 8 found no store at 127.0.0.1:9 (MASTER_ADDR, MASTER_PORT) within 1 s*",
        ),
    ],
    ids=["launch", "xdist", "store"],
)
def test_a_measured_test_and_a_gate_that_is_typed_need_their_ranks(run, test, gate, launched, arguments, said):
    run(test, launched, *gate, *arguments, said=said)


def test_packing_is_refused_within_a_rank(run):
    said = (
        "--gpumem-pack shares GPUs among the workers of pytest-xdist, and torchrun gives each rank a GPU of its own; *"
    )
    run(MEASURES, TORCHRUN, "--gpumem-pack", said=said, device="cuda")


@pytest.mark.parametrize("text", ["0", "soon"])
def test_a_timeout_is_a_duration_above_zero(run, text):
    said = f"--gpumem-rank-timeout is '{text}', expected a duration above zero: '300 s' or '10 min'"
    run(MEASURES_NOTHING, {}, f"--gpumem-rank-timeout={text}", said=said)


def test_names_tell_ranks_and_sizes_of_jobs_apart():
    name = name_on(Rank(3, 4), "train_step")
    assert name == "train_step rank 3 of 4"
    assert (rank_in(name), without_rank(name)) == (Rank(3, 4), "train_step")
    assert (rank_in("train_step"), without_rank("train_step")) == (None, "train_step")
    assert rank_in(name_on(Rank(0, 2), "a\nb")) == Rank(0, 2)


@pytest.mark.parametrize(
    ("numbers", "words"),
    [([3], "rank 3"), ([2, 0], "ranks 0 and 2"), ([0, 1, 2, 5], "ranks 0 to 2 and 5")],
)
def test_ranks_in_words(numbers, words):
    assert in_words(numbers) == words
