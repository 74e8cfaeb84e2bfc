"""What a peak on a GPU is made of: to the byte the peak of the statistics, with modules, lines, workspaces, and files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint as computed_again

from pytest_gpumem.base.units import format_bytes
from pytest_gpumem.facts.values.events import AllocationEvent, SpanBegin
from tests.gpu.project import without_chance
from tests.workspaces import KEPT

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_gpumem.facts.measurement import Measurement
    from pytest_gpumem.facts.values.composition import Composition, Row
    from pytest_gpumem.facts.values.events import Token
    from pytest_gpumem.measuring.devices.contract import Device
    from pytest_gpumem.plugin.fixture import Gpumem
    from tests.gpu.project import GpuProject

# What another library or its torch warn of is not what these tests are about.
pytestmark = pytest.mark.filterwarnings("default")

HERE = "tests/gpu/test_composition.py"
VOCABULARY, WIDTH, HEADS, TOKENS, SAMPLES, LAYERS = 503, 256, 4, 128, 8, 4


class Block(torch.nn.Module):
    """A layer of a GPT, with attention written out."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention = torch.nn.LayerNorm(WIDTH)
        self.heads = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.before_mlp = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, tokens, _ = x.shape
        heads = self.heads(self.before_attention(x)).view(samples, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind()
        weights = torch.softmax(query @ key.transpose(-2, -1), dim=-1)
        x = x + self.out((weights @ value).transpose(1, 2).reshape(samples, tokens, WIDTH))
        return x + self.down(functional.gelu(self.up(self.before_mlp(x))))


class Gpt(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def tokens() -> torch.Tensor:
    return torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=torch.Generator().manual_seed(0))


def adds_up(measured: Measurement) -> Composition:
    """Assert that the composition is that of the peak which the statistics gave, with next to nothing unexplained."""
    composition = measured.composition
    assert composition.notes == ()
    assert composition.total == measured.peak_allocated
    assert composition.rest == 0
    assert sum(row.nbytes for row in composition.rows) == measured.peak_allocated
    assert abs(composition.of("unattributed")) < 0.02 * composition.total
    return composition


def made_in_backward(composition: Composition) -> list[Row]:
    return [row for row in composition.rows if "Backward" in row.operator]


# The peak


@pytest.mark.parametrize("config", ["fp32", "amp-fp16", "fp32,checkpoint=blocks"])
def test_the_rows_of_a_training_step_add_up_to_the_peak_of_the_statistics(gpumem: Gpumem, config: str) -> None:
    composition = adds_up(gpumem.train_step(Gpt, tokens(), config=config, explain=True))
    state = sum(parameter.nbytes for parameter in Gpt().parameters())
    assert composition.of("parameter") == state
    # AdamW's counts of steps are on the host.
    assert composition.of("optimizer state") == 2 * state
    assert bool(composition.recomputed) == ("checkpoint" in config)


def test_inference_and_a_function_are_explained_to_the_byte(gpumem: Gpumem) -> None:
    adds_up(gpumem.infer_step(Gpt, tokens(), explain=True, name="inference"))
    left = torch.ones(1000, 1001, device=gpumem.device)

    def step() -> None:
        (left.T @ left).relu()

    adds_up(gpumem.measure(step, explain=True, name="function"))


def test_a_step_under_vmap_is_explained_to_the_byte(gpumem: Gpumem) -> None:
    rows = torch.ones(64, 4096, device=gpumem.device)
    composition = adds_up(gpumem.measure(lambda: torch.vmap(lambda row: (row * 2 + 1).square())(rows), explain=True))
    made = [(row.operator, row.tensor) for row in composition.rows if row.site.startswith(HERE)]
    assert made == [("add", "float32[64, 4096]"), ("mul", "float32[64, 4096]")]


# Where


@pytest.mark.parametrize(
    ("checkpoint", "modules"),
    [("none", {"head"}), ("blocks", {"head", "blocks.*.heads", "blocks.*.up", "blocks.*.down"})],
)
def test_what_backward_allocates_has_the_lines_of_the_model(gpumem: Gpumem, checkpoint: str, modules: set[str]) -> None:
    config = f"fp32,optimizer=none,checkpoint={checkpoint}"
    rows = made_in_backward(adds_up(gpumem.train_step(Gpt, tokens(), config=config, explain=True)))
    assert modules <= {row.module for row in rows}
    assert [row.text() for row in rows if not row.site.startswith(f"{HERE}:")] == []


def test_activations_are_those_of_forward_and_have_its_modules(gpumem: Gpumem) -> None:
    composition = adds_up(gpumem.train_step(Gpt, tokens(), config="fp32,optimizer=none", explain=True))
    weights = SAMPLES * HEADS * TOKENS * TOKENS * 4
    assert composition.of("activation", "blocks.*") >= LAYERS * weights
    shape = f"float32[{SAMPLES}, {HEADS}, {TOKENS}, {TOKENS}]"
    (softmax,) = (row for row in composition.rows if row.tensor == shape and row.operator == "_softmax")
    assert (softmax.count, softmax.category, softmax.module) == (LAYERS, "activation", "blocks.*")


def test_backward_has_a_workspace_of_its_own_in_the_recording_as_in_the_step(gpumem: Gpumem) -> None:
    with gpumem.track("forward") as alone:
        matrix = torch.ones(64, 64, device=gpumem.device)
        matrix @ matrix
        del matrix
    one = alone.measurement.peak_allocated - 2 * 64 * 64 * 4
    composition = adds_up(gpumem.train_step(Gpt, tokens(), config="fp32", explain=True, name="step"))
    assert composition.of("workspace") >= (2 if KEPT else 1) * one > 0


# Device


def changes(recorded: list[Token]) -> list[int]:
    return [token.nbytes for token in recorded if isinstance(token, AllocationEvent)]


def test_a_recorded_stretch_tells_what_was_asked_for_and_in_which_operator(device: Device) -> None:
    before = torch.empty(513, dtype=torch.uint8, device="cuda")
    recorded: list[Token] = []
    with device.recorded(recorded):
        kept = torch.empty(1001, dtype=torch.uint8, device="cuda")
        del before
        torch.empty(10_000_001, dtype=torch.uint8, device="cuda")
    assert changes(recorded) == [1001, -513, 10_000_001, -10_000_001]
    assert {token.name for token in recorded if isinstance(token, SpanBegin)} == {"aten::empty"}
    assert kept.is_cuda


def test_a_block_that_another_stream_still_uses_lives_until_it_is_done(device: Device) -> None:
    recorded: list[Token] = []
    side = torch.cuda.Stream()
    with device.recorded(recorded):
        used = torch.empty(10_000_001, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
        used.record_stream(side)
        del used
        kept = torch.empty(1001, dtype=torch.uint8, device="cuda")
        device.release_workspaces()
    assert changes(recorded) == [10_000_001, 1001, -10_000_001]
    assert kept.is_cuda


def step_of(checkpoints: bool) -> Callable[[], None]:
    model, given = Gpt().to("cuda"), tokens().to("cuda")

    def step() -> None:
        x = model.embedding(given)
        for block in model.blocks:
            x = computed_again(block, x, use_reentrant=False) if checkpoints else block(x)
        functional.cross_entropy(model.head(x).flatten(0, 1), given.flatten()).backward()
        model.zero_grad()

    return step


@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpointed"])
def test_a_node_leads_back_to_its_operator_whichever_thread_counts(device: Device, checkpoints: bool) -> None:
    step = step_of(checkpoints)
    # What is computed again is numbered by backward's thread, which comes near the numbers of the other one.
    for _ in range(5):
        step()
    recorded: list[Token] = []
    with device.recorded(recorded):
        step()
    made: dict[int, set[str]] = {}
    spans = [token for token in recorded if isinstance(token, SpanBegin) and token.sequence >= 0]
    for span in spans:
        if span.kind == "operator":
            made.setdefault(span.sequence, set()).add(plain(span.name.removeprefix("aten::")))
    nodes = [span for span in spans if span.kind == "node"]
    assert len(nodes) > 20 * LAYERS
    assert [node for node in nodes if not any(plain(node.name).startswith(name) for name in made[node.sequence])] == []


def plain(name: str) -> str:
    return name.replace("_", "").lower()


@pytest.mark.parametrize("checkpoints", [False, True], ids=["plain", "checkpointed"])
def test_the_highest_point_of_the_events_is_the_peak_of_the_statistics(device: Device, checkpoints: bool) -> None:
    step = step_of(checkpoints)
    step()
    device.quiesce()
    live = device.live()
    recorded: list[Token] = []
    with device.recorded(recorded):
        torch.cuda.reset_peak_memory_stats()
        step()
        peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    now, highest = live, live
    for change in changes(recorded):
        now += change
        highest = max(highest, now)
    assert highest == peak
    assert now == device.live()


# What is left behind


def test_recording_leaves_no_history_on_and_moves_no_figure(gpumem: Gpumem) -> None:
    plain = gpumem.train_step(Gpt, tokens(), config="fp32", explain=False, name="before")
    explained = gpumem.train_step(Gpt, tokens(), config="fp32", explain=True, name="explained")
    assert not torch._C._cuda_isHistoryEnabled()
    again = gpumem.train_step(Gpt, tokens(), config="fp32", explain=False, name="after")
    assert without_chance(plain.metrics) == without_chance(explained.metrics) == without_chance(again.metrics)


def test_somebody_elses_history_goes_on(gpumem: Gpumem) -> None:
    torch.cuda.memory._record_memory_history(context=None)
    try:
        torch.empty(1001, dtype=torch.uint8, device="cuda")
        adds_up(gpumem.train_step(Gpt, tokens(), config="fp32", explain=True))
        assert torch._C._cuda_isHistoryEnabled()
        traces = torch.cuda.memory._snapshot()["device_traces"]
    finally:
        torch.cuda.memory._record_memory_history(None)
    assert any(entry["action"] == "alloc" and entry["size"] == 1001 for entry in traces[gpumem.device.index])


STEP = """
def step():
    weight = torch.ones(1000, 1001, device="cuda", requires_grad=True)
    (weight.T @ weight).sum().backward()


def test_a_step(gpumem):
    gpumem.measure(step)
    assert not torch._C._cuda_isHistoryEnabled()
"""


def test_a_recorded_step_leaves_a_snapshot_for_the_viewer(gpu_project: GpuProject) -> None:
    gpu_project.write(STEP)
    result = gpu_project.run("--gpumem-explain=always", "--gpumem-artifacts=kept", "--no-gpumem-time")
    result.assert_outcomes(passed=1)
    (snapshot,) = (gpu_project.path / "kept").glob("*.snapshot.pickle")
    # Looked at, not loaded: a pickle of some size that names what the viewer draws.
    content = snapshot.read_bytes()
    assert content.startswith(b"\x80")
    assert content.endswith(b".")
    for name in (b"device_traces", b"segments", b"free_completed", b"test_it.py"):
        assert name in content
    assert len(list((gpu_project.path / "kept").glob("*.timeline.json"))) == 1


ASKED = 2**42
"""More than any GPU has."""
RUNS_OUT = f"""
def step():
    kept = torch.ones(10_000_001, dtype=torch.uint8, device="cuda")
    torch.empty({ASKED}, dtype=torch.uint8, device="cuda")


def test_a_step(gpumem):
    gpumem.measure(step)
"""


def test_a_step_that_runs_out_of_memory_tells_what_was_asked_for_and_what_was_there(gpu_project: GpuProject) -> None:
    gpu_project.write(RUNS_OUT)
    result = gpu_project.run("--gpumem-explain=always", "--no-gpumem-time")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            f"*memory ran out when {format_bytes(ASKED)} more were asked for; the step held 10.00 MB*",
            "*10.00 MB*test_it.py:7*",
        ]
    )
