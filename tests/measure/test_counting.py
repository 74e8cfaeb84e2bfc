"""What a step does, counted: FLOPs, operators and syncs that a hand derives, in every way that a step is run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pytest_gpumem.facts.values.layers import folded
from pytest_gpumem.facts.values.operator_counts import Tally, without_places
from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.explain.call_sites import OperatorSites
from pytest_gpumem.measuring.explain.sites import Sites
from pytest_gpumem.measuring.measure.context import MeasuringContext
from pytest_gpumem.measuring.measure.counting import CountResult, Counts, count_step, with_lines
from pytest_gpumem.measuring.measure.syncs import HostTensors
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.measuring.steps.inference import quantized
from pytest_gpumem.measuring.steps.model_source import model_source
from pytest_gpumem.measuring.steps.train_step import prepared_train_step
from tests.measuring import measure_infer_step


class Meta:
    """A device that does not hold the host's tensors, as a GPU does not."""

    torch_device = torch.device("meta")

    def launches(self, run):
        run()
        return {"gemm": 5, "relu": 2}


CPU = CpuDevice()


def counted(step, device=CPU) -> Counts:
    found = count_step(step, device)
    assert found.failure is None
    return found.counts


@pytest.fixture
def bench(device):
    return MeasuringContext(device, None)


def trained(bench, model, batch, config: str, loss=None, optimizer=None) -> Counts:
    """The counts of a training step under a config, in the state that it repeats in."""
    parsed = StepConfig.parse(config)
    with prepared_train_step(bench, model_source(model), batch, config=parsed, loss=loss, optimizer=optimizer) as ready:
        return counted(lambda: [phase.run() for phase in ready.phases])


# A multilayer perceptron: x [B, I] -> linear -> relu -> linear -> [B, O]. A product of [m, k] and [k, n] is 2mkn FLOPs.

B, I, H, O = 3, 8, 16, 4  # noqa: E741 - the dimensions' usual names
FIRST, SECOND = 2 * B * I * H, 2 * B * H * O
MLP_FLOPS = {
    # Forward; backward of the second layer's weight and input; of the first one's weight, since x wants no gradient.
    "none": (FIRST + SECOND) + 2 * SECOND + FIRST,
    # Both layers are checkpointed as one. The last product is not computed again: nobody needs its result.
    "modules": (FIRST + SECOND) + FIRST + 2 * SECOND + FIRST,
}
# Forward: addmm, relu, addmm, and the loss's sum. Backward: ones_like; mm, mm, sum (bias); threshold; mm, sum.
FORWARD, LOSS = 3, 1
BACKWARD = 1 + 3 + 1 + 2
MLP_OPERATORS = {
    "none": FORWARD + LOSS + BACKWARD,
    # Again: addmm, relu.
    "modules": FORWARD + LOSS + BACKWARD + 2,
}
PARAMETERS = 4
# add_ (its count), mul_ (decay), lerp_, mul_, addcmul_, the count's _local_scalar_dense, sqrt, div, add_, addcdiv_
ADAMW = 10 * PARAMETERS
SGD = 1 * PARAMETERS


class Perceptron(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(I, H), torch.nn.ReLU(), torch.nn.Linear(H, O))

    def forward(self, x):
        return self.layers(x)


def summed(output, _batch):
    return output.sum()


def perceptron(bench, config: str, **more) -> Counts:
    return trained(bench, Perceptron, torch.randn(B, I), config, summed, **more)


@pytest.mark.parametrize(
    ("kind", "config", "operators"),
    [
        ("none", "optimizer=none", 0),
        ("none", "optimizer=adamw", ADAMW),
        ("modules", "checkpoint=modules:layers,optimizer=sgd", SGD),
    ],
)
def test_a_perceptron_counts_what_a_hand_derives(bench, kind, config, operators):
    counts = perceptron(bench, config)
    assert counts == Counts(MLP_FLOPS[kind], MLP_OPERATORS[kind] + operators, 0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_of_ones_own_counts_the_forward_again(use_reentrant):
    model, x = Perceptron(), torch.randn(B, I, requires_grad=True)

    def step():
        checkpoint(model.layers, x, use_reentrant=use_reentrant).sum().backward()

    # The input wants a gradient, too. Only the reentrant kind computes the last product again.
    again = FIRST + (SECOND if use_reentrant else 0)
    assert counted(step).flops == (FIRST + SECOND) + again + 2 * SECOND + 2 * FIRST


def test_micro_batches_do_the_same_products_in_parts(bench):
    model, batch = Perceptron, torch.randn(4, I)
    whole, halves = (
        trained(bench, model, batch, f"fp32,optimizer=none,accumulate={parts}", summed) for parts in (1, 2)
    )
    assert halves.flops == whole.flops
    # Each half its own forward, loss and backward; the loss is divided by 2 (forward and backward), and gradients are added.
    assert halves.operators == 2 * (whole.operators + 2) + PARAMETERS
    assert halves.syncs == whole.syncs == 0


def test_the_forward_counts_the_same_in_inference_mode_with_composite_operators(bench):
    step = measure_infer_step(bench, Perceptron, torch.randn(B, I))
    assert step.figures.counted.counts == Counts(FIRST + SECOND, FORWARD, 0)
    assert step.metrics().items() >= {"flops": FIRST + SECOND, "operators": FORWARD, "syncs": 0}.items()


# GPT blocks: T tokens of width C, in heads, with a causal attention of its own kernel.

T, C, HEADS, LAYERS = 6, 16, 2, 2


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = torch.nn.LayerNorm(C), torch.nn.LayerNorm(C)
        self.qkv, self.proj = torch.nn.Linear(C, 3 * C), torch.nn.Linear(C, C)
        self.fc, self.out = torch.nn.Linear(C, 4 * C), torch.nn.Linear(4 * C, C)

    def forward(self, x):
        q, k, v = (part.view(-1, T, HEADS, C // HEADS).transpose(1, 2) for part in self.qkv(self.ln_1(x)).split(C, -1))
        attention = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).reshape(-1, T, C))
        return x + self.out(torch.nn.functional.gelu(self.fc(self.ln_2(x))))


class Gpt(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(LAYERS)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum()


# qkv is C x 3C, proj C x C, fc C x 4C, out 4C x C: 12 C^2 weights, each multiplied with B T tokens.
LINEAR = 2 * B * T * 12 * C * C
OUT = 2 * B * T * 4 * C * C
# Scores of T tokens with T tokens in C dimensions (all heads), and as much to weigh the values.
ATTENTION = 2 * (2 * B * T * T * C)
# The scores again, and the gradients of query, key, scores and values.
ATTENTION_BACKWARD = 5 * (2 * B * T * T * C)
FORWARD_FLOPS = LAYERS * (LINEAR + ATTENTION)
# Each layer has a gradient of its weight and one of its input: norms with weights of their own come before.
GPT_FLOPS = FORWARD_FLOPS + LAYERS * (2 * LINEAR + ATTENTION_BACKWARD)
# Of what is computed again, the last product is not: nobody needs its result.
AGAIN = {
    "none": 0,
    "blocks": FORWARD_FLOPS - LAYERS * OUT,
    "sequential:1": FORWARD_FLOPS - OUT,
    # The products are saved.
    "ops": 0,
}


@pytest.mark.parametrize(
    ("precision", "kind"),
    [("fp32", "none"), ("amp-bf16", "blocks"), ("fp32", "sequential:1"), ("fp32", "ops"), ("amp-bf16", "ops")],
)
def test_gpt_blocks_count_their_products_and_those_that_are_computed_again(bench, precision, kind):
    counts = trained(bench, Gpt, torch.randn(B, T, C), f"{precision},checkpoint={kind},optimizer=none")
    assert (counts.flops, counts.syncs) == (GPT_FLOPS + AGAIN[kind], 0)


def test_recomputing_cheap_operators_adds_calls_and_no_multiplications(bench):
    plain, cheap, all_again = (
        trained(bench, Gpt, torch.randn(B, T, C), f"checkpoint={kind},optimizer=none").operators
        for kind in ("none", "ops", "blocks")
    )
    assert plain < cheap < all_again


def test_counting_leaves_the_step_as_it_was(bench):
    parsed = StepConfig.parse("amp-bf16,checkpoint=blocks,accumulate=3")
    with prepared_train_step(bench, model_source(Gpt), torch.randn(B, T, C), config=parsed) as ready:
        runs = [count_step(lambda: [phase.run() for phase in ready.phases], CPU) for _ in range(3)]
    assert runs[0] == runs[1] == runs[2]


# Syncs: on the CPU as often as a GPU would have waited

X = torch.linspace(-1.0, 1.0, 12).view(3, 4)
SYNCS = {
    "computing": (lambda: (X @ X.T).softmax(-1), 0),
    "item": (lambda: X.sum().item(), 1),
    "nonzero": (X.nonzero, 1),
    "mask": (lambda: X[X > 0], 1),
    "where": (lambda: torch.where(X > 0, X, 0.0), 0),
    "fill a mask": (lambda: X.clone().masked_fill_(X > 0, 0.0), 0),
    "indices": (lambda: X[torch.arange(2, device=X.device)], 0),
    "indices of the host": (lambda: X[torch.arange(2)], 1),
    "equal": (lambda: torch.equal(X, X), 1),
    "repeated": (lambda: X.repeat_interleave(torch.ones(3, dtype=torch.int64, device=X.device), dim=0), 1),
    "repeated to a known size": (
        lambda: X.repeat_interleave(torch.ones(3, dtype=torch.int64, device=X.device), dim=0, output_size=3),
        0,
    ),
    "list": (X.tolist, 1),
    "cpu": (X.cpu, 1),
    "to cpu": (lambda: X.to("cpu"), 1),
    "to cpu in time": (lambda: X.to("cpu", non_blocking=True), 0),
    "cpu once and then read": (lambda: [X.cpu().tolist(), X.sum().to("cpu").item()], 2),
    "computing on the host": (lambda: (X.cpu() + 1).sum().item(), 1),
    "text": (lambda: repr(X), 1),
    "text of a scalar": (lambda: f"{X.sum():.2f}", 1),
    "the host's own": (lambda: torch.tensor([1.0, 2.0]).sum().item(), 0),
    "from Python to the device": (lambda: X * torch.tensor(2.0, device=X.device), 1),
    "values for another's device": (lambda: X.new_tensor([1.0, 2.0]), 1),
    "an array for the device": (lambda: torch.as_tensor(X.numpy(), device=X.device), 1),
    "scalars of the device in a list": (lambda: torch.tensor([X.sum(), X.mean()]), 2),
    "a scalar of the host": (lambda: X * torch.tensor(2.0), 0),
    "made on the device": (lambda: X + torch.zeros(4, device=X.device), 0),
    "host to device": (lambda: X + torch.arange(4).to(X.device), 1),
    "host to device in time": (lambda: X + torch.arange(4).to(X.device, non_blocking=True), 0),
    "as another": (lambda: torch.arange(4).to(X), 1),
    "there already": (lambda: X.to(X.device), 0),
    "to a dtype": (lambda: X.to(torch.float64), 0),
    "copied into": (lambda: X.clone().copy_(torch.ones(3, 4)), 1),
    "what a cast made": (lambda: torch.ones(2).double().sum().item(), 0),
}


def inferring(step):
    def run():
        with torch.inference_mode():
            step()

    return run


@pytest.mark.parametrize(("step", "syncs"), SYNCS.values(), ids=SYNCS.keys())
def test_what_makes_the_host_wait_is_counted_alike_in_inference_mode(step, syncs):
    assert counted(step).syncs == counted(inferring(step)).syncs == syncs


def test_writing_through_a_mask_syncs_only_if_the_number_of_values_is_needed():
    x = X.clone()

    def fill():
        x[x > 2] = 0.0

    def double():
        x[x > 0] = x[x > 0] * 2

    assert (counted(fill).syncs, counted(double).syncs) == (0, 2)


def test_a_copy_that_left_the_device_is_not_what_it_was_copied_from():
    def step():
        host = X.cpu()
        host.add_(1000.0)

    before = X.clone()
    counted(step)
    assert torch.equal(X, before), "as on a GPU"


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "Adagrad"])
def test_an_optimizer_that_counts_on_the_host_makes_nobody_wait(bench, name):
    # They are read with item() for every parameter.
    made = getattr(torch.optim, name)
    assert perceptron(bench, "fp32", optimizer=lambda parameters: made(parameters, lr=1e-3)).syncs == 0


def test_an_optimizer_that_reads_its_state_on_the_device_waits(bench):
    # ASGD's eta and mu: each is read twice, for every parameter.
    assert perceptron(bench, "fp32", optimizer=torch.optim.ASGD).syncs == 4 * PARAMETERS


def test_scaled_gradients_are_looked_through_once_a_step(bench):
    assert perceptron(bench, "amp-fp16").syncs == 1
    assert perceptron(bench, "amp-fp16,clip=1.0").syncs == 1


# As on a GPU, where a tensor's own device tells


def test_elsewhere_the_hosts_tensors_are_read_without_waiting():
    assert counted(lambda: X.sum().item(), Meta()).syncs == 0


@pytest.mark.parametrize(("non_blocking", "syncs"), [(False, 1), (True, 0)])
def test_a_copy_between_host_and_device_is_one_sync_unless_it_need_not_block(non_blocking, syncs):
    there = torch.empty(3, 4, device="meta")
    assert counted(lambda: X.to("meta", non_blocking=non_blocking), Meta()).syncs == syncs
    assert counted(lambda: there.copy_(X, non_blocking=non_blocking), Meta()).syncs == syncs


def test_values_of_python_are_copied_to_a_device_though_no_operator_shows_it():
    there = torch.empty(2, device="meta")
    assert counted(lambda: torch.tensor([1.0, 2.0], device="meta"), Meta()).syncs == 1
    assert counted(lambda: there.new_tensor([1.0, 2.0]), Meta()).syncs == 1
    assert counted(lambda: torch.tensor([1.0, 2.0]), Meta()).syncs == 0


def test_an_array_is_copied_to_a_device_by_an_operator_and_not_counted_twice():
    assert counted(lambda: torch.as_tensor(X.numpy(), device="meta"), Meta()).syncs == 1


def test_a_device_knows_its_tensors_by_their_device():
    host = HostTensors(Meta.torch_device)
    assert X in host
    assert torch.empty(1, device="meta") not in host
    host.mark(X, host=False)
    assert X in host


# Operators


def test_views_and_allocations_are_no_work():
    def step():
        y = torch.empty_like(X).copy_(X)
        y.view(-1).detach()[2:].unsqueeze(0).expand(2, -1).t_()

    assert counted(step).operators == 1


def test_a_convolution_counts_each_product_of_a_weight_and_a_pixel():
    layer, x = torch.nn.Conv2d(3, 5, 3, bias=False), torch.randn(2, 3, 8, 8)
    pixels, weights = 2 * 6 * 6, 5 * 3 * 3 * 3
    assert counted(lambda: layer(x)).flops == 2 * pixels * weights
    # Backward: of the weight alone.
    assert counted(lambda: layer(x).sum().backward()).flops == 2 * (2 * pixels * weights)


@pytest.mark.filterwarnings("ignore")  # importing torchao warns
def test_int8_weights_count_as_the_products_that_they_are():
    pytest.importorskip("torchao")
    model = quantized(torch.nn.Sequential(torch.nn.Linear(64, 32)), StepConfig(weights="int8"))
    x = torch.ones(2, 64)
    assert counted(inferring(lambda: model(x))).flops == 2 * 2 * 64 * 32


# Which operators, and where


def made_of(counted: CountResult, metric: str) -> dict[str, int]:
    """The operators of a count, wherever they are."""
    return {tally.operator: tally.amount for tally in without_places(counted.by_operator[metric])}


def test_counts_are_made_of_operators_that_add_up_to_them():
    model, x = Perceptron(), torch.randn(B, I)
    found = count_step(lambda: model(x).sum().backward(), CPU)
    assert made_of(found, "operators") == {
        "addmm": 2, "relu": 1, "sum": 3, "ones_like": 1, "mm": 3, "threshold_backward": 1
    }  # fmt: skip
    assert made_of(found, "flops") == {"addmm": FIRST + SECOND, "mm": 2 * SECOND + FIRST}
    assert made_of(found, "syncs") == {}


def test_the_host_waits_in_operators_and_in_functions_by_name():
    found = count_step(lambda: [X.sum().item(), X.tolist(), X.cpu(), repr(X)], CPU)
    assert made_of(found, "syncs") == {"__repr__()": 1, "_local_scalar_dense": 1, "cpu()": 1, "tolist()": 1}


def test_an_operator_of_ones_own_is_told_with_its_library():
    @torch.library.custom_op("gpumem_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert made_of(count_step(lambda: double(X), CPU), "operators") == {"gpumem_test::double": 1}


@pytest.fixture
def places():
    return lambda: OperatorSites(Sites(Path(__file__).parents[1]), CPU.torch_device)


def lines_of(step, places) -> dict[tuple[str, str], set[str]]:
    """The operators of a step, but for sums and what is at no line, by module and by the text of the line."""
    step()  # from now on gradients are added to those that there are
    plain = count_step(step, CPU)
    found = with_lines(step, CPU, plain, places())
    assert {name: without_places(tallies) for name, tallies in found.by_operator.items()} == plain.by_operator
    text = Path(__file__).read_text(encoding="utf-8").splitlines()
    lines: dict[tuple[str, str], set[str]] = {}
    for tally in found.by_operator["operators"]:
        if tally.place.site and tally.operator not in ("sum", "ones_like", "expand"):
            line = text[int(tally.place.site.rpartition(":")[2]) - 1].strip()
            lines.setdefault((folded(tally.place.module), line), set()).add(tally.operator)
    return lines


class Halves(torch.nn.Module):
    def __init__(self, again=None):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Linear(I, I) for _ in range(2)])
        self.again = again

    def act(self, x):
        return x.tanh()

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        if self.again is not None:
            return checkpoint(self.act, x, use_reentrant=self.again)
        return self.act(x)


@pytest.mark.parametrize("again", [None, False, True], ids=["plain", "checkpointed", "reentrant"])
def test_operators_have_forwards_lines_in_forward_backward_and_recomputation(again, places):
    model, x = Halves(again), torch.randn(B, I)
    assert lines_of(lambda: model(x).sum().backward(), places) == {
        ("layers.*", "x = layer(x)"): {"addmm", "mm"},
        ("Halves", "return x.tanh()"): {"tanh", "tanh_backward"},
    }


def test_a_function_with_a_backward_of_its_own_has_its_lines(places):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.mul(2)

        @staticmethod
        def backward(ctx, gradient):
            return gradient.div(2)

    x = torch.ones(4, requires_grad=True)
    assert lines_of(lambda: Doubled.apply(x).sum().backward(), places) == {
        ("", "return x.mul(2)"): {"mul"},
        ("", "return gradient.div(2)"): {"div"},
    }


def test_a_node_that_was_made_before_the_step_is_at_no_line(places):
    x = torch.ones(4, requires_grad=True)
    held = [x.exp().sum()]

    def step():
        held.pop().backward()
        held.append(x.exp().sum())

    assert lines_of(step, places) == {("", "held.append(x.exp().sum())"): {"exp"}}


def test_what_is_not_counted_alike_again_is_left_as_it_was(places):
    sizes = [1, 1, 3]

    def step():
        for _ in range(sizes.pop()):
            X.exp()
        X.sum().item()

    step()
    plain = count_step(step, CPU)
    sizes.append(2)
    found = with_lines(step, CPU, plain, places())
    assert found.by_operator["operators"] == plain.by_operator["operators"]
    assert [tally.place.site != "" for tally in found.by_operator["syncs"]] == [True]


def test_what_a_step_raises_when_its_lines_are_asked_for_leaves_its_counts(places):
    plain = count_step(X.exp, CPU)
    assert with_lines(lambda: 1 // 0, CPU, plain, places()) == plain


# What cannot be counted


def test_launches_are_those_of_the_device_and_take_a_run_of_their_own():
    ran = []
    assert counted(lambda: ran.append(True), Meta()) == Counts(0, 0, 0, 7)
    assert len(ran) == 2


@pytest.mark.filterwarnings("ignore")  # of torch's own use of torch.jit, when the compiler is imported
def test_code_compiled_by_a_step_is_counted_in_eager_mode_and_compiled_afterwards():
    ran = []

    def backend(graph, _inputs):
        return lambda *values: (ran.append(True), graph(*values))[1]

    @torch.compile(backend=backend, fullgraph=True)
    def doubled_and_more(x):
        return x * 2 + 1

    doubled_and_more(X)
    assert len(ran) == 1
    assert counted(lambda: doubled_and_more(X)).operators == 2
    assert len(ran) == 1
    doubled_and_more(X)
    assert len(ran) == 2


def test_of_what_is_compiled_only_launches_are_counted():
    ran = []
    found = count_step(lambda: ran.append(True), Meta(), is_compiled=True)
    assert (found.counts, found.failure, len(ran)) == (Counts(launches=7), None, 1)
    assert found.counts.metrics() == {"launches": 7}
    assert found.by_operator == {"launches": (Tally("gemm", 5), Tally("relu", 2))}
    assert count_step(lambda: pytest.fail("it ran"), CPU, is_compiled=True).counts == Counts()


def test_what_a_step_raises_when_it_is_counted_is_told_and_nothing_is_counted():
    def step():
        raise ValueError("no more batches\nand much more")

    found = count_step(step, CPU)
    assert found.counts.metrics() == {}
    assert found.failure == "not counted: ValueError: no more batches"


def test_a_step_that_could_not_be_counted_holds_nothing():
    held = []

    def step():
        mine = torch.ones(10)
        held.append(torch.multiprocessing.reductions.StorageWeakRef(mine.untyped_storage()))
        raise ValueError

    assert count_step(step, CPU).failure == "not counted: ValueError"
    assert held[0].expired()


def test_what_is_counted_at_none_has_no_lines_and_is_no_error(places):
    plain = count_step(X.exp, CPU)
    nothing = replace(plain, by_operator={**plain.by_operator, "launches": ()})
    assert with_lines(X.exp, CPU, nothing, places()).by_operator["launches"] == ()
