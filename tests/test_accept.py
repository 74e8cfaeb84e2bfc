"""``gpumem accept``: the store gets from a report what the session itself would have written, and nothing else."""

from __future__ import annotations

import shutil

import pytest
from click.testing import CliRunner

from pytest_gpumem.baselines.format import parse
from pytest_gpumem.cli.main import main
from tests.test_time_gate import timed  # noqa: F401 - a fixture

BEFORE = """
class Loss(torch.nn.Module):
    def forward(self, hidden):
        return hidden.float().pow(2).mean()


def model(width=64, deep=2):
    layers = [torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.GELU()) for _ in range(deep)]
    return torch.nn.Sequential(*layers, Loss())


@pytest.mark.gpumem
def test_call():
    torch.ones(1_000_000)


@pytest.mark.gpumem
def test_alike():
    torch.ones(500_000)


def test_train(gpumem):
    gpumem.train_step(model(), torch.ones(8, 64))


def test_infer(gpumem):
    gpumem.infer_step(model(), torch.ones(8, 64))


def test_several(gpumem):
    gpumem.measure(lambda: torch.ones(100_000), name="first")
    gpumem.measure(lambda: torch.ones(200_000), name="second")


def test_region(gpumem):
    with gpumem.track("region"):
        torch.ones(400_000)


def test_load(gpumem):
    gpumem.load(lambda: model(256))


KEPT = []


def test_growth(gpumem):
    gpumem.measure(lambda: KEPT.append(torch.ones(1_000)))


def test_loop(gpumem):
    work = model()
    optimizer = torch.optim.SGD(work.parameters(), lr=0.1)
    with gpumem.loop(steps=6):
        for _ in range(200):
            work(torch.ones(8, 64)).backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.gpumem_configs(precision=["fp32", "amp-bf16"])
def test_matrix(gpumem, gpumem_config):
    gpumem.train_step(model(), torch.ones(8, 64), config=gpumem_config)
"""
AFTER = (
    BEFORE.replace("range(deep)", "range(deep + 2)")
    .replace("torch.ones(1_000_000)", "torch.ones(2_000_000) + torch.ones(2_000_000)")
    .replace("torch.ones(1_000)", "torch.ones(300_000)")
    .replace("torch.ones(200_000), name='second'", "torch.ones(200_000), name='third'")
    .replace('name="second"', 'name="third"')
    .replace("torch.ones(400_000)", "torch.ones(100_000)")
    + """

def test_new(gpumem):
    gpumem.train_step(model(), torch.ones(16, 64))


@pytest.mark.gpumem
def test_new_call():
    torch.ones(3_000_000)
"""
)


@pytest.fixture(autouse=True)
def _here(project, monkeypatch):
    monkeypatch.chdir(project.path)


def accept(*arguments, code=0, given=None):
    result = CliRunner().invoke(main, ["accept", *map(str, arguments)], input=given)
    assert result.exit_code == code, result.output
    return result.output


def gated(project, *options, report="report.json", **how):
    return project.run("--gpumem-baseline", f"--gpumem-report={report}", *options, **how)


def both_ways(project, *options, reason=(), **how):
    """The store after the report of a gate was accepted, and after the session that accepts at once."""
    store, before = project.path / "gpumem-baselines", project.path / "before"
    if store.exists():
        shutil.copytree(store, before)
    gated(project, *options, **how)
    accept("report.json", *(f"--reason={one}" for one in reason))
    accepted = texts(store)
    shutil.rmtree(store)
    if before.exists():
        shutil.copytree(before, store)
    project.run("--gpumem-update=all", *options, *(f"--gpumem-reason={one}" for one in reason), **how)
    return accepted, texts(store)


def texts(store):
    return {path.relative_to(store).as_posix(): path.read_text("utf-8") for path in sorted(store.rglob("*.toml"))}


# The same bytes


@pytest.mark.parametrize("options", [(), ("--gpumem-strict",)], ids=["alone", "strict"])
def test_the_store_is_the_one_that_accepting_at_once_gives(project, options):
    project.write(BEFORE)
    project.run("--gpumem-update=new").assert_outcomes(passed=11)
    project.write(AFTER)
    accepted, at_once = both_ways(project, *options)
    assert accepted == at_once
    (text,) = accepted.values()
    entries = parse(text, "test_it.py")
    assert {key.name for key in entries if key.test == "test_several"} == {"first", "third"}
    # A region runs once, and so is never explained.
    assert [key.name for key, entry in entries.items() if entry.composition is None] == ["region"]
    assert len(entries) == 14


def test_workers_reports_give_the_same_store(project):
    project.write(BEFORE)
    few = ("-n2", "-k", "call or train")
    project.run("--gpumem-update=new", "-k", "call or train")
    project.write(AFTER)
    accepted, at_once = both_ways(project, *few, separate=True)
    assert accepted == at_once
    assert "test_new_call" in accepted[next(iter(accepted))]


def test_a_store_that_is_not_there_yet_is_begun(project):
    project.write(BEFORE)
    accepted, at_once = both_ways(project, "-k", "call or train", reason=["why"])
    assert accepted == at_once != {}


@pytest.mark.parametrize("seconds", [0.010, 0.012, 0.008], ids=["alike", "slower", "faster"])
@pytest.mark.parametrize("recorded", [True, False])
def test_times_are_accepted_as_the_session_would_have(timed, project, seconds, recorded):
    timed.record() if recorded else timed.write()
    timed.script(seconds)
    accepted, at_once = both_ways(timed)
    assert accepted == at_once
    assert "step_times" in accepted["scripted/test_it.py.toml"]
    before = project.stored()
    accept("report.json")
    assert project.stored() == before
