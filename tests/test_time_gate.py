"""The gate of time from end to end, on a device whose clock tells a script's seconds for each step that is run."""

from __future__ import annotations

import json
from typing import ClassVar
from xml.etree import ElementTree

import pytest

from pytest_gpumem.facts.values.times import FEWEST_ROUNDS
from pytest_gpumem.judging.times.comparison import MOST_RUNS
from pytest_gpumem.measuring.timing.sampling import DEFAULT_SECONDS, SECONDS_A_ROUND

CLOCK = """
steps = 0


def step():
    global steps
    steps += 1
    return torch.ones(1000)
"""
DEVICE = """
import contextlib
import json
import pathlib

import clock
from pytest_gpumem.facts.values.interference import Conditions
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.facts.measurement import Environment

HERE = pathlib.Path(__file__).parent


class Scripted(CpuDevice):
    '''Steps take the script's seconds, a figure for each sample that is taken, of which the last holds from then on.'''

    name = "scripted"

    def __init__(self):
        super().__init__()
        self.script = json.loads((HERE / "script.json").read_text())
        self.now, self.samples, self.retried, self.rounds = 0.0, 0, 0, 0

    def environment(self):
        return Environment("scripted", "Scripted 1", {"torch": "2", "machine": self.script["machine"]})

    @contextlib.contextmanager
    def exclusive(self):
        self.samples += 1
        self.log("sample")
        yield None

    def time(self, run):
        before = clock.steps
        run()
        seconds = self.script["seconds"]
        took = (clock.steps - before) * seconds[min(self.samples, len(seconds)) - 1]
        self.rounds += 1
        took *= 1 + self.script["jitter"] * (self.rounds % 2)
        self.now += took
        self.retried += self.script["retries"]
        self.log(took)
        return took

    def conditions(self):
        share = self.now if self.samples in self.script["busy_samples"] or not self.script["busy_samples"] else 0.0
        load = {name: value * share for name, value in self.script["load"].items()}
        return Conditions(self.now, retries=self.retried, cores=2, tick=self.script["tick"], **load)

    def pace(self):
        return self.script["pace"]

    seconds_between_readings = 0.0

    def log(self, what):
        with (HERE / "log.txt").open("a") as file:
            file.write(f"{what}\\n")


def pytest_gpumem_devices(config):
    return {"scripted": Scripted}
"""
STEP = "from clock import step\n\n\n"
SIMPLE = "def test_it(gpumem):\n    gpumem.measure(step)\n"


class Timed:
    """A project whose steps take 10 ms unless `script` says otherwise."""

    _recorded: ClassVar[dict[str, str]] = {}

    def __init__(self, project) -> None:
        self._project = project
        project.write(CLOCK, "clock.py")
        project.write(DEVICE, "conftest.py")
        self.path = project.path
        self.script()

    def script(
        self,
        *seconds: float,
        pace: float = 1e9,
        retries: int = 0,
        machine="Xeon",
        jitter: float = 0.0,
        busy_samples=(),
        tick=0.01,
        **load: float,
    ) -> None:
        """``seconds`` of a step in each sample; ``retries`` of the allocator in each round.

        ``load`` has shares of the time: ``waited`` for the thread, and ``other_cpu_seconds`` for other processes. They hold in
        all samples, or only in the named samples.
        """
        said = {"seconds": seconds or (0.010,), "pace": pace, "retries": retries, "machine": machine, "jitter": jitter}
        said |= {"busy_samples": busy_samples, "load": load, "tick": tick}
        (self.path / "script.json").write_text(json.dumps(said))

    def write(self, source: str = SIMPLE) -> None:
        self._project.write(STEP + source)

    def gpumem(self, *args: str) -> str:
        """Run the command, and return what it printed."""
        return self._project.gpumem(*args).stdout

    def settings(self, text: str) -> None:
        self._project.settings(text)

    def run(self, *args: str, timed: bool = True, separate: bool = False) -> pytest.RunResult:
        (self.path / "log.txt").unlink(missing_ok=True)
        return self._project.run(*args, "--junitxml=report.xml", device="scripted", timed=timed, separate=separate)

    def record(self, source: str = SIMPLE, runs: int = MOST_RUNS) -> None:
        """Record baselines, and let their one run have been accepted so often: few tell only large slowdowns.

        Those of a source are the same each time: they are recorded once, and written from then on.
        """
        self.write(source)
        store = self.path / "gpumem-baselines" / "scripted" / "test_it.py.toml"
        if source not in self._recorded:
            assert self.run("--gpumem-update=new").ret == 0
            self._recorded[source] = store.read_text()
        store.parent.mkdir(parents=True, exist_ok=True)
        text = self._recorded[source]
        for line in ("    0.01,\n", "    10000000.0,\n"):
            text = text.replace(line, line * runs)
        store.write_text(text)

    @property
    def log(self) -> list[str]:
        log = self.path / "log.txt"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def samples(self) -> int:
        """How many samples the last run took."""
        return self.log.count("sample")

    @property
    def seconds(self) -> float:
        """The script's seconds that the last run spent on timing."""
        return sum(float(line) for line in self.log if line != "sample")

    def verdict_on(self, metric: str, test: str = "test_it") -> dict | None:
        (verdict,) = self._project.verdicts()[test]["verdicts"]
        return next((one for one in verdict["metrics"] if one["metric"] == metric), None)

    def stored(self) -> str:
        (text,) = self._project.stored().values()
        return text


@pytest.fixture
def timed(project, monkeypatch) -> Timed:
    monkeypatch.setattr("pytest_gpumem.measuring.measure.timed_steps.SECONDS_BETWEEN_SAMPLES", 0.0)
    return Timed(project)


# Against the baseline


def test_a_time_that_was_recorded_is_compared_with_one_sample(timed):
    timed.record(runs=1)
    assert "step_times = [\n    0.01,\n]\nstep_cycles = [\n    10000000.0,\n]" in timed.stored()
    result = timed.run("--gpumem-baseline")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gpumem: 1 gated"])
    assert timed.verdict_on("step_time")["outcome"] == "ok"
    assert timed.samples == 1


def test_a_slowdown_that_a_second_sample_confirms_fails_the_test(timed):
    timed.record()
    timed.script(0.012)
    result = timed.run("--gpumem-baseline")
    result.assert_outcomes(failed=1)
    headline = "Time regressed: step time 12.00 ms, baseline 10.00 ms: +20.0 % (?? % between +1?.? % and +2?.? %), allowed +2.5 %"
    result.stdout.fnmatch_lines(
        [
            headline,
            "  step time *10.00 ms *12.00 ms *+20.0 % *+2.5 % *regressed",
            "  accept:   pytest test_it.py::test_it --gpumem-update=all --gpumem-device=scripted",
            "gpumem: 1 gated, 1 regressed",
        ]
    )
    assert timed.samples == 2
    (failure,) = ElementTree.parse(timed.path / "report.xml").iter("failure")
    assert failure.get("message").startswith("Time regressed: step time 12.00 ms, baseline 10.00 ms: +20.0 % (")


def test_a_slowdown_that_a_second_sample_does_not_show_passes(timed):
    timed.record()
    timed.script(0.012, 0.010)
    assert timed.run("--gpumem-baseline").ret == 0
    assert timed.samples == 2
    verdict = timed.verdict_on("step_time")
    assert (verdict["outcome"], verdict["value"]) == ("ok", 0.010)


def test_a_slowdown_in_samples_that_stay_disturbed_is_uncertain_and_says_by_what(timed):
    timed.record()
    timed.script(0.012, retries=1)
    result = timed.run("--gpumem-baseline")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "test_it.py::test_it *12.00 ms *uncertain",
            "uncertain: the allocator retried once",
            "gpumem: 1 gated, 1 uncertain",
        ]
    )
    assert timed.samples == 2
    timed.run("--gpumem-baseline", "--gpumem-strict").assert_outcomes(failed=1)


BUSY = {"other_cpu_seconds": 0.9, "waited": 0.05}
"""A neighbour on the other core."""
CROWDED = {"other_cpu_seconds": 1.5, "waited": 0.5}
"""Two neighbours, with which the step shares its core."""


@pytest.mark.parametrize(
    ("cause", "factor", "fails", "told"),
    [
        ({"pace": 0.87e9}, 1.4, True, "slower than in the baseline"),
        ({"pace": 0.87e9}, 1.25, False, "the machine runs * slower than in the baseline"),
        (BUSY, 1.4, True, "the thread waited * of the time for a core"),
        (CROWDED, 2.6, False, "the thread waited * of the time for a core"),
    ],
    ids=["beyond a slower clock", "within a slower clock", "beyond a neighbour", "within a shared core"],
)
def test_a_slower_clock_and_load_explain_a_slowdown_only_as_far_as_they_can(timed, cause, factor, fails, told):
    timed.record()
    timed.script(0.010 * factor, **cause)
    result = timed.run("--gpumem-baseline")
    assert result.ret == (1 if fails else 0)
    if fails:
        result.stdout.fnmatch_lines(["Time regressed: *", f"*{told}*, which cannot explain the slowdown*"])
    else:
        result.stdout.fnmatch_lines([f"uncertain: {told}*", "gpumem: 1 gated, 1 uncertain"])


ASKING = {"off_core": 0.9, "children_cpu_seconds": 0.3}
"""A thread that asks a server, and sleeps until it answers."""


@pytest.mark.parametrize(
    ("load", "fails", "told"),
    [
        ({"other_cpu_seconds": 0.0, "waited": 0.0}, True, "Time regressed: *"),
        (
            {"other_cpu_seconds": 0.2, "waited": 0.0},
            True,
            "*other processes may have waited 20 % *, which cannot explain the slowdown*",
        ),
        (
            {"other_cpu_seconds": 1.58, "waited": 0.07},
            False,
            "uncertain: the thread waited 7 % of the time for a core, the step's other processes may have waited 83 % *",
        ),
    ],
    ids=["idle machine", "little load", "crowded machine"],
)
def test_a_server_that_answers_later_is_slower_as_far_as_load_cannot_explain_it(timed, load, fails, told):
    timed.record()
    timed.script(0.030, tick=1e-4, **ASKING, **load)
    result = timed.run("--gpumem-baseline")
    assert result.ret == (1 if fails else 0)
    result.stdout.fnmatch_lines([told])


def test_where_a_second_sample_cannot_tell_a_third_one_does(timed):
    timed.record()
    timed.script(0.012, busy_samples=[2], **BUSY)
    result = timed.run("--gpumem-baseline")
    result.assert_outcomes(failed=1)
    assert timed.samples == 3
    timed.script(0.012, 0.012, 0.010, busy_samples=[2], **BUSY)
    assert timed.run("--gpumem-baseline").ret == 0
    assert timed.samples == 3


@pytest.mark.parametrize(
    ("marker", "settings"),
    [
        pytest.param('@pytest.mark.gpumem(max_slowdown="30 %")\n', "", marks=pytest.mark.thorough),
        ("", '[[tool.gpumem.budget]]\ntests = "test_it.py"\nmax_slowdown = "30 %"\n'),
        ("", '[tool.gpumem.tolerance]\nstep_time = "30 %"\n'),
        # The closest one is what counts.
        ('@pytest.mark.gpumem(max_slowdown="30 %")\n', '[tool.gpumem.tolerance]\nstep_time = "1 %"\n'),
    ],
    ids=["marker", "pattern", "tolerance", "marker over tolerance"],
)
def test_a_slowdown_within_the_limit_that_was_set_is_ok(timed, marker, settings):
    timed.settings(settings)
    timed.record(marker + SIMPLE)
    timed.script(0.012)
    assert timed.run("--gpumem-baseline").ret == 0
    verdict = timed.verdict_on("step_time")
    assert (verdict["outcome"], verdict["allowed"]) == ("ok", pytest.approx(0.003))
    assert timed.samples == 1


def test_a_slowdown_that_is_accepted_is_the_baseline_of_the_next_run(timed):
    timed.record()
    timed.script(0.012)
    timed.run("--gpumem-baseline", "--gpumem-update=all").assert_outcomes(passed=1)
    assert "step_times = [\n    0.012,\n]" in timed.stored()
    timed.run("--gpumem-baseline").assert_outcomes(passed=1)
    assert timed.verdict_on("step_time")["outcome"] == "ok"


@pytest.mark.parametrize(
    ("seconds", "latest"), [((0.012, 0.010), 0.010), ((0.008, 0.010), 0.008)], ids=["slower", "faster"]
)
def test_a_speed_that_a_second_sample_does_not_show_does_not_begin_anew(timed, seconds, latest):
    timed.record()
    timed.script(*seconds)
    timed.run("--gpumem-update=all").assert_outcomes(passed=1)
    assert timed.samples == 2
    runs = "    0.01,\n" * (MOST_RUNS - 1) + f"    {latest},\n"
    assert f"step_times = [\n{runs}]" in timed.stored()
    assert "step_time = 0.01\n" in timed.stored()


def test_on_another_machine_time_is_recorded_and_memory_gated(timed):
    timed.record()
    timed.script(0.050, machine="EPYC")
    for strict in ((), ("--gpumem-strict",)):
        result = timed.run("--gpumem-baseline", *strict)
        assert result.ret == 0
        reason = "time is not compared: the baseline's time comes from Xeon, and this machine is EPYC"
        result.stdout.fnmatch_lines([f"recorded: {reason}", "gpumem: 1 gated"])
        verdict = timed.verdict_on("step_time")
        assert (verdict["outcome"], verdict["reason"]) == ("recorded", reason)


def test_a_gate_takes_no_time_until_the_baseline_has_one(timed):
    timed.write()
    assert timed.run("--gpumem-update=new", timed=False).ret == 0
    result = timed.run("--gpumem-baseline")
    result.stdout.fnmatch_lines(["*it was not timed: its baseline has no time to compare with; *", "gpumem: 1 gated"])
    assert (result.ret, timed.samples) == (0, 0)
    assert timed.run("--gpumem-update=new").ret == 0
    assert timed.run("--gpumem-baseline").ret == 0
    assert timed.samples == 1


ONLY_SHOWN = "no baseline of time yet: the stored time is only shown, because its run was disturbed; --gpumem-update=new adds a valid time"


@pytest.mark.parametrize("quiet", [(), ("-q",)], ids=["by default", "quiet"])
def test_a_step_that_could_only_be_timed_disturbed_is_recorded_without_times(timed, quiet):
    timed.write()
    for mode in ("new", "all"):
        timed.script(**CROWDED)
        result = timed.run(f"--gpumem-update={mode}", *quiet)
        assert result.ret == 0
        why = "the thread waited 50 % of the time for a core"
        told = (
            f"gpumem: of 1 timed step, 1 time will not be compared with: {why}"
            if quiet
            else f"*; 1 time will not be compared with: {why}"
        )
        result.stdout.fnmatch_lines([told])
        assert timed.samples == 2
        assert "step_times" not in timed.stored()
    timed.script()
    result = timed.run("--gpumem-baseline", "--gpumem-time", *quiet)
    assert result.ret == 0
    said = result.stdout.str()
    assert said.count(ONLY_SHOWN) == (0 if quiet else 1)
    assert " ms (not compared)" in timed.gpumem("show")
    result.stdout.fnmatch_lines(["gpumem: 1 gated, 1 with no baseline of time yet"])


def test_a_run_with_a_neighbour_that_can_explain_little_is_stored_and_compared(timed):
    timed.write()
    timed.script(0.010, **BUSY)
    result = timed.run("--gpumem-update=new")
    assert "not stored" not in result.stdout.str()
    # Without the time that the thread waited.
    assert "step_times = [\n    0.0095,\n]" in timed.stored()
    timed.script(0.020)
    timed.run("--gpumem-baseline").assert_outcomes(failed=1)


def test_times_that_a_baseline_lacks_fail_a_strict_gate_until_they_are_added(timed):
    timed.script(retries=1)
    timed.write('@pytest.mark.gpumem(max_slowdown="5 %")\n' + SIMPLE)
    timed.run("--gpumem-update=new")
    timed.script()
    result = timed.run("--gpumem-baseline", "--gpumem-strict")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"Not compared (required by --gpumem-strict): new, step time: {ONLY_SHOWN}",
            "  accept:   pytest test_it.py::test_it --gpumem-update=new *",
            "test_it.py::test_it *new",
            "gpumem: 1 gated, 1 new (also gated)",
        ]
    )
    assert timed.run("--gpumem-baseline", "--gpumem-strict", timed=False).ret == 0
    result = timed.run("--gpumem-update=new", "--gpumem-strict")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["gpumem store: 1 baseline written (new), 0 left as they were"])
    assert timed.run("--gpumem-baseline", "--gpumem-strict").ret == 0
    assert timed.verdict_on("step_time")["outcome"] == "ok"


# Throughput


THROUGHPUT = """
def measured(gpumem):
    gpumem.infer_step(Model(), torch.zeros(4, 8, dtype=torch.int64))


class Model(torch.nn.Module):
    def forward(self, ids):
        return step()


@pytest.mark.gpumem(min_throughput="{samples} samples/s")
def test_samples(gpumem):
    measured(gpumem)


@pytest.mark.gpumem(min_throughput="{tokens} tokens/s")
def test_tokens(gpumem):
    measured(gpumem)


@pytest.mark.gpumem(min_throughput="{steps} steps/s")
def test_steps(gpumem):
    gpumem.measure(step)
"""


def test_a_budget_of_throughput_needs_no_baseline(timed):
    timed.write(THROUGHPUT.format(samples=400, tokens=3200, steps=100))
    timed.run().assert_outcomes(passed=3)
    assert timed.samples == 3
    timed.script(0.012)
    result = timed.run()
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        [
            "Throughput below budget: throughput 333 samples/s, budget 400 samples/s: -16.7 %",
            "Throughput below budget: throughput 2667 tokens/s, budget 3200 tokens/s: -16.7 %",
            "Throughput below budget: throughput 83.3 steps/s, budget 100 steps/s: -16.7 %",
            "gpumem: 3 gated, 3 over budget",
        ]
    )
    assert timed.samples == 6


def test_a_budget_of_throughput_that_a_call_cannot_hold_is_a_mistake(timed):
    timed.write('@pytest.mark.gpumem(min_throughput="8 steps/s")\ndef test_it():\n    step()\n')
    result = timed.run()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["*test_it.py::test_it: min_throughput limits the time of a step, and this test has no step: *"]
    )


def test_a_budget_of_throughput_that_holds_nothing_fails(timed):
    timed.write('@pytest.mark.gpumem(min_throughput="8 tokens/s")\n' + SIMPLE)
    result = timed.run()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["min_throughput='8 tokens/s' has no effect: the work of its steps is unknown; *"])


# A limit on slowdowns that has no effect


ONLY_TRACKED = """
class TestIt:
    def test_it(self, gpumem):
        with gpumem.track():
            step()
"""
LIMIT = '@pytest.mark.gpumem(max_slowdown="5 %")'


@pytest.mark.parametrize(
    "source",
    [
        ONLY_TRACKED.replace("    def", f"    {LIMIT}\n    def"),
        f"{LIMIT}\ndef test_it(gpumem):\n    gpumem.assert_no_growth(step)\n",
    ],
    ids=["track", "assert_no_growth"],
)
def test_a_limit_of_a_test_that_times_no_step_fails_where_baselines_are_compared(timed, source):
    timed.write(source)
    assert timed.run("--gpumem-update=new").ret == 0
    result = timed.run("--gpumem-baseline")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["max_slowdown='5 %' has no effect: no step of this test was timed; *"])
    assert timed.run("--gpumem-baseline", timed=False).parseoutcomes().get("failed") is None


def test_a_limit_of_a_class_is_for_those_of_its_tests_that_time_a_step(timed):
    timed.write(ONLY_TRACKED.replace("class", f"{LIMIT}\nclass"))
    timed.run("--gpumem-update=new")
    timed.run("--gpumem-baseline").assert_outcomes(passed=1)


# How much time it takes


def test_without_time_nothing_is_timed_and_nothing_of_it_judged(timed):
    timed.record(
        '@pytest.mark.gpumem(max_slowdown="1 %", min_throughput="8 tokens/s")\n'
        + SIMPLE.replace("step", "step, items=1")
    )
    assert timed.log
    timed.script(99.0)
    assert timed.run("--gpumem-baseline", timed=False).ret == 0
    assert timed.log == []
    assert timed.verdict_on("step_time") is timed.verdict_on("throughput") is None


MANY = "def test_it(gpumem):\n    for _ in range(6):\n        gpumem.measure(step)\n"


@pytest.mark.parametrize(
    ("settings", "most"),
    [("", DEFAULT_SECONDS), ('[tool.gpumem]\ntime_budget = "500 ms"\n', 0.5)],
    ids=["default", "set"],
)
def test_timing_adds_no_more_than_its_seconds_to_a_test_and_a_few_short_rounds(timed, settings, most):
    timed.settings(settings)
    timed.script(0.010, jitter=0.1)
    timed.write(MANY)
    assert timed.run().ret == 0
    assert timed.samples == 6
    assert 0.8 * most < timed.seconds < most + 6 * 1.1 * (0.010 + FEWEST_ROUNDS * SECONDS_A_ROUND)


def test_second_looks_that_decide_nothing_end_with_the_seconds_of_the_test(timed):
    timed.script(retries=1)
    timed.write(MANY)
    timed.run("--gpumem-update=new").assert_outcomes(passed=1)
    assert timed.samples == 6 + 1


def test_every_step_that_fails_its_test_has_a_second_look(timed):
    timed.record(MANY)
    timed.script(0.012, jitter=0.01)
    timed.run("--gpumem-baseline").assert_outcomes(failed=1)
    assert timed.samples == 6 + 6
