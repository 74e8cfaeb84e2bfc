"""Loading as a measurement: its peak, what the model holds, what is left beyond it, and the gate on all of these."""

from __future__ import annotations

import re

MODEL = """
SIZE = 4 * (512 * 512 + 512) * 4


def make():
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
"""
COPY = """
def load():
    model = make()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.load_state_dict(state)
    return model
"""
"""Keeps a second copy of all weights for a moment."""


def run(project, source: str, *args: str, **outcomes: int):
    project.write(MODEL + source)
    result = project.run("-p", "no:randomly", *args)
    result.assert_outcomes(**outcomes)
    return result


def test_what_is_loaded_is_given_and_can_be_used(project):
    source = """
def test_it(gpumem):
    loading = gpumem.load(make)
    assert isinstance(loading.value, torch.nn.Sequential)
    measured = loading.measurement
    assert (measured.name, measured.workload.step, measured.workload.parameters) == ("load", "load", SIZE // 4)
    assert (measured.peak_allocated, measured.loaded, measured.retained, measured.cyclic_garbage) == (SIZE, SIZE, 0, 0)
    step = gpumem.infer_step(loading.value, torch.ones(4, 512))
    assert step.peak_allocated > SIZE
    with pytest.raises(AttributeError, match="has no growth"):
        measured.growth
"""
    run(project, source, passed=1)


def test_it_runs_once_with_the_random_numbers_of_the_test(project):
    source = """
def test_it(gpumem):
    torch.manual_seed(0)
    expected = make()[0].weight[0, 0].item()
    torch.manual_seed(0)
    calls = []
    loading = gpumem.load(lambda: (calls.append(1), make())[1])
    assert calls == [1]
    assert loading.value[0].weight[0, 0].item() == expected
    # Where it is explained it runs once more, which gives another model of the same weights, and changes none of this.
    torch.manual_seed(0)
    again = gpumem.load(lambda: (calls.append(1), make())[1], explain=True)
    assert calls == [1, 1, 1]
    assert again.value[0].weight[0, 0].item() == expected
"""
    run(project, source, passed=1)


def test_figures_do_not_depend_on_what_else_there_is(project):
    source = """
HELD = []


@pytest.mark.parametrize("before", [False, True])
def test_it(gpumem, before):
    others = [make(), make()] if before else []
    HELD.append([torch.ones(1000)] if before else [])
    measured = gpumem.load(make).measurement
    assert (measured.peak_allocated, measured.loaded, measured.retained) == (SIZE, SIZE, 0)
    second = gpumem.load(make).measurement
    assert (second.name, second.peak_allocated) == ("load-2", SIZE)
"""
    run(project, source, passed=2)


def test_what_the_factory_holds_is_its_own(project):
    source = """
def test_it(gpumem):
    state = make().state_dict()

    def load():
        model = make()
        model.load_state_dict(state)
        return model

    measured = gpumem.load(load).measurement
    assert (measured.peak_allocated, measured.loaded, measured.retained) == (2 * SIZE, SIZE, 0)
    # Its own weights are given to the model: nothing new is made.
    model = make()
    measured = gpumem.load(lambda: model).measurement
    assert (measured.peak_allocated, measured.loaded, measured.retained) == (SIZE, SIZE, 0)
"""
    run(project, source, passed=1)


def test_a_state_dict_is_loaded_like_a_model(project):
    source = """
def test_it(gpumem, tmp_path):
    torch.save(make().state_dict(), tmp_path / "model.pt")
    loading = gpumem.load(lambda: torch.load(tmp_path / "model.pt"), explain=True)
    measured = loading.measurement
    assert loading.value["0.weight"].shape == (512, 512)
    assert (measured.loaded, measured.retained, measured.workload.parameters) == (SIZE, 0, None)
    assert measured.peak_allocated >= SIZE
    assert measured.explanation.retained.total == 0
"""
    run(project, source, passed=1)


def test_a_second_copy_is_in_the_peak_and_explained_with_its_line(project):
    source = f"""{COPY}

def test_it(gpumem):
    measured = gpumem.load(load, explain=True).measurement
    assert (measured.peak_allocated, measured.loaded, measured.retained) == (2 * SIZE, SIZE, 0)
    rows = [(row.category, row.operator, row.nbytes) for row in measured.composition.rows]
    assert {{category for category, _, _ in rows}} == {{"parameter", "temporary"}}
    assert sum(nbytes for category, _, nbytes in rows if category == "parameter") == SIZE
    copies = [row for row in measured.composition.rows if row.operator == "clone"]
    assert sum(row.nbytes for row in copies) == SIZE
    assert all(row.site.startswith("test_it.py:") for row in copies)
    assert measured.explanation.retained.total == measured.explanation.garbage.total == 0
"""
    run(project, source, passed=1)


def test_what_is_left_beyond_the_model_is_retained_and_explained(project):
    source = """
KEPT = []


def load():
    KEPT.append(torch.ones(250_000))
    return make()


@pytest.mark.gpumem(max_retained="64 kB")
def test_it(gpumem):
    loading = gpumem.load(load)
    assert (loading.measurement.loaded, loading.measurement.retained) == (SIZE, 1_000_000)
"""
    result = run(project, source, failed=1)
    result.stdout.fnmatch_lines(
        [
            "Memory over budget: retained 1.00 MB, budget 64.00 kB*",
            "  what was retained *",
            "  other *1.00 MB *test_it.py:* ones *1 x float32?250000?",
            "  kept in: test_it.KEPT?...?",
        ]
    )


def test_garbage_of_loading_is_told_apart_from_the_model(project):
    """A model that refers to itself is as much a cycle as what loading throws away."""
    source = """
def load():
    model = make()
    model.itself = [model]
    waste = [torch.ones(250_000)]
    waste.append(waste)
    return model


def test_it(gpumem):
    measured = gpumem.load(load, explain=True).measurement
    assert (measured.loaded, measured.retained, measured.cyclic_garbage) == (SIZE, 0, 1_000_000)
    assert measured.explanation.garbage.total == 1_000_000
    assert measured.explanation.cycles == ("list -> list",)
"""
    run(project, source, passed=1)


def test_an_exception_while_loading_is_the_tests_own_and_nothing_is_lost(project):
    source = """
def broken():
    model = make()
    raise OSError("no such file")


def test_broken(gpumem):
    gpumem.load(broken)


def test_caught(gpumem):
    with pytest.raises(OSError, match="no such file"):
        gpumem.load(broken)
    measured = gpumem.load(make).measurement
    assert (measured.name, measured.peak_allocated, measured.retained) == ("load", SIZE, 0)


def test_after(gpumem):
    measured = gpumem.load(make).measurement
    assert (measured.peak_allocated, measured.retained) == (SIZE, 0)
"""
    result = run(project, source, "--junitxml=report.xml", failed=1, passed=2)
    result.stdout.fnmatch_lines(["E  * OSError: no such file"])
    assert project.verdicts()["test_broken"]["unmeasured"]
    assert (
        project.verdicts()["test_after"]["verdicts"][0]["measurement"]["metrics"]["loaded"] == 4 * (512 * 512 + 512) * 4
    )


def test_memory_that_runs_out_while_loading_is_explained(project):
    source = """
def load():
    model = make()
    return model, torch.empty(2**60)


def test_it(gpumem):
    gpumem.load(load)
"""
    result = run(project, source, failed=1)
    result.stdout.fnmatch_lines(["*gpumem out of memory*", "memory ran out when *", "*test_it.py:*"])


def test_what_is_no_function_is_said(project):
    source = """
def test_it(gpumem):
    gpumem.load(make())  # callable, and takes an input


def test_no_function(gpumem):
    gpumem.load({"weight": torch.ones(1)})
"""
    result = run(project, source, failed=2)
    result.stdout.fnmatch_lines(
        [
            "E * TypeError: gpumem.load() needs a function that loads an object, but got dict: write gpumem.load(lambda: ...)*"
        ]
    )


def test_it_is_not_nested(project):
    source = """
def test_it(gpumem):
    gpumem.load(lambda: gpumem.load(make).value)
"""
    result = run(project, source, failed=1)
    result.stdout.fnmatch_lines(
        ["E * pytest_gpumem.base.errors.MeasuringError: gpumem.load() is called within gpumem.load()*"]
    )


PLANTED = """
def load():
    return make()


@pytest.mark.gpumem(max_memory="7 MB")
def test_it(gpumem):
    gpumem.load(load)


def test_other(gpumem):
    gpumem.load(load, name="other")
"""


def test_a_planted_second_copy_is_red_against_the_baseline_with_its_line(project):
    project.write(MODEL + PLANTED)
    assert project.run("--gpumem-update=new", "-pno:randomly").ret == 0
    (text,) = project.stored().values()
    assert "loaded = 4202496" in text
    assert re.search(r'step = "load"', text)
    again = project.run("--gpumem-baseline")
    again.assert_outcomes(passed=2)
    project.write(MODEL + PLANTED.replace("def load():\n    return make()\n", COPY.strip() + "\n"))
    result = project.run("--gpumem-baseline", "-pno:randomly")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines_random(
        [
            "Memory over budget: peak 8.40 MB, budget 7.00 MB*",
            "Memory regressed: peak 8.40 MB, baseline 4.20 MB: +4.20 MB*",
            "*test_it.py:* clone *4 x float32?512, 512?*",
        ]
    )
    result.stdout.fnmatch_lines(["gpumem: 2 gated, *"])


def test_a_model_that_holds_more_at_rest_is_red_also_where_the_peak_is_as_it_was(project):
    """Loaded in float32 instead of bfloat16, beside a copy that hid it."""
    source = """
def load():
    model = make()
    return model.DTYPE()


def test_it(gpumem):
    gpumem.load(load)
"""
    project.write(MODEL + source.replace("DTYPE", "bfloat16"))
    assert project.run("--gpumem-update=new").ret == 0
    project.write(MODEL + source.replace("DTYPE", "float"))
    result = project.run("--gpumem-baseline")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["Memory regressed: loaded 4.20 MB, baseline 2.10 MB: *"])


def test_loading_is_recorded_where_the_test_reads_its_composition(project):
    source = """
def test_it(gpumem):
    assert gpumem.load(make).measurement.composition.total == SIZE
"""
    run(project, source, passed=1)
