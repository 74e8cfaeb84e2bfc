"""The lines that ``gpumem advise`` prints run, and make the very step that was measured."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from pytest_gpumem.measuring.devices.cpu import CpuDevice
from pytest_gpumem.measuring.models.lora import Lora
from pytest_gpumem.measuring.models.task import TRAINING, Task
from pytest_gpumem.measuring.step_config.checkpoint_kinds import KINDS, Snippet
from pytest_gpumem.measuring.step_config.config import StepConfig
from pytest_gpumem.tools.advise.snippet import code_of, code_snippet
from pytest_gpumem.torch_support.private_api.distributed import FAKE, forget_meshes, store_of_nobody

SAMPLES, WIDTH = 8, 32


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.down = torch.nn.Linear(4 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Module()
        self.body.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        for block in self.body.blocks:
            x = block(x)
        return x.square().mean()


def run(text: str, parts: int = 1, holders=("body.blocks",)) -> tuple[Model, str]:
    """Run the recipe once on a new model. Returns the model, and the lines."""
    torch.manual_seed(0)
    model = Model()
    batch = torch.randn(SAMPLES, WIDTH)
    lines = "\n".join(code_snippet(StepConfig.parse(text), "cpu", holders))
    batches = batch.to(torch.bfloat16 if text == "bf16" else batch.dtype).chunk(parts)
    exec(compile(lines, text, "exec"), {"model": model, "batches": batches, "loss_of": lambda model, x: model(x)})
    return model, lines


PLAIN = run("fp32")[0]


@pytest.mark.parametrize("text", ["fp32,checkpoint=blocks", "fp32,checkpoint=ops", "fp32,accumulate=4"])
def test_the_step_of_a_recipe_teaches_the_same(text):
    model, _ = run(text, StepConfig.parse(text).accumulate)
    for mine, plain in zip(model.parameters(), PLAIN.parameters(), strict=True):
        torch.testing.assert_close(mine, plain)


def test_the_loss_of_a_part_is_its_share():
    # AdamW's step is the same at any scale of the gradients.
    assert "    loss = loss_of(model, batch) / 2" in code_snippet(StepConfig.parse("fp32,accumulate=2"), "cuda", [])


@pytest.mark.parametrize("kind", ["blocks", "ops"])
def test_the_blocks_of_a_recipe_are_computed_again(kind):
    assert [block.calls for block in PLAIN.body.blocks] == [1, 1, 1]
    assert [block.calls for block in run(f"fp32,checkpoint={kind}")[0].body.blocks] == [2, 2, 2]


def test_each_kind_of_checkpointing_in_the_search_has_its_own_code_and_place():
    tried = [kind for kind in KINDS.values() if kind.search_order]
    assert [kind.name for kind in tried if kind.argument is not None or kind.snippet == Snippet()] == []
    assert len({kind.search_order for kind in tried}) == len(tried)


def test_gradients_of_float16_are_scaled_and_those_of_bfloat16_are_not():
    model, lines = run("amp-fp16")
    assert 'scaler = torch.amp.GradScaler("cpu")' in lines
    assert "scaler.step(optimizer)" in lines
    assert all(
        not torch.equal(mine, plain) for mine, plain in zip(model.parameters(), Model().parameters(), strict=True)
    )
    assert "scaler" not in run("amp-bf16")[1]


def test_weights_in_half_precision_are_converted():
    model, _ = run("bf16")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_saved_tensors_go_to_pinned_memory():
    lines = code_snippet(StepConfig.parse("amp-bf16,checkpoint=offload"), "cuda", [])
    line = 'with torch.autocast("cuda", dtype=torch.bfloat16), torch.autograd.graph.save_on_cpu(pin_memory=True):'
    assert f"    {line}" in lines


def test_the_8_bit_optimizer_comes_from_the_package_that_is_installed():
    pytest.importorskip("torchao", reason="needs torchao, from which the optimizer would come")
    lines = code_snippet(StepConfig.parse("fp32,optimizer=adamw-8bit"), "cuda", [])
    assert "from torchao.optim import AdamW8bit" in lines
    assert "optimizer = AdamW8bit(model.parameters())" in lines


def test_blocks_that_are_no_whole_list_are_computed_again_and_no_others():
    model, _ = run("fp32,checkpoint=blocks", holders=[("body.blocks.0", "body.blocks.2")])
    assert [block.calls for block in model.body.blocks] == [2, 1, 2]


def test_selective_checkpointing_casts_anew_each_time():
    lines = code_snippet(StepConfig.parse("amp-bf16,checkpoint=ops"), "cuda", ["h"])
    assert '    with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):' in lines
    others = code_snippet(StepConfig.parse("amp-bf16,checkpoint=blocks"), "cuda", ["h"])
    assert '    with torch.autocast("cuda", dtype=torch.bfloat16):' in others


def test_selective_checkpointing_under_autocast_teaches_what_autocast_alone_does():
    mine, plain = run("amp-bf16,checkpoint=ops")[0], run("amp-bf16")[0]
    assert [block.calls for block in mine.body.blocks] == [2, 2, 2]
    for one, other in zip(mine.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def test_every_list_of_blocks_is_recomputed():
    lines = code_snippet(StepConfig.parse("fp32,checkpoint=blocks"), "cuda", ["encoder.block", "decoder.block"])
    assert [line for line in lines if line.startswith("for block in")] == [
        "for block in model.encoder.block:",
        "for block in model.decoder.block:",
    ]


@pytest.mark.parametrize(
    ("holder", "line"),
    [
        ("", "for block in model:"),
        ("transformer.h", "for block in model.transformer.h:"),
        ("0.blocks", 'for block in model.get_submodule("0.blocks"):'),
    ],
)
def test_blocks_are_reached_wherever_they_are(holder, line):
    lines = code_snippet(StepConfig.parse("fp32,checkpoint=blocks"), "cuda", [holder])
    assert line in lines
    compile("\n".join(lines), "recipe", "exec")


def test_adapters_are_put_on_before_anything_else_with_what_was_asked_for():
    asked = Lora(8, 16, ("q_proj", "v_proj"))
    lines = code_of(StepConfig.parse("bf16"), "cuda", [], Task(lora=asked))
    wrapped = 'model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]))'
    at = lines.index(wrapped)
    assert lines[at : at + 3] == [
        wrapped,
        "model.to(torch.bfloat16)",
        "optimizer = torch.optim.AdamW(model.parameters())",
    ]
    assert "from peft import LoraConfig, get_peft_model" in lines[:at]
    everything = code_of(StepConfig.parse("fp32"), "cuda", [], Task(lora=Lora(4, None, ("all-linear",))))
    assert 'model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))' in everything


def test_generation_is_a_call_of_the_models_own():
    lines = code_of(StepConfig.parse("bf16"), "cuda", [], Task(trains=False, new_tokens=32))
    assert lines[-1] == "    output = model.generate(**batch, max_new_tokens=32, do_sample=False, num_beams=1)"


@pytest.fixture
def alone(monkeypatch):
    """The first of eight ranks, whose peers are not there."""
    dist.init_process_group(FAKE, store=store_of_nobody(), rank=0, world_size=8)
    monkeypatch.setattr(dist, "init_process_group", lambda: None)
    yield
    dist.destroy_process_group()
    forget_meshes()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("fp32,shard=fsdp,world=8", ["    fully_shard(block)", "fully_shard(model)"]),
        ("fp32,shard=zero2,world=8", ["fully_shard(model, reshard_after_forward=False)"]),
        (
            "mp-bf16,reduce=fp32,checkpoint=blocks,shard=hsdp,world=8",
            [
                'mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("copies", "data"))',
                "policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
                "fully_shard(model, mesh=mesh, mp_policy=policy)",
            ],
        ),
    ],
)
def test_every_block_is_sharded_by_itself_then_the_model(alone, text, lines):
    if (why := CpuDevice().lacks("fully_shard")) is not None:
        pytest.skip(why)
    model, said = run(text)
    assert set(lines) <= set(said.splitlines())
    copies = 2 if "hsdp" in text else 1
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.to_local().shape[0] == parameter.shape[0] * copies // 8
    assert type(model).__name__ == "FSDPModel"
    assert {type(block).__name__ for block in model.body.blocks} == {"FSDPBlock"}


def test_code_of_data_parallelism_is_shown_as_far_as_it_is_a_few_lines():
    def shown(text):
        return code_of(StepConfig.parse(text), "cuda", ["h"], TRAINING)

    assert "model = DistributedDataParallel(model)" in shown("fp32,shard=ddp,world=8")
    assert "optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW)" in shown(
        "fp32,shard=zero1,world=8"
    )
    for text in ("fp32,accumulate=2,shard=ddp,world=8", "fp32,shard=tp:2", "fp32,shard=fsdp+tp:2,world=8"):
        assert shown(text) == [f'# no snippet exists; a test can pass config="{text}" to a step of the fixture']
