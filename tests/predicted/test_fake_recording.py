"""A step on fake tensors: the same composition as the CPU's recording of it, without the memory."""

from __future__ import annotations

import functools
import gc
import importlib.util
import resource
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.checkpoint import checkpoint

from pytest_gpumem.collector import cyclic_collector_off
from pytest_gpumem.devices.cpu import CpuDevice
from pytest_gpumem.devices.events import AllocationEvent
from pytest_gpumem.explain.births import births
from pytest_gpumem.explain.compose import category_of, composition_of_garbage, composition_of_peak
from pytest_gpumem.explain.lives import timeline_of
from pytest_gpumem.explain.recording import Subject, phase, record
from pytest_gpumem.explain.sites import Sites
from pytest_gpumem.measurement import MeasuringError
from pytest_gpumem.predicted.fake_memory import FakeMemory
from pytest_gpumem.predicted.fake_recording import fake_trace
from pytest_gpumem.reach import reachable_tensors, storages_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.composition import Composition, Row
    from pytest_gpumem.explain.lives import Timeline
    from pytest_gpumem.explain.recording import Recorded
    from pytest_gpumem.explain.trace import Trace

ROOT = Path(__file__).parents[2]
SITES = Sites(ROOT)
EXAMPLE_GPT = "example_project/tiny_models/gpt.py"
NEEDS_TRANSFORMERS = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: this is a test against its GPT-2"
)

Loss = "Callable[[nn.Module, Any], torch.Tensor]"


class Step:
    """Forward, backward, AdamW."""

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.optimizer: torch.optim.Optimizer | None = None

    def __call__(self, model, batch, tracker) -> None:
        if self.optimizer is None:
            self.optimizer = torch.optim.AdamW(model.parameters())
        with phase(tracker, "forward"):
            loss = self.loss(model, batch)
        with phase(tracker, "backward"):
            loss.backward()
        del loss
        with phase(tracker, "optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()


def traced(build, batch, run, **options) -> Trace:
    with cyclic_collector_off():
        return fake_trace(build, batch, run, SITES, **options)


def read(trace: Trace) -> tuple[Timeline, Composition]:
    own = sum(trace.before.values())
    timeline = timeline_of(trace, own)
    return timeline, composition_of_peak(timeline, own)


def on_cpu(build, batch, loss: Loss) -> tuple[Timeline, Composition]:
    """The second step, recorded on the CPU."""
    done = recorded_on_cpu(build, batch, loss)
    return done.timeline, composition_of_peak(done.timeline, done.own_bytes)


def recorded_on_cpu(build, batch, loss: Loss) -> Recorded:
    device, step = CpuDevice(), Step(loss)
    device.open()
    try:
        with cyclic_collector_off():
            device.settle()
            device.adopt([batch.untyped_storage()])
            found: dict[int, Any] = {}
            with births(SITES, found):
                model = build()

            def held() -> list[torch.UntypedStorage]:
                return list(storages_of(reachable_tensors([(model, batch, step.optimizer)]), device.torch_device))

            subject = Subject(
                lambda tracker: step(model, batch, tracker),
                own=held,
                own_bytes=lambda: sum({one.data_ptr(): one.nbytes() for one in held()}.values()),
                know=lambda tracker: tracker.know(model, step.optimizer, batch),
                births=found,
            )
            record(device, SITES, subject, "calls")
            done = record(device, SITES, subject, "calls")
            assert done.error is None
            return done
    finally:
        device.close()


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.widen = nn.Linear(64, 128)
        self.act = nn.GELU()
        self.narrow = nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(self.act(self.widen(x)))


def mlp() -> tuple[Callable[[], nn.Module], torch.Tensor, Loss]:
    return Mlp, torch.randn(512, 64), lambda model, batch: model(batch).square().mean()


def example_gpt() -> tuple[Callable[[], nn.Module], torch.Tensor, Loss]:
    from tiny_models.gpt import GPT, GPTConfig, next_token_loss

    return (
        lambda: GPT(GPTConfig(layers=2)),
        torch.randint(256, (4, 64)),
        lambda model, batch: next_token_loss(model(batch), batch),
    )


def gpt2() -> tuple[Callable[[], nn.Module], torch.Tensor, Loss]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=2, n_head=4, n_embd=128, vocab_size=512, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    return (
        lambda: GPT2LMHeadModel(config),
        torch.randint(512, (2, 64)),
        lambda model, batch: cross_entropy(
            model(batch, use_cache=False).logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        ),
    )


@pytest.fixture(autouse=True)
def _the_example_can_be_imported(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "example_project"))


# Against the CPU

_COMPARED = ("parameter", "gradient", "optimizer state", "input", "activation")

# What these return besides their result is of as many bytes, and the CPU's kernels make it in another shape.
_STATISTICS = ("native_layer_norm", "_scaled_dot_product_flash_attention_for_cpu")


def alike(composition: Composition) -> Counter[tuple[object, ...]]:
    return Counter(map(told, (row for row in composition.rows if row.category in _COMPARED and not is_number(row))))


def told(row: Row) -> tuple[object, ...]:
    tensor = row.dtype if row.operator in _STATISTICS else row.tensor
    return row.category, row.module, row.site, row.library, tensor, row.count, row.nbytes


def is_number(row: Row) -> bool:
    """A Python number that an operator took: a tensor of 8 bytes on the CPU, and nothing among fake ones."""
    return row.tensor == "float64[]"


@pytest.mark.parametrize(
    ("case", "of_the_host_alone"),
    [
        pytest.param(mlp, 0, id="mlp"),
        pytest.param(example_gpt, 0, id="example-gpt"),
        # Three numbers in each of the two layers' GELU.
        pytest.param(gpt2, 48, id="gpt2", marks=NEEDS_TRANSFORMERS),
    ],
)
def test_the_peak_is_made_of_the_same_rows_as_on_the_cpu(case, of_the_host_alone):
    build, batch, loss = case()
    _, fake = read(traced(build, batch, Step(loss)))
    _, real = on_cpu(build, batch, loss)
    assert alike(fake) == alike(real)
    # The MLP's peak is where backward begins.
    there = set(_COMPARED) - {"gradient"} if case is mlp else set(_COMPARED)
    assert {row.category for row in fake.rows} >= there
    assert fake.total == real.total - of_the_host_alone


@pytest.mark.parametrize(
    "case", [mlp, example_gpt, pytest.param(gpt2, marks=NEEDS_TRANSFORMERS)], ids=["mlp", "example-gpt", "gpt2"]
)
def test_rows_add_up_to_the_peak_and_nothing_is_unattributed(case):
    build, batch, loss = case()
    timeline, peak = read(traced(build, batch, Step(loss)))
    assert peak.rest == 0
    assert peak.of("unattributed") == peak.of("other") == 0
    assert composition_of_garbage(timeline).total == 0


def test_the_scratch_of_the_cpus_attention_is_not_among_fake_tensors():
    build, batch, loss = example_gpt()

    def scratch(timeline: Timeline) -> dict[str, int]:
        sums: Counter[str] = Counter()
        for life in timeline.lives:
            if category_of(life, timeline) == "workspace" and "cale" in (life.node or life.operator):
                sums[life.node or life.operator] += life.nbytes
        return dict(sums)

    fake, _ = read(traced(build, batch, Step(loss)))
    real, _ = on_cpu(build, batch, loss)
    assert scratch(fake) == {}
    # Of two layers. In forward 32 rows of scores, maxima, sums and results; float32, with heads of 32 numbers.
    assert scratch(real) == {
        "aten::_scaled_dot_product_flash_attention_for_cpu": 2 * 4 * (32 * 64 + 32 + 32 + 32 * 32),
        "ScaledDotProductFlashAttentionForCpuBackward0": 33_024,
    }


def test_a_loss_that_keeps_more_than_its_number_is_not_known_to():
    def loss(model, batch) -> torch.Tensor:
        return mse_loss(model(batch), batch)

    build, batch, _ = mlp()
    _, fake = read(traced(build, batch, Step(loss)))
    _, real = on_cpu(build, batch, loss)
    # The kernel writes every element's loss, and then their mean into the same memory.
    assert real.total - fake.total == batch.nbytes - 4


# Lines


def test_what_backward_makes_has_the_line_and_module_of_its_forward():
    build, batch, loss = example_gpt()
    timeline, _ = read(traced(build, batch, Step(loss)))
    temporaries = [life for life in timeline.lives if life.node and category_of(life, timeline) == "temporary"]
    gelu = [life for life in temporaries if life.node == "GeluBackward0"]
    assert {(life.mark.path, life.mark.site.rpartition(":")[0]) for life in gelu} == {
        ("blocks.0.mlp.1", EXAMPLE_GPT),
        ("blocks.1.mlp.1", EXAMPLE_GPT),
    }
    assert all(life.mark.site for life in temporaries)


def test_a_parameter_has_the_line_that_made_it():
    build, batch, loss = example_gpt()
    _, peak = read(traced(build, batch, Step(loss)))
    lines = {row.module: row.site for row in peak.rows if row.category == "parameter"}
    source = (ROOT / EXAMPLE_GPT).read_text(encoding="utf-8").splitlines()
    assert "self.qkv = nn.Linear" in source[int(lines["blocks.*.attention.qkv"].rpartition(":")[2]) - 1]


def test_what_fake_tensors_call_by_themselves_is_not_marked_as_calls_of_the_step():
    build, batch, loss = mlp()
    calls = [mark.site for mark in traced(build, batch, Step(loss)).marks if mark.kind == "call"]
    recorded = recorded_on_cpu(build, batch, loss)
    assert Counter(calls) == Counter(mark.site for mark in recorded.trace.marks if mark.kind == "call")


def test_checkpointing_shows_what_is_recomputed_and_saves_activations():
    build, batch, loss = example_gpt()

    def checkpointed() -> nn.Module:
        model = build()
        for block in model.blocks:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        return model

    _, plain = read(traced(build, batch, Step(loss)))
    _, peak = read(traced(checkpointed, batch, Step(loss)))
    names = ("attention_norm", "attention", "mlp_norm", "mlp")
    assert dict(peak.recomputed) == {f"blocks.*.{name}": 2 for name in names}
    assert peak.of("activation") < 0.7 * plain.of("activation")
    assert not plain.recomputed


# Nothing is allocated


def test_a_step_of_many_gigabytes_needs_next_to_nothing():
    from tiny_models.gpt import GPT, GPTConfig

    _, _, loss = example_gpt()
    config = GPTConfig(layers=2, width=8192, heads=64, vocabulary=32_000)
    seen: list[bool] = []
    step = Step(loss)

    def run(model, batch, tracker) -> None:
        step(model, batch, tracker)
        state = [value for held in step.optimizer.state.values() for value in held.values()]
        seen.extend(isinstance(tensor, FakeTensor) for tensor in (batch, *model.parameters(), *state))

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _, peak = read(traced(lambda: GPT(config), torch.randint(256, (8, 256)), run))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert peak.total > 30e9
    assert grown < 0.5e9
    assert seen
    assert all(seen)


# Blocks


def test_granularity_rounds_every_block_up():
    build, batch = lambda: nn.Linear(3, 5), torch.randn(7, 3)
    exact = traced(build, batch, lambda model, batch, _: model(batch).sum().backward())
    rounded = traced(build, batch, lambda model, batch, _: model(batch).sum().backward(), granularity=512)
    # Parameters, their gradients and the batch.
    assert sorted(exact.before.values()) == [5 * 4, 5 * 4, 15 * 4, 15 * 4, 21 * 4]
    assert sorted(rounded.before.values()) == [512] * 5
    sizes = [token.nbytes for token in rounded.tokens if isinstance(token, AllocationEvent)]
    assert sizes
    assert {abs(size) for size in sizes} == {512}
    _, peak = read(rounded)
    assert peak.rest == 0
    assert peak.total == 512 * sum(row.count for row in peak.rows)


def test_a_number_is_never_used_for_two_storages():
    memory = FakeMemory()
    numbers = []
    with memory.entered():
        for _ in range(20):
            made = torch.empty(1000)
            numbers += [number for number, _ in memory.blocks_of(made)]
            del made
    assert len(set(numbers)) == 20
    assert memory.live() == {}


def test_views_are_the_block_that_they_lie_in():
    memory = FakeMemory()
    with memory.entered():
        whole = torch.empty(10, 10)
        assert memory.blocks_of(whole[2:].t()) == memory.blocks_of(whole.detach()) == memory.blocks_of(whole)
    assert memory.live() == {1: 400}


def test_a_block_that_is_resized_takes_the_place_of_the_one_before():
    memory = FakeMemory()
    with memory.entered():
        grown = torch.empty(4)
        grown.resize_(1000)
    assert memory.live() == {1: 4000}


def test_a_real_tensor_is_none_of_the_blocks():
    memory = FakeMemory()
    real = torch.ones(3)
    with memory.entered():
        assert memory.blocks_of(real) == []
        faked = memory.faked({"x": real})["x"]
        assert memory.blocks_of(faked) == [(1, 12)]
    assert real.tolist() == [1, 1, 1]


# Kinds of steps


def test_inference_mode_needs_what_it_needs_without_gradients():
    build, batch, _ = example_gpt()

    def without_gradients(model, batch, _) -> None:
        with torch.no_grad():
            model(batch)

    def inference(model, batch, _) -> None:
        with torch.inference_mode():
            model(batch)

    _, expected = read(traced(build, batch, without_gradients))
    _, peak = read(traced(build, batch, inference))
    assert peak.of("temporary") + peak.of("activation") > 0
    assert Counter(map(told, peak.rows)) == Counter(map(told, expected.rows))


@dataclass
class Reads:
    """A step that reads its loss."""

    value: object = None

    def __call__(self, model, batch, _) -> None:
        self.value = model(batch).sum().item()


def test_a_step_that_reads_a_value_raises():
    with pytest.raises(DataDependentOutputException):
        traced(lambda: nn.Linear(2, 2), torch.ones(1, 2), Reads())


def test_a_step_that_reads_a_value_reads_the_assumed_one():
    step = Reads()
    traced(lambda: nn.Linear(2, 2), torch.ones(1, 2), step, assumed=0)
    assert step.value == 0
    assert isinstance(step.value, float)


def test_a_scaled_step_runs_when_its_gradients_are_assumed_finite():
    scaler = torch.amp.GradScaler("cpu")
    optimizers: list[torch.optim.Optimizer] = []

    def run(model, batch, _) -> None:
        if not optimizers:
            optimizers.append(torch.optim.SGD(model.parameters(), momentum=0.9))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        optimizers[0].zero_grad()

    _, peak = read(traced(lambda: nn.Linear(64, 64), torch.randn(8, 64), run, assumed=0))
    assert peak.of("optimizer state") == peak.of("parameter") == 4 * (64 * 64 + 64)


def test_sparse_gradients_are_refused_and_not_taken_for_nothing():
    def run(model, batch, _) -> None:
        model(batch).sum().backward()

    with pytest.raises(MeasuringError, match=r"torch\.sparse_coo"):
        traced(lambda: nn.Embedding(10, 4, sparse=True), torch.tensor([1, 2]), run)


# Given back


def test_modes_and_profiler_are_given_back_after_an_exception():
    def fails(model, batch, tracker) -> None:
        with phase(tracker, "forward"):
            model(batch)
            raise ValueError("on purpose")

    for warm_ups in (0, 1):
        with pytest.raises(ValueError, match="on purpose"):
            traced(lambda: nn.Linear(2, 2), torch.ones(1, 2), fails, warm_ups=warm_ups)
        gc.collect()
        assert type(torch.ones(2)) is torch.Tensor
        assert torch.ones(2).sum().item() == 2
        device = CpuDevice()
        device.open()
        try:
            kept = torch.empty(1000, dtype=torch.uint8)
            assert device.live() == kept.nbytes
        finally:
            device.close()
    build, batch, loss = mlp()
    assert read(traced(build, batch, Step(loss)))[1].total > 0


def test_a_recording_that_somebody_else_stops_says_so():
    def stops(model, batch, _) -> None:
        model(batch)
        torch.autograd._disable_profiler()

    with pytest.raises(MeasuringError, match="cut short"):
        traced(lambda: nn.Linear(2, 2), torch.ones(1, 2), stops, warm_ups=0)
