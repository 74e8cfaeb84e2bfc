"""A training step sharded over ranks, one of which runs alone: what each rank holds, and what is refused."""

from __future__ import annotations

import copy
import json
import math
import os
import socket
import statistics
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.measuring.explain.sites import Sites
from pytest_gpumem.measuring.measure import prepared as preparing
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.measure.counting import NO_COUNTS
from pytest_gpumem.measuring.measure.reading import run_one_step
from pytest_gpumem.measuring.ranks.consensus import Alone, Consensus
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from pytest_gpumem.measuring.timing.sampling import TimeBudget
from pytest_gpumem.plugin.relations.gradients import assert_same_gradients
from pytest_gpumem.plugin.relations.state import state_of
from pytest_gpumem.torch_support.private_api.distributed import FAKE, store_of_nobody
from pytest_gpumem.torch_support.reachability import blocks_of, reachable_tensors
from pytest_gpumem.torch_support.static_access import parts_of
from tests import preloaded
from tests.support.processes import own_objects_out_of_sight
from tests.workspaces import RELEASE

# torch 2.6 warns of random numbers, of which nothing here depends.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators may not:UserWarning")

WIDTH, INNER, OUTPUTS, BLOCKS, SAMPLES = 64, 128, 8, 4, 16
F32, COUNT = 4, 4
SHAPES = [*[(INNER, WIDTH), (INNER,), (WIDTH, INNER), (WIDTH,)] * BLOCKS, (OUTPUTS, WIDTH), (OUTPUTS,)]
PARAMETERS = F32 * sum(map(math.prod, SHAPES))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, INNER)
        self.down = torch.nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(torch.nn.Module):
    tp_plan: ClassVar = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = torch.nn.Linear(WIDTH, OUTPUTS)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x):
        x = x * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(autouse=True)
def _what_earlier_tests_loaded_is_out_of_sight(suites_objects_hidden):
    """As what was there before the module's tests: torch loads much of its sharding when it is first used."""
    with own_objects_out_of_sight():
        yield


@pytest.fixture
def bench(device, monkeypatch):
    """Where steps are neither counted nor looked at for longer than it takes to see that they repeat."""
    monkeypatch.setattr(preparing, "count_step", lambda *_, **__: NO_COUNTS)
    monkeypatch.setattr(preparing, "FURTHER_STEPS", 1)
    return MeasuringContext(device, time_budget=None)


@contextmanager
def prepared(bench, config, model=Net, samples=SAMPLES, optimizer=None):
    parsed = StepConfig.parse(config)
    if parsed.sharding is not None and parsed.sharding.fully and (why := bench.device.lacks("fully_shard")) is not None:
        pytest.skip(why)
    with prepared_train_step(
        bench,
        model_source(model),
        lambda: torch.ones(samples, WIDTH),
        config=parsed,
        loss=lambda output, _batch: output.square().mean(),
        optimizer=optimizer,
    ) as step:
        yield step


def state(bench, config, **options):
    with prepared(bench, config, **options) as step:
        return state_of(step, step.measure().figures)


def peaks(bench, config, **options) -> dict[str, float]:
    with prepared(bench, config, **options) as step:
        return step.measure().figures.memory.memory_metrics()


def shards(world: int) -> int:
    """Bytes of the first rank's shards: rows of each parameter, rounded up."""
    return F32 * sum(math.ceil(shape[0] / world) * math.prod(shape[1:]) for shape in SHAPES)


# What a rank holds


@pytest.mark.parametrize("world", [1, 512])
def test_the_state_of_a_rank_shrinks_with_the_number_of_ranks(bench, world):
    partitioned = state(bench, f"fp32,shard=zero1,world={world}")
    assert partitioned.parameters.measured == partitioned.gradients.measured == PARAMETERS
    assert partitioned.gradient_buckets.measured == PARAMETERS
    # ZeroRedundancyOptimizer shares out whole parameters: no rank has more than its part and one of the largest.
    states = partitioned.optimizer_state.measured
    assert 2 * PARAMETERS / world <= states <= 2 * (PARAMETERS / world + F32 * INNER * WIDTH) + COUNT * len(SHAPES)
    for kind in ("zero2", "zero3"):
        sharded = state(bench, f"fp32,shard={kind},world={world}")
        assert sharded.parameters.measured == sharded.gradients.measured == shards(world)
        assert sharded.optimizer_state.measured == 2 * shards(world) + COUNT * len(SHAPES)
        assert sharded.other == 0
        for share in (sharded.parameters, sharded.gradients, sharded.optimizer_state, partitioned.optimizer_state):
            assert share.formula == share.measured


def test_the_last_rank_has_less_state_where_rows_do_not_go_round(bench):
    # 128 and 64 rows among three: 43, 43, 42 and 22, 22, 20. Parameters are padded, as collectives want equal parts.
    last = state(bench, "fp32,shard=fsdp,world=3,rank=2")
    assert last.parameters.measured == last.parameters.formula == shards(3)
    rows = {INNER: 42, WIDTH: 20, OUTPUTS: 2}
    here = F32 * sum(rows[shape[0]] * math.prod(shape[1:]) for shape in SHAPES)
    assert last.optimizer_state.measured == last.optimizer_state.formula == 2 * here + COUNT * len(SHAPES)


def test_ddp_holds_all_and_a_copy_of_the_gradients_to_send(bench):
    plain, ddp = state(bench, "fp32"), state(bench, "fp32,shard=ddp,world=4")
    assert ddp.gradient_buckets.measured == ddp.gradient_buckets.formula == PARAMETERS
    assert plain.gradient_buckets.formula == 0
    assert ddp.peak - plain.peak == PARAMETERS


def test_copies_of_the_model_hold_larger_shards(bench):
    assert state(bench, "fp32,shard=hsdp,world=8").parameters.measured == shards(4)
    assert state(bench, "fp32,shard=hsdp:4,world=8").parameters.measured == shards(2)


def test_split_tensors_are_split_and_the_others_are_whole(bench):
    halves = state(bench, "fp32,clip=1,shard=tp:2")
    split = BLOCKS * (INNER * WIDTH + INNER + WIDTH * INNER)
    whole = PARAMETERS - F32 * split
    assert halves.parameters.measured == halves.parameters.formula == whole + F32 * split // 2
    both = state(bench, "fp32,clip=1,shard=fsdp+tp:2,world=8")
    assert both.parameters.measured == both.parameters.formula
    assert both.parameters.measured == pytest.approx(halves.parameters.measured / 4, rel=0.01)


def test_gathering_everything_at_once_takes_more_than_block_by_block(bench):
    kept, sharded = peaks(bench, "fp32,shard=zero2,world=8"), peaks(bench, "fp32,shard=zero3,world=8")
    # All blocks but the one that is gathered at the end of forward.
    assert kept["peak_forward"] - sharded["peak_forward"] >= (BLOCKS - 2) * F32 * 2 * INNER * WIDTH


def test_a_policy_casts_what_is_gathered_and_reduced(bench):
    full = peaks(bench, "fp32,shard=fsdp,world=8")
    half, reduced = (peaks(bench, f"mp-bf16,reduce={dtype},shard=fsdp,world=8") for dtype in ("bf16", "fp32"))
    assert half["peak_forward"] == reduced["peak_forward"] < full["peak_forward"]
    assert half["peak_allocated"] < reduced["peak_allocated"] < full["peak_allocated"]
    # What torch reduces in by itself: the gathered dtype, and in torch 2.15 the parameters' own.
    assert peaks(bench, "mp-bf16,shard=fsdp,world=8") == (half if RELEASE < (2, 15) else reduced)


def test_a_stage_holds_its_blocks_and_as_many_micro_batches_as_its_schedule(bench):
    first = state(bench, "fp32,shard=pp:2,accumulate=4")
    block = F32 * (2 * INNER * WIDTH + INNER + WIDTH)
    assert first.parameters.measured == BLOCKS // 2 * block
    last = state(bench, "fp32,shard=pp:2,accumulate=4,rank=1")
    assert last.parameters.measured == BLOCKS // 2 * block + F32 * (WIDTH * OUTPUTS + OUTPUTS)
    # Two micro-batches are live in the first of two stages, however many there are; all of GPipe's would be.
    few = peaks(bench, "fp32,shard=pp:2,accumulate=4", samples=4 * 64)["peak_backward"]
    many = peaks(bench, "fp32,shard=pp:2,accumulate=8", samples=8 * 64)["peak_backward"]
    micro_batch, live = F32 * 64 * WIDTH, F32 * 64 * (WIDTH + 2 * (WIDTH + 2 * INNER))
    # The batch itself, its outputs and what arrives for backward grow with it.
    assert many - few <= 4 * (3 * micro_batch) < 4 * live


@pytest.mark.parametrize("times", [0, 2])
def test_buckets_and_modules_of_ddp_are_named_whether_the_step_was_timed_or_not(device, monkeypatch, times):
    monkeypatch.setattr("pytest_gpumem.measuring.measure.timed_steps.SECONDS_BETWEEN_SAMPLES", 0.0)
    context = MeasuringContext(device, TimeBudget(0.05) if times else None, sites=Sites(Path(__file__).parents[2]))
    with prepared(context, "fp32,shard=ddp,world=2") as step:
        measured = step.time(step.measure())
        if times == 2:
            measured = step.time_again(measured)
        peak = step.explain(measured).peak
    assert peak.total == measured.metrics()["peak_allocated"]
    (buckets,) = [row for row in peak.rows if row.module == "DistributedDataParallel"]
    assert (buckets.category, buckets.nbytes) == ("gradient", shards(1))
    assert not [row for row in peak.rows if row.category == "unattributed"]
    assert {row.module for row in peak.rows} >= {"layers.*.up", "layers.*.down"}
    assert not [row for row in peak.rows if row.module.startswith("module.")]


def test_micro_batches_are_reduced_once(bench, monkeypatch):
    reduced = []
    from pytest_gpumem.measuring.steps import sharding

    hook = sharding._hook_alone

    def counted(buckets):
        reduce = hook(buckets)

        def counting(state, bucket):
            reduced.append(bucket.index())
            return reduce(state, bucket)

        counting.__annotations__ = reduce.__annotations__
        return counting

    monkeypatch.setattr(sharding, "_hook_alone", counted)
    with prepared(bench, "fp32,shard=ddp,world=2,accumulate=4") as step:
        reduced.clear()
        for phase in step.phases:
            phase.run()
    assert reduced == [0]


# Alone and together


class Resting(Alone):
    rest = Consensus.rest


def held_by(device, config, samples):
    """Bytes that a rank holds before its optimizer's step, by what they are, and the peak of most steps."""
    held, bench = {}, MeasuringContext(device, time_budget=None)
    with prepared(bench, config, samples=samples) as step:
        model = step.model

        def look():
            parts = {"parameters": model.parameters(), "gradients": (one.grad for one in model.parameters())}
            for name, tensors in parts.items():
                held[name] = sum(blocks_of(part for one in tensors for part in parts_of(one)).values())
            state = reachable_tensors([list(step.optimizer.state.values())])
            held["optimizer"] = sum(
                one.numel() * 4 for one in state if type(one) is torch.Tensor and one.dtype == torch.float32
            )

        device.consensus = Resting()
        device.quiesce()
        steps = [run_one_step(step.phases, device, step.other_bytes) for _ in range(8 if "RANK" in os.environ else 4)]
        held["peak"] = statistics.mode(figures["cpu"].own_peak for figures in steps[2:])
        step.training.before_optimizer = look
        for phase in step.phases:
            phase.run()
    return held


RANK = """
import gc, json, sys
sys.path.insert(0, {repository!r})
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from tests.steps.test_sharding import held_by
gc.collect()
gc.freeze()  # as a session does, or each collection of a step goes through all of torch
device = CpuDevice(other_ranks=tuple)  # a session asks for the others' processes
device.open()
print(json.dumps([held_by(device, *one) for one in json.loads(sys.argv[1])]), flush=True)
device.close()
"""


def test_a_rank_alone_holds_what_it_holds_beside_the_other(device):
    # With the other one there a rank talks by gloo, a thread of which frees what it holds longer than its rank unseen. Where a
    # block or two of parameters, or an activation of tp's, is small beside the peak, and in most steps, it shows what else differs.
    samples = {"zero1": 4096, "zero3": 4096, "tp:2": 4}
    if device.lacks("fully_shard") is not None:
        del samples["zero3"]
    source = RANK.format(repository=str(Path(__file__).parents[2]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    asked = json.dumps([(f"fp32,shard={kind}", size) for kind, size in samples.items()])
    ranks = [
        preloaded.start("-c", source, asked, env={**os.environ, **job, "RANK": str(number)}) for number in range(2)
    ]
    try:
        alone = [
            [held_by(device, f"fp32,shard={kind},world=2,rank={number}", size) for kind, size in samples.items()]
            for number in range(2)
        ]
        said = [process.communicate(timeout=200) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], said
    for number, (out, _) in enumerate(said):
        for kind, by_itself, beside in zip(samples, alone[number], json.loads(out), strict=True):
            assert by_itself.pop("peak") == pytest.approx(beside.pop("peak"), rel=0.01), (kind, number)
            assert by_itself == beside, (kind, number)


# What is left behind


def test_a_sharded_step_leaves_no_process_group_and_changes_no_other_step(bench):
    before = peaks(bench, "fp32")
    ddp = peaks(bench, "fp32,shard=ddp,world=2")
    peaks(bench, "fp32,shard=fsdp+tp:2,world=8,rank=5")
    assert not dist.is_initialized()
    assert peaks(bench, "fp32") == before
    assert peaks(bench, "fp32,shard=ddp,world=2") == ddp


def test_a_process_group_that_is_there_is_used_and_left(bench):
    dist.init_process_group(FAKE, store=store_of_nobody(), rank=1, world_size=2)
    try:
        with prepared(bench, "fp32,shard=zero3") as step:
            (weight, *_) = step.model.parameters()
            assert weight.device_mesh.get_local_rank() == 1
        with pytest.raises(
            ConfigError, match=r"world=4, but this is rank 1 in a process group with 2 ranks; leave world= out"
        ):
            peaks(bench, "fp32,shard=zero3,world=4")
        with pytest.raises(ConfigError, match=r"rank=3, but this is rank 1"):
            peaks(bench, "fp32,shard=zero3,rank=3")
    finally:
        dist.destroy_process_group()


# Models


def test_a_model_that_is_sharded_keeps_its_buffers_and_never_has_all_parameters(bench, monkeypatch):
    built = []

    def model():
        net = Net()
        built.append({parameter.device.type for parameter in net.parameters()})
        return net

    with prepared(bench, "fp32,shard=fsdp,world=4", model=model) as step:
        assert step.model.scale.tolist() == [0.5] * WIDTH
        assert all(parameter.to_local().isfinite().all() for parameter in step.model.parameters())
    assert built == [{"meta"}]


def test_parameters_with_two_names_stay_one_or_are_refused(bench):
    class Tied(Net):
        def __init__(self):
            super().__init__()
            self.tail = torch.nn.Linear(WIDTH, OUTPUTS, bias=False)
            self.tail.weight = self.head.weight

        def forward(self, x):
            return super().forward(x) + self.tail(x)

    plain = state(bench, "fp32", model=Tied).parameters.measured
    assert state(bench, "fp32,shard=fsdp,world=2", model=Tied).parameters.measured == plain / 2
    with pytest.raises(ConfigError, match=r"shard=tp:2 would untie head\.weight and tail\.weight"):
        peaks(bench, "fp32,shard=tp:2", model=Tied)


def test_a_buffer_that_is_computed_from_parameters_is_real(bench):
    class Averaged(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("average", self.head.weight.detach().clone())

    whole = state(bench, "fp32,shard=fsdp,world=4", model=Averaged)
    assert whole.buffers == F32 * (OUTPUTS * WIDTH + WIDTH)


def test_an_optimizer_with_groups_of_its_own_is_sharded(bench):
    def decays(parameters):
        parameters = list(parameters)
        groups = [[one for one in parameters if (one.dim() > 1) is large] for large in (True, False)]
        return torch.optim.AdamW(
            [{"params": one, "weight_decay": decay} for one, decay in zip(groups, (0.1, 0.0), strict=True)]
        )

    for config in ("zero1,world=2", "fsdp+tp:2,world=4"):
        own, usual = (state(bench, f"fp32,shard={config}", optimizer=one) for one in (decays, None))
        assert own.optimizer_state == usual.optimizer_state


def test_a_rank_alone_is_not_misled_by_a_process_group_that_is_gone(bench):
    dist.init_process_group(FAKE, store=store_of_nobody(), rank=1, world_size=4)
    try:
        there = peaks(bench, "fp32,clip=1,shard=fsdp+tp:2")
    finally:
        dist.destroy_process_group()
    assert peaks(bench, "fp32,clip=1,shard=fsdp+tp:2,world=4,rank=2") == there


def test_compiled_ddp_has_its_buckets(bench):
    assert state(bench, "fp32,compile=eager,shard=ddp,world=2").gradient_buckets.measured == PARAMETERS


def test_a_model_that_reads_its_parameters_when_it_is_built_is_built_for_real(bench):
    class Reading(Net):
        def __init__(self):
            super().__init__()
            self.largest = float(self.head.weight.max())

    assert peaks(bench, "fp32,shard=fsdp,world=4", model=Reading) == peaks(bench, "fp32,shard=fsdp,world=4")


def test_a_model_without_repeated_blocks_is_gathered_as_a_whole_and_says_so(bench):
    with prepared(bench, "fp32,shard=fsdp,world=4", model=lambda: torch.nn.Linear(WIDTH, OUTPUTS)) as step:
        assert step.measure().notes == (
            "shard=fsdp: no repeated blocks were found, so all parameters are gathered at once",
        )


@pytest.mark.parametrize("kind", ["fsdp,world=2", "tp:2", "pp:2,accumulate=2"])
def test_a_model_that_exists_is_not_changed(bench, kind):
    with pytest.raises(ConfigError, match="changes the model for good; pass a function that builds it"):
        peaks(bench, f"fp32,shard={kind}", model=Net())


def test_a_factory_that_returns_an_existing_model_is_refused_and_leaves_it_alone(bench):
    model = Net()
    for factory, said in (
        (lambda: model, "a model that existed"),
        (lambda: torch.nn.Sequential(model), "a model whose 0 existed"),
    ):
        with pytest.raises(ConfigError, match=f"shard=fsdp changes the model for good, .* returned {said} before"):
            peaks(bench, "fp32,shard=fsdp,world=2", model=factory)
    assert type(model) is Net
    assert {type(one) for one in model.parameters()} == {torch.nn.Parameter}
    assert peaks(bench, "fp32,shard=fsdp,world=2", model=lambda: copy.deepcopy(model))["peak_allocated"] > 0
    assert type(model) is Net


def test_ddp_names_a_parameter_that_gets_no_gradient(bench):
    class Unused(Net):
        def __init__(self):
            super().__init__()
            self.tail = torch.nn.Linear(WIDTH, OUTPUTS)

    for kind in ("ddp", "zero1"):
        with pytest.raises(ConfigError, match=r"each parameter, but tail\.weight and 1 more got no gradient; freeze"):
            peaks(bench, f"fp32,shard={kind},world=2", model=Unused)
    assert peaks(bench, "fp32,shard=fsdp,world=2", model=Unused)["peak_allocated"] > 0

    def frozen():
        model = Unused()
        model.tail.requires_grad_(False)
        return model

    assert peaks(bench, "fp32,shard=ddp,world=2", model=frozen)["peak_allocated"] > 0


# torch 2.6 throws an error into its own generator in a way that Python 3.12 warns of.
@pytest.mark.filterwarnings(r"ignore:the \(type, exc, tb\) signature of throw:DeprecationWarning")
def test_a_model_without_attention_does_not_share_a_sequence(bench, monkeypatch):
    monkeypatch.setattr(type(bench.device), "lacks", lambda *_: None)
    with (
        pytest.raises(ConfigError, match=r"^shard=cp:2: .*scaled_dot_product_attention, but the model never calls"),
        prepared_train_step(
            bench,
            model_source(lambda: torch.nn.Linear(8, 8)),
            torch.ones(2, 16, 8),
            config=StepConfig.parse("fp32,shard=cp:2"),
            loss=lambda output, _batch: output.square().mean(),
        ),
    ):
        pass


class Masked(Net):
    """Takes a mask before the block of a number; no block has that of ``None``."""

    def __init__(self, masked):
        super().__init__()
        self.masked = masked

    def forward(self, x, mask):
        for number, layer in enumerate(self.layers):
            x = layer(x * mask if number == self.masked else x)
        return self.head(x)


@pytest.mark.parametrize(("rank", "named"), [(0, True), (1, False)])
def test_an_input_of_the_model_goes_to_the_first_stage_or_is_refused(bench, rank, named):
    def peak(masked):
        x, mask = torch.ones(SAMPLES, WIDTH), torch.ones(SAMPLES, WIDTH)
        with prepared_train_step(
            bench,
            model_source(lambda: Masked(masked)),
            {"x": x, "mask": mask} if named else (x, mask),
            config=StepConfig.parse(f"fp32,shard=pp:2,accumulate=2,rank={rank}"),
            loss=lambda output, _batch: output.square().mean(),
        ) as step:
            return step.measure().figures.memory.own_peak

    assert peak(0) > 0
    assert peak(None) > 0
    with pytest.raises(
        ConfigError, match=r"shard=pp:2: stage 1 takes the model's input 'mask', but stages after the first get only"
    ):
        peak(BLOCKS - 1)


def test_ddp_takes_a_model_that_exists_and_leaves_it_as_it_was(bench):
    model = Net()
    assert peaks(bench, "fp32,shard=ddp,world=2", model=model)["peak_allocated"] > 0
    assert type(model) is Net
    assert all(parameter.grad is None for parameter in model.parameters())


def test_an_optimizer_that_exists_is_refused(bench):
    model = Net()
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(ConfigError, match=r"pass a function: optimizer=lambda parameters"):
        peaks(bench, "fp32,shard=zero1,world=2", model=model, optimizer=optimizer)


def test_an_optimizer_of_ones_own_is_sharded(bench):
    momentum = state(
        bench,
        "fp32,shard=zero3,world=8",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    )
    assert momentum.optimizer_state.measured == momentum.optimizer_state.formula == shards(8)


def planned(plan) -> type[Net]:
    return type("Planned", (Net,), {"tp_plan": plan})


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (None, "Planned has no tp_plan"),
        ({"layers.*.up": "columns"}, r"tp_plan\['layers.\*.up'\] is 'columns'; use colwise, rowwise"),
        ({"blocks.*.up": "colwise"}, r"tp_plan\['blocks\.\*\.up'\] matches no module of Planned"),
    ],
)
def test_layers_are_split_by_the_models_plan_only(bench, plan, said):
    with pytest.raises(ConfigError, match=said):
        peaks(bench, "fp32,shard=tp:2", model=planned(plan))


def test_a_plan_may_be_of_torchs_own_styles(bench):
    styles = planned({"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()})
    assert peaks(bench, "fp32,shard=tp:2", model=styles) == peaks(bench, "fp32,shard=tp:2")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ("shard=pp:4,accumulate=2", "add accumulate=4 or more"),
        ("shard=pp:8,accumulate=8", "4 blocks cannot be split into 8 segments"),
        ("shard=ddp", r"shard=ddp needs the number of ranks; add world=N"),
    ],
)
def test_a_sharding_that_lacks_micro_batches_blocks_or_the_number_of_ranks_says_so(bench, config, said):
    with pytest.raises(ConfigError, match=said):
        peaks(bench, config)


def test_gradients_of_a_rank_alone_are_not_compared(device):
    with pytest.raises(ConfigError, match=r"each rank has its own gradients; leave shard= out"):
        assert_same_gradients(
            device, model_source(Net), torch.ones(SAMPLES, WIDTH), (StepConfig.parse("shard=ddp,world=2"), StepConfig())
        )
