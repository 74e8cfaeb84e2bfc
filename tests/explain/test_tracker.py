"""Marks and looks: what is known of a step while it runs, and that nothing of it stays."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils.checkpoint import checkpoint

from pytest_gpumem.facts.values.events import SpanBegin, SpanEnd
from pytest_gpumem.measuring.explain.compose import category_of, composition_of_peak
from pytest_gpumem.measuring.explain.recording import record
from pytest_gpumem.measuring.explain.sites import Site
from pytest_gpumem.measuring.explain.tracker import Tracker

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.measuring.explain.owners import TensorOwners
    from pytest_gpumem.measuring.explain.recording import Recording
    from pytest_gpumem.measuring.explain.trace import Mark

LEVELS = ["calls", "modules", "phases"]


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.tanh(self.fc1(x)))


class Model(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x * self.scale


def paths_of(done: Recording, kind: str = "module") -> list[str]:
    """The paths of the marks of a kind, in their order."""
    return [mark.path for mark in done.trace.marks if mark.kind == kind]


def nested(done: Recording) -> list[tuple[Mark, ...]]:
    """The marks around each mark, from the outside in; raises where spans do not nest."""
    around: list[tuple[Mark, ...]] = []
    open_marks: list[Mark | None] = []
    for token in done.trace.tokens:
        if isinstance(token, SpanBegin):
            open_marks.append(done.trace.marks[token.mark] if token.kind == "mark" else None)
            if token.kind == "mark":
                around.append(tuple(mark for mark in open_marks if mark is not None))
        elif isinstance(token, SpanEnd):
            open_marks.pop()
    assert open_marks == [], "every span ends"
    return around


def modules_around(done: Recording) -> set[tuple[str, ...]]:
    """The module paths around each module, itself last."""
    return {
        tuple(mark.path for mark in marks if mark.kind == "module")
        for marks in nested(done)
        if marks[-1].kind == "module"
    }


def labels_of(done: Recording) -> dict[int, tuple[str, str]]:
    """Category and module of each block that was found on something, by address."""
    return {
        block.address: (block.label.category, block.label.module)
        for block in done.timeline.lifetimes
        if block.label is not None
    }


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


# Modules


def test_modules_are_told_by_their_paths_in_the_model_that_is_called(recorder):
    model, x = Model(), torch.ones(2, 8)
    done = recorder.record({"forward": lambda: model(x)}, (model, x))
    block = ["fc1", "fc2"]
    expected = ["Model"]
    for number in range(2):
        expected += [f"blocks.{number}", *(f"blocks.{number}.{name}" for name in block)]
    assert paths_of(done) == expected
    assert ("Model", "blocks.1", "blocks.1.fc2") in modules_around(done)


def test_a_model_called_in_pieces_has_the_full_models_paths_if_it_is_known(recorder):
    model, x = Model(), torch.ones(2, 8)
    pieces = {"forward": lambda: model.blocks[1](model.blocks[0](x))}
    known = recorder.record(pieces, model)
    assert set(paths_of(known)) == {f"blocks.{n}{part}" for n in range(2) for part in ("", ".fc1", ".fc2")}
    unknown = recorder.record(pieces, held=())
    assert set(paths_of(unknown)) == {"Block", "fc1", "fc2"}, "what is called is a model of its own"


def test_two_models_keep_their_own_paths(recorder):
    first, second, x = Block(), Model(1), torch.ones(2, 8)
    done = recorder.record({"forward": lambda: second(first(x))}, held=())
    assert modules_around(done) == {
        ("Block",),
        ("Block", "fc1"),
        ("Block", "fc2"),
        ("Model",),
        ("Model", "Model.blocks.0"),
        ("Model", "Model.blocks.0", "Model.blocks.0.fc1"),
        ("Model", "Model.blocks.0", "Model.blocks.0.fc2"),
    }


def test_a_module_that_no_model_knows_is_told_as_the_one_that_calls_it(recorder):
    loss = nn.MSELoss()

    class Uses(nn.Module):
        def forward(self, x):
            return loss(x, x)

    model, x = Uses(), torch.ones(2, 8)
    done = recorder.record({"forward": lambda: model(x)}, model)
    assert paths_of(done) == ["Uses", "Uses"]


def test_a_call_is_within_the_module_that_makes_it_and_on_its_line(recorder):
    model, x = Block(), torch.ones(2, 8)
    line = Block.forward.__code__.co_firstlineno + 1
    done = recorder.record({"forward": lambda: model(x)}, model)
    calls = [mark for mark in done.trace.marks if mark.kind == "call"]
    assert {(mark.path, mark.site) for mark in calls} == {
        (path, f"test_tracker.py:{line}") for path in ("Block", "fc1", "fc2")
    }


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_tells_how_closely_a_step_is_watched(recorder, level):
    model, x = Block(), torch.ones(2, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    done = recorder.record({"step": step}, (model, optimizer), level)
    kinds = {mark.kind for mark in done.trace.marks} - {"phase", "snapshot", "rest"}
    expected = {"calls": {"call", "module", "optimizer"}, "modules": {"module", "optimizer"}, "phases": set()}
    assert kinds == expected[level]
    assert paths_of(done, "phase") == ["step"]
    assert paths_of(done, "rest") == ["workspaces", "garbage"]
    assert done.timeline.recomputed == {}


# Marks nest, whatever happens


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.tanh(self.fc(x))
        raise ValueError("by the module")


class Forgives(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = Fails()
        self.after = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            self.fails(x)
        except ValueError:
            x = self.after(x)
        return x


@pytest.mark.parametrize("level", LEVELS)
def test_marks_nest_when_a_module_raises_and_the_next_one_stands_where_it_belongs(recorder, level):
    model, x = Forgives(), torch.ones(2, 8)
    done = recorder.record({"forward": lambda: model(x)}, model, level)
    assert done.error is None
    nested(done)
    if level != "phases":
        assert modules_around(done) == {
            ("Forgives",),
            ("Forgives", "fails"),
            ("Forgives", "fails", "fails.fc"),
            ("Forgives", "after"),
        }


@pytest.mark.parametrize("level", ["calls", "phases"])
def test_marks_nest_when_the_step_raises(recorder, level):
    model, x = Fails(), torch.ones(2, 8)
    done = recorder.record({"forward": lambda: model(x), "never": lambda: None}, model, level)
    assert isinstance(done.error, ValueError)
    nested(done)
    assert paths_of(done, "phase") == ["forward"]
    composition = composition_of_peak(done.timeline, done.own_bytes)
    assert composition.total > done.own_bytes
    assert (composition.rest, composition.of("unattributed")) == (0, 0)


def test_marks_nest_when_an_optimizer_raises_and_what_comes_next_is_no_optimizers(recorder):
    class Raises(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            raise ValueError("by the optimizer")

    model, x = Block(), torch.ones(2, 8)
    optimizer = Raises(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).sum().backward()
        with pytest.raises(ValueError, match="by the optimizer"):
            optimizer.step()
        kept.append(model(x))

    kept: list[torch.Tensor] = []
    done = recorder.record({"step": step}, (model, optimizer))
    nested(done)
    (block,) = [block for block in done.timeline.lifetimes if block.address == address(kept[0]) and block.freed is None]
    assert not block.in_optimizer


@pytest.mark.parametrize(
    ("level", "use_reentrant"), [("calls", True), ("calls", False), ("modules", True), ("phases", False)]
)
def test_marks_nest_when_checkpointing_runs_modules_once_more_and_stops_early(recorder, level, use_reentrant):
    model, x = Model(3), torch.ones(2, 8, requires_grad=True)

    def step() -> None:
        y = x
        for block in model.blocks:
            y = checkpoint(block, y, use_reentrant=use_reentrant)
        y.sum().backward()
        model.zero_grad()
        x.grad = None

    step()
    done = recorder.record({"step": step}, (model, x), level)
    assert done.error is None
    nested(done)
    assert done.timeline.recomputed == ({} if level == "phases" else {"blocks.*": 3})
    recomputed = [block for block in done.timeline.lifetimes if block.recomputed]
    assert bool(recomputed) == (level != "phases")
    assert {block.mark.path.partition(".")[0] for block in recomputed if block.mark is not None} <= {"blocks"}
    assert not any(block.node for block in recomputed)


def test_a_torch_function_that_raises_ends_its_mark(recorder):
    def step() -> None:
        with pytest.raises(RuntimeError):
            torch.ones(2) @ torch.ones(3)
        kept.append(torch.ones(4))

    kept: list[torch.Tensor] = []
    done = recorder.record({"step": step})
    around = [tuple(mark.kind for mark in marks) for marks in nested(done)]
    assert around.count(("phase", "call")) >= 4
    assert ("phase", "call", "call") not in around


def test_ctrl_c_gets_through_and_leaves_nothing_behind(recorder):
    class Stops(nn.Module):
        def forward(self, x):
            raise KeyboardInterrupt

    model, x = Stops(), torch.ones(2, 8)
    with pytest.raises(KeyboardInterrupt):
        recorder.record({"forward": lambda: model(x)}, model)
    assert_nothing_is_left()
    assert recorder.device.live() >= 0, "the device counts on"


# What blocks are


@pytest.mark.parametrize("level", ["calls", "phases"])
def test_parameters_buffers_gradients_optimizer_state_and_inputs_are_found(recorder, level):
    model, x = Model(1), torch.ones(2, 8)
    optimizer = torch.optim.Adam(model.parameters())
    fc1 = model.blocks[0].fc1

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    def register(owners: TensorOwners) -> None:
        owners.model(model)
        owners.optimizer(optimizer)
        owners.inputs(x)

    subject = recorder.subject({"step": step}, (model, optimizer, x), register)
    done = record(recorder.device, recorder.sites, subject, level)
    labels = labels_of(done)
    assert labels[address(fc1.weight)] == ("parameter", "blocks.0.fc1")
    assert labels[address(model.scale)] == ("buffer", "Model")
    assert labels[address(fc1.weight.grad)] == ("gradient", "blocks.0.fc1")
    for name in ("exp_avg", "exp_avg_sq", "step"):
        assert labels[address(optimizer.state[fc1.bias][name])] == ("optimizer state", "blocks.0.fc1")
    assert labels[address(x)] == ("input", "")
    categories = {category_of(block, done.timeline) for block in done.timeline.at(len(done.trace.tokens))}
    assert categories <= {"parameter", "buffer", "gradient", "optimizer state", "input", "other"}


def test_an_optimizer_that_nobody_told_of_is_found_when_it_steps(recorder):
    weight = nn.Parameter(torch.ones(8))
    optimizer = torch.optim.Adam([weight])

    def step() -> None:
        (weight * 2).sum().backward()
        optimizer.step()

    labels = labels_of(recorder.record({"step": step}))
    assert labels[address(weight)] == ("parameter", "")
    assert labels[address(weight.grad)] == ("gradient", "")
    assert labels[address(optimizer.state[weight]["exp_avg"])] == ("optimizer state", "")


def test_a_gradient_that_is_gone_before_the_phase_ends_is_found_all_the_same(recorder):
    model, x = Block(), torch.ones(2, 8)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    done = recorder.record({"step": step}, model)
    gradients = [block for block in done.timeline.lifetimes if category_of(block, done.timeline) == "gradient"]
    assert sorted(block.nbytes for block in gradients) == [32, 32, 256, 256]
    assert all(block.freed is not None for block in gradients)


def test_a_tensor_that_is_parameter_and_input_is_a_parameter(recorder):
    model = Block()

    def register(owners: TensorOwners) -> None:
        owners.model(model)
        owners.inputs(model.fc1.weight)

    subject = recorder.subject({"step": lambda: model.fc1(model.fc1.weight)}, model, register)
    labels = labels_of(record(recorder.device, recorder.sites, subject, "calls"))
    assert labels[address(model.fc1.weight)] == ("parameter", "fc1")


def test_a_part_of_a_larger_block_does_not_say_what_the_block_is_as_a_tensor(recorder):
    flat = torch.ones(100)
    model = nn.Module()
    model.part = nn.Parameter(flat[:10])
    model.whole = nn.Parameter(torch.ones(10))
    tracker = Tracker(torch.device("cpu"), recorder.sites)
    tracker.owners.model(model)
    tracker.snapshot()
    ((first, second),) = tracker.snapshots.values()
    assert (first.category, first.address, first.tensor) == ("parameter", address(flat), "")
    assert (second.category, second.tensor) == ("parameter", "float32[10]")


def test_a_parameter_has_its_creating_line_and_a_gradient_at_its_address_has_none(recorder):
    model = nn.Linear(4, 4)
    allocated = Site("model.py:3", "")
    tracker = Tracker(torch.device("cpu"), recorder.sites, creation_sites={address(model.weight): allocated})
    tracker.owners.model(model)
    tracker.snapshot()
    ((weight, bias),) = tracker.snapshots.values()
    assert (weight.site, bias.site) == ("model.py:3", "")


def test_models_and_optimizers_are_known_within_containers():
    model, optimizer = Block(), torch.optim.SGD([nn.Parameter(torch.ones(1))])
    tracker = Tracker(torch.device("cpu"), None)  # type: ignore[arg-type]
    tracker.owners.within({"model": [model], "rest": (optimizer, 3, "text")})
    tracker.snapshot()
    (labels,) = tracker.snapshots.values()
    assert {label.module for label in labels} == {"fc1", "fc2", ""}


def test_looking_leaves_no_tensor_behind_and_changes_none(recorder):
    model, x = Model(1), torch.ones(2, 8)
    model(x).sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    live = recorder.device.live()
    tracker = Tracker(recorder.device.torch_device, recorder.sites)
    tracker.owners.model(model)
    tracker.owners.inputs(x)
    tracker.snapshot()
    assert recorder.device.live() == live
    assert all(torch.equal(before[name], parameter.grad) for name, parameter in model.named_parameters())


# Afterwards

HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_forward_hooks_always_called",
    "_global_forward_hooks_with_kwargs",
    "_global_backward_hooks",
)


def assert_nothing_is_left() -> None:
    left = [name for name in HOOKS if getattr(modules, name)]
    assert left == []
    assert (len(_global_optimizer_pre_hooks), len(_global_optimizer_post_hooks)) == (0, 0)
    assert torch.overrides._len_torch_function_stack() == 0
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward


def training(model: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


@pytest.mark.parametrize("level", ["calls", "phases"])
def test_a_recording_leaves_no_hook_no_mode_and_the_collector_as_it_was(recorder, level):
    model, x = Model(), torch.ones(2, 8)
    step = training(model, x)
    was_on = gc.isenabled()
    recorder.record({"step": step}, model, level)
    assert_nothing_is_left()
    assert gc.isenabled() is was_on
    failing = Fails()
    recorder.record({"forward": lambda: failing(x)}, failing, level)
    assert_nothing_is_left()


def test_the_users_own_hooks_stay(recorder):
    seen: list[str] = []
    handle = modules.register_module_forward_hook(lambda module, args, result: seen.append(type(module).__name__))
    try:
        model, x = Block(), torch.ones(2, 8)
        recorder.record({"forward": lambda: model(x)}, model)
        model(x)
        assert seen == ["Linear", "Linear", "Block"] * 2
    finally:
        handle.remove()
    assert_nothing_is_left()


def test_the_users_own_modes_see_what_they_saw(recorder):
    class Counts(torch.overrides.TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    x = torch.ones(4)

    def step() -> None:
        with mode:
            torch.tanh(x).sum()

    mode = Counts()
    step()
    plain, mode.names = mode.names, []
    recorder.record({"step": step}, x)
    assert mode.names == plain


def test_training_goes_on_as_if_nobody_had_looked(recorder):
    def weights(recorded: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = Model(), torch.ones(2, 8)
        step = training(model, x)
        for number in range(4):
            if number == recorded:
                recorder.record({"step": step}, model)
            else:
                step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    for plain, watched in zip(weights(recorded=-1), weights(recorded=2), strict=True):
        assert torch.equal(plain, watched)
