"""Recorded steps: their peak is the one that was measured, its rows add up, and running out of memory is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.values.composition import Composition
from pytest_gpumem.facts.values.events import SpanBegin
from pytest_gpumem.measuring.explain.compose import composition_at, composition_of_peak
from pytest_gpumem.measuring.explain.recording import (
    DIFFERING_STEPS,
    FOLLOWING_STEPS,
    ExpectedFigures,
    Recording,
    asked_for,
    explain,
    explain_out_of_memory,
    is_out_of_memory,
)
from tests.explain.conftest import opened
from tests.explain.recorder import Phases, Recorder

if TYPE_CHECKING:
    from collections.abc import Callable

unhurried = settings(deadline=None)
pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
LEVELS = ["calls", "modules", "phases"]
HUGE = 1 << 50
"""Bytes that no machine has, nor room for their addresses."""


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        ones = torch.ones(100, 100)
        return grad * 2 + ones.sum()


class UsesDouble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Double.apply(self.fc(x))


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)) for _ in range(3))
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


class First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.module(*args)[0]


Step = tuple[Phases, object]


def training(model: nn.Module, *inputs: torch.Tensor, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD) -> Step:
    updating = optimizer(model.parameters(), lr=0.01)
    losses: list[torch.Tensor] = []

    def forward() -> None:
        losses.append(model(*inputs).sum())

    def backward() -> None:
        losses.pop().backward()

    def update() -> None:
        updating.step()
        updating.zero_grad()

    return {"forward": forward, "backward": backward, "optimizer": update}, (model, inputs, updating)


def inference(model: nn.Module, *inputs: torch.Tensor) -> Step:
    @torch.no_grad()
    def forward() -> None:
        model(*inputs)

    return {"forward": forward}, (model.eval(), inputs)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def double_backward() -> Step:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), torch.randn(16, 8, requires_grad=True)

    def step() -> None:
        y = model(x).sum()
        (gradient,) = torch.autograd.grad(y, x, create_graph=True)
        (gradient.square().sum() + y).backward()
        model.zero_grad()
        x.grad = None

    return {"step": step}, (model, x)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(32, 4, 256, batch_first=True)


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 5))


def doubled(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).square()


def called(function: Callable[..., object], *inputs: torch.Tensor) -> Step:
    def step() -> None:
        function(*inputs)

    return {"step": step}, inputs


HELD_BY_THE_PROFILER = {
    "vmap": lambda: called(torch.vmap(doubled), torch.ones(64, 128)),
    "vmap within vmap": lambda: called(torch.vmap(torch.vmap(doubled)), torch.ones(64, 128)),
    "gradient of a function": lambda: called(torch.func.grad(lambda x: doubled(x).sum()), torch.ones(64, 128)),
    "sparse CSR": lambda: called(lambda x: (x.to_sparse_csr() * 2) * 3, torch.ones(64, 128)),
}
"""Steps with tensors within tensors, which the profiler keeps alive until it is deleted."""

STEPS = {
    **HELD_BY_THE_PROFILER,
    "mlp with Adam": lambda: training(mlp(), torch.randn(16, 64), optimizer=torch.optim.AdamW),
    "convolution and batch norm": lambda: training(images(), torch.randn(4, 3, 16, 16)),
    "encoder layer": lambda: training(encoder_layer(), torch.randn(4, 64, 32)),
    "encoder layer in eval mode": lambda: inference(encoder_layer(), torch.randn(4, 64, 32)),
    "LSTM": lambda: training(First(nn.LSTM(16, 32, 2, batch_first=True)), torch.randn(4, 10, 16)),
    "custom function": lambda: training(UsesDouble(), torch.randn(4, 8)),
    "checkpointing, reentrant": lambda: training(
        Checkpointed(use_reentrant=True), torch.randn(64, 32, requires_grad=True)
    ),
    "checkpointing": lambda: training(Checkpointed(use_reentrant=False), torch.randn(64, 32)),
    "double backward": double_backward,
    "sparse embedding": lambda: training(
        nn.Embedding(100, 16, sparse=True), torch.arange(8), optimizer=torch.optim.SparseAdam
    ),
}


# The peak


@pytest.mark.parametrize("name", STEPS)
def test_the_peak_that_is_explained_is_the_one_that_was_measured(recorder, name):
    phases, held = STEPS[name]()
    explanation, done = recorder.explain(phases, held)
    assert explanation.peak.total == done.peak
    assert ExpectedFigures(done.peak, done.turnover) == recorder.measured(phases, held)
    assert explanation.peak.notes == ()
    assert (explanation.peak.rest, explanation.peak.of("unattributed")) == (0, 0)
    assert explanation.retained == explanation.garbage == Composition(0, (), explanation.peak.recomputed)
    assert (explanation.cycles, explanation.asked) == ((), None)


@pytest.mark.parametrize(
    ("level", "name"),
    [
        ("calls", "mlp with Adam"),
        ("calls", "encoder layer in eval mode"),
        ("calls", "LSTM"),
        ("calls", "custom function"),
        ("calls", "checkpointing, reentrant"),
        ("calls", "double backward"),
        ("calls", "sparse embedding"),
        ("modules", "convolution and batch norm"),
        ("modules", "checkpointing"),
        ("phases", "custom function"),
        ("phases", "checkpointing, reentrant"),
    ],
)
def test_at_every_level_the_rows_of_every_moment_add_up(recorder, name, level):
    phases, held = STEPS[name]()
    done = recorder.record(phases, held, level)
    assert done.error is None
    peak = composition_of_peak(done.timeline, done.own_bytes)
    assert peak.total == done.peak
    for moment in (*range(-1, len(done.timeline.live), 10), done.timeline.peak):
        composition = composition_at(done.timeline, moment, done.own_bytes)
        assert (composition.rest, composition.of("unattributed")) == (0, 0)
        assert composition.total <= peak.total


@pytest.mark.parametrize("name", ["mlp with Adam", "checkpointing, reentrant", "double backward"])
def test_the_same_step_is_explained_in_the_same_words(recorder, name):
    phases, held = STEPS[name]()
    first, _ = recorder.explain(phases, held)
    second, _ = recorder.explain(phases, held)
    assert first == second


def takes_the_fast_path(done: Recording) -> bool:
    tokens = done.trace.tokens
    return any(
        isinstance(token, SpanBegin) and token.name == "aten::_transformer_encoder_layer_fwd" for token in tokens
    )


def test_a_module_that_takes_another_path_when_it_is_watched_is_watched_less_closely(recorder):
    phases, held = STEPS["encoder layer in eval mode"]()
    explanation, done = recorder.explain(phases, held)
    closest = recorder.record(phases, held, "calls")
    assert closest.peak != done.peak, "with other sizes both paths may need as much"
    assert done.level == "modules"
    assert explanation.peak.notes == ()
    assert takes_the_fast_path(done)


def test_an_equal_peak_by_another_path_is_not_taken_for_the_steps_own(recorder):
    # Of these sizes both paths of the layer need 91,520 bytes, for different things.
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    _, done = recorder.explain(*inference(layer, torch.randn(4, 16, 32)))
    assert takes_the_fast_path(done)


def test_a_step_whose_recording_never_has_the_measured_peak_says_so(recorder):
    phases, held = STEPS["mlp with Adam"]()
    for one in phases.values():
        one()
    actual = recorder.measured(phases, held)
    subject = recorder.subject(phases, held)
    expected = ExpectedFigures(actual.peak + 100, actual.turnover)
    explanation, done = explain(recorder.device, recorder.sites, subject, expected)
    assert done.level == "calls", "the closest look stands"
    (note,) = explanation.peak.notes
    assert note.startswith(
        f"the recorded run needed {format_bytes(actual.peak)}, 100 B less than the measured run, so "
    )
    assert note.endswith("let runs repeat exactly: fix the seed, and fill caches before the measurement")
    assert explanation.peak.total == actual.peak
    assert explanation.peak.rest == 0


def test_a_step_that_never_repeats_is_explained_by_the_closest_recording(recorder):
    phases, held = STEPS["mlp with Adam"]()
    for one in phases.values():
        one()
    actual = recorder.measured(phases, held)
    subject = recorder.subject(phases, held)
    explanation, done = explain(
        recorder.device, recorder.sites, subject, ExpectedFigures(actual.peak, actual.turnover + 1)
    )
    assert (done.level, done.peak) == ("calls", actual.peak)
    assert explanation.peak.notes == ()


def test_a_step_that_holds_nothing_and_allocates_nothing_has_an_empty_composition(recorder):
    explanation, _ = recorder.explain({"step": lambda: None})
    assert explanation.peak == Composition(0, ())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", HELD_BY_THE_PROFILER)
def test_what_only_the_profiler_kept_is_freed_with_it(recorder, name, level):
    phases, held = HELD_BY_THE_PROFILER[name]()
    expected, live = recorder.measured(phases, held), recorder.device.live()
    done = recorder.record(phases, held, level)
    assert done.kept_by_profiler > 0
    assert recorder.device.live() == live
    # A later step may have its blocks at the same addresses.
    assert recorder.measured(phases, held) == expected


def test_a_step_under_vmap_has_the_rows_of_the_same_step_without(recorder):
    x = torch.ones(64, 128)
    plain, _ = recorder.explain(*called(doubled, x))
    mapped, _ = recorder.explain(*called(torch.vmap(doubled), x))
    line = doubled.__code__.co_firstlineno + 1
    rows = [row for row in mapped.peak.rows if row.operator in ("mul", "add") and row.nbytes > 8]
    assert [(row.site, row.tensor) for row in rows] == [(f"test_recording.py:{line}", "float32[64, 128]")] * 2
    assert set(rows) <= set(plain.peak.rows)


def test_each_level_after_a_profile_kept_memory_takes_one_run(recorder):
    runs: list[None] = []

    def step() -> None:
        runs.append(None)
        torch.vmap(doubled)(torch.ones(64, 128))

    actual = recorder.measured({"step": step})
    runs.clear()
    expected = ExpectedFigures(actual.peak + 1, actual.turnover)
    explain(recorder.device, recorder.sites, recorder.subject({"step": step}), expected)
    assert len(runs) == 1 + len(LEVELS)


# What it is made of


def test_a_training_step_at_its_peak(recorder):
    model, x = mlp(), torch.randn(1024, 64)
    phases, held = training(model, x)
    phases.pop("optimizer")
    explanation, _ = recorder.explain({**phases, "clear": model.zero_grad}, held)
    peak = explanation.peak
    parameters = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert peak.of("parameter") == parameters
    assert peak.of("gradient") > 0
    # What ReLU passed on, saved by it and by the layer after it; and its gradient.
    assert peak.of("activation", "Sequential.*") >= 1024 * 128 * 4
    assert peak.of("temporary", "Sequential.*") >= 1024 * 128 * 4
    assert {row.module for row in peak.rows if row.category == "parameter"} == {"Sequential.*"}
    assert peak.dtypes() == {"float32"}


def test_a_custom_functions_backward_is_told_by_its_own_line(recorder):
    explanation, _ = recorder.explain(*STEPS["custom function"]())
    (row,) = [row for row in explanation.peak.rows if row.tensor == "float32[100, 100]"]
    line = Double.backward.__code__.co_firstlineno + 2
    assert (row.site, row.operator) == (f"test_recording.py:{line}", "DoubleBackward")
    assert row.module == "UsesDouble"


def test_temporaries_of_an_optimizer_are_the_same_at_every_level(recorder):
    phases, held = STEPS["mlp with Adam"]()
    for one in phases.values():
        one()
    of = [
        composition_of_peak(done.timeline, done.own_bytes)
        for done in (recorder.record(phases, held, level) for level in LEVELS)
    ]
    assert {composition.of("temporary", "*") // 100 for composition in of} == {2 * 64 * 128 * 4 // 100}
    assert not any("Optimizer.step" in row.operator for composition in of for row in composition.rows)


def test_what_a_closure_of_an_optimizer_keeps_for_backward_is_activations(recorder):
    model, x = mlp(), torch.randn(1024, 64)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    explanation, _ = recorder.explain({"step": lambda: optimizer.step(closure)}, (model, x, optimizer))
    assert explanation.peak.of("activation") >= 1024 * 128 * 4


def test_a_name_that_the_user_gives_to_a_stretch_is_no_operator(recorder):
    weight, x = nn.Parameter(torch.ones(1000)), torch.ones(1000)

    def step() -> None:
        with torch.profiler.record_function("mine"):
            kept = torch.tanh(weight * x)
            kept.sum().backward()
        weight.grad = None

    for level in LEVELS:
        done = recorder.record({"step": step}, (weight, x), level)
        peak = composition_of_peak(done.timeline, done.own_bytes)
        assert {"mine"}.isdisjoint(row.operator for row in peak.rows)
        assert peak.of("activation") >= 4000, level


# A step that fails


class RaisesWhenWatched(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if torch.overrides._len_torch_function_stack():
            raise RuntimeError("not under a mode") from ValueError("within")
        return y


def test_a_step_that_fails_under_marks_only_is_recorded_with_fewer(recorder):
    model, x = RaisesWhenWatched(), torch.ones(1000)
    explanation, done = recorder.explain({"forward": lambda: model(x)}, (model, x))
    assert done.level == "modules"
    assert 8000 <= explanation.peak.total < 8100
    assert explanation.peak.notes == ()
    assert explanation.peak.of("unattributed") == 0


def test_a_step_that_fails_without_marks_raises_what_it_raised(recorder):
    def step() -> None:
        torch.ones(1000)
        raise ValueError("by the step")

    subject = recorder.subject({"step": step})
    with pytest.raises(ValueError, match="by the step"):
        explain(recorder.device, recorder.sites, subject, ExpectedFigures(4000, 4000))
    recorder.device.quiesce()
    assert recorder.device.live() == 0


def test_a_recording_that_failed_keeps_nothing_of_the_step(recorder):
    def fails() -> None:
        big = torch.ones(1000)
        try:
            raise ValueError("first")
        except ValueError as error:
            raise RuntimeError(f"then {len(big)}") from error

    live = recorder.device.live()
    done = recorder.record({"step": fails})
    assert isinstance(done.error, RuntimeError)
    assert recorder.device.live() == live
    assert composition_of_peak(done.timeline, done.own_bytes).total == 4000


# Out of memory


def test_where_memory_had_gone_when_it_ran_out_is_told_with_what_was_asked_for(recorder):
    model, x = mlp(), torch.randn(16, 64)

    def step() -> None:
        kept = [model(x), torch.ones(10_000)]
        torch.empty(HUGE, dtype=torch.uint8)
        kept[0].sum().backward()

    told = explain_out_of_memory(recorder.device, recorder.sites, recorder.subject({"step": step}, (model, x)))
    assert told is not None
    explanation, done = told
    assert explanation.asked == HUGE
    assert is_out_of_memory(done.error)
    hidden, out = 16 * 128 * 4, 16 * 10 * 4
    assert explanation.peak.total == done.own_bytes + hidden + out + 40_000
    assert (explanation.peak.rest, explanation.peak.of("unattributed")) == (0, 0)
    assert explanation.peak.of("activation", "*") + explanation.peak.of("temporary", "*") == hidden + out + 40_000


def test_what_is_told_is_what_was_there_when_memory_ran_out_and_not_earlier(recorder):
    def step() -> None:
        earlier = torch.ones(10_000)
        del earlier
        kept = torch.ones(100)
        torch.empty(HUGE, dtype=torch.uint8)
        kept.add_(1)

    told = explain_out_of_memory(recorder.device, recorder.sites, recorder.subject({"step": step}))
    assert told is not None
    assert told[0].peak.total == 400


@pytest.mark.parametrize("error", [None, ValueError("not of memory")])
def test_a_step_that_does_not_run_out_again_has_nothing_to_tell(recorder, error):
    def step() -> None:
        if error is not None:
            raise error

    assert explain_out_of_memory(recorder.device, recorder.sites, recorder.subject({"step": step})) is None


@pytest.mark.parametrize(
    ("message", "nbytes"),
    [
        ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.19 GiB", 20 * 2**30),
        ("CUDA out of memory. Tried to allocate 512.00 MiB. GPU 0 has", 2**29),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1125899906842624 bytes. Error", 2**50),
        ("out of memory", None),
    ],
)
def test_the_bytes_that_could_not_be_had_are_those_of_the_message(message, nbytes):
    assert asked_for(RuntimeError(message)) == nbytes


def test_out_of_memory_is_told_from_other_errors():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(MemoryError())
    with pytest.raises(RuntimeError) as raised:
        torch.empty(HUGE, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


# Any step

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["keep", "drop", "leave", "work"]), st.integers(1, 2000)), min_size=1, max_size=12
)


@unhurried
@given(actions=ACTIONS, level=st.sampled_from(LEVELS))
def test_whatever_a_step_does_its_recording_counts_as_the_device_does(actions, level):
    with opened() as recorder:
        assert_counted(recorder, actions, level)


def assert_counted(recorder: Recorder, actions: list[tuple[str, int]], level: str) -> None:
    own = [torch.ones(100) for _ in range(3)]
    torch.tanh(torch.ones(1)).sum()

    def step() -> None:
        kept: list[torch.Tensor] = []
        for action, size in actions:
            if action == "keep":
                kept.append(torch.ones(size))
            elif action == "drop" and kept:
                kept.pop(size % len(kept))
            elif action == "leave" and own:
                own.pop(size % len(own))
            else:
                torch.tanh(torch.ones(size)).sum()

    expected = recorder.measured({"step": step}, own)
    own[:] = [torch.ones(100) for _ in range(3)]
    done = recorder.record({"step": step}, own, level)  # type: ignore[arg-type]
    assert ExpectedFigures(done.peak, done.turnover) == expected
    peak = composition_of_peak(done.timeline, done.own_bytes)
    assert (peak.rest, peak.of("unattributed")) == (0, 0)


# Steps that differ


def validating(every: int, *, apart: bool = False) -> tuple[Callable[[], None], nn.Module]:
    """A training step that validates its model with grad mode off now and then, with what it trains or apart from it."""
    model, x, count = mlp(), torch.randn(256, 64), 0

    def step() -> None:
        nonlocal count
        count += 1
        validates = count % every == 0
        if not (validates and apart):
            model(x).sum().backward()
            model.zero_grad()
        if validates:
            with torch.no_grad():
                model(x)

    return step, model


class Keeping:
    """An object that keeps tensors."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.last: torch.Tensor | None = None


@pytest.mark.parametrize(("apart", "calls"), [(False, (1, 3)), (True, (1, 2))])
def test_a_validation_in_every_fifth_step_is_among_the_calls_with_grad_mode_off(recorder, apart, calls):
    step, model = validating(5, apart=apart)
    actual = recorder.measured({"step": step}, model)
    expected = ExpectedFigures(actual.peak, None, steps=DIFFERING_STEPS)
    explanation, done = explain(recorder.device, recorder.sites, recorder.subject({"step": step}, model), expected)
    assert explanation.peak.notes == ()
    assert done.peak == actual.peak
    # A step of each kind: the training, and the one that validates.
    assert explanation.peak.no_grad["Sequential"] == calls


def test_of_steps_with_equal_peaks_the_one_with_the_most_operators_is_shown(recorder):
    step, model = validating(5)
    actual = recorder.measured({"step": step}, model)
    alone = recorder.record({"step": step}, model)
    expected = ExpectedFigures(actual.peak, None, steps=DIFFERING_STEPS)
    _, done = explain(recorder.device, recorder.sites, recorder.subject({"step": step}, model), expected)
    assert done.operators > alone.operators


@pytest.mark.parametrize("apart", [False, True])
def test_steps_that_keep_bytes_show_a_validation_in_every_fifth_step(recorder, apart):
    validate, model = validating(5, apart=apart)
    kept = []

    def step() -> None:
        validate()
        kept.append(torch.ones(100, 100))

    actual = recorder.measured({"step": step}, model)
    expected = ExpectedFigures(actual.peak, None, growth=40_000, steps=DIFFERING_STEPS)
    explanation, _ = explain(recorder.device, recorder.sites, recorder.subject({"step": step}, model), expected)
    assert explanation.peak.no_grad["Sequential"] == ((1, 2) if apart else (1, 3))
    assert explanation.retained.total == 40_000


@pytest.mark.parametrize("every", range(2, DIFFERING_STEPS + 1))
@pytest.mark.parametrize("first", [0, 1])
def test_a_high_step_of_any_period_comes_again_among_steps_that_keep_bytes(recorder, every, first):
    count, kept = first, []

    def step() -> None:
        nonlocal count
        count += 1
        torch.ones(500, 100 if count % every else 200)
        kept.append(torch.ones(10, 10))

    expected = ExpectedFigures(400_000, None, growth=400, steps=12)
    explanation, done = explain(recorder.device, recorder.sites, recorder.subject({"step": step}), expected)
    assert (done.peak, explanation.peak.notes) == (400_000, ())
    assert explanation.retained.total == 400


def test_a_step_under_vmap_that_keeps_bytes_has_lines_holders_and_shapes(recorder):
    rows, state = torch.ones(64, 128), Keeping()

    def step() -> None:
        mapped = torch.vmap(lambda row: (row * 2 + 1).exp())(rows)
        mapped.sum()
        state.kept.append(mapped)
        state.last = torch.zeros(64, 128)

    step()
    actual = recorder.measured({"step": step}, rows)
    expected = ExpectedFigures(actual.peak, None, growth=32768)
    explanation, done = explain(recorder.device, recorder.sites, recorder.subject({"step": step}, rows), expected)
    (kept,) = explanation.retained.rows
    assert (kept.nbytes, kept.tensor, kept.operator) == (32768, "float32[64, 128]", "exp")
    assert [holder.path.endswith("Keeping.kept[...]") for holder in explanation.holders] == [True]
    assert len(done.timeline.following) == FOLLOWING_STEPS
    assert done.kept_by_profiler == 0


def test_a_loop_that_ends_after_the_peak_came_again_is_explained(recorder):
    left = 4

    def step() -> None:
        nonlocal left
        if not left:
            raise RuntimeError("the loop ended")
        left -= 1
        torch.ones(100, 100 + left % 2).relu()

    actual = recorder.measured({"step": step})
    explanation, done = explain(
        recorder.device, recorder.sites, recorder.subject({"step": step}), ExpectedFigures(actual.peak, None, steps=20)
    )
    assert left == 0
    assert done.error is None
    assert (explanation.peak.total, explanation.peak.notes) == (actual.peak, ())
