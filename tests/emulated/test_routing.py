"""Mixtures of experts on an emulated GPU: which experts get tokens is not computed, and assumed where a word says so."""

from __future__ import annotations

import json
import re

import pytest

MODELS = """
import itertools, json, sys, transformers
from pytest_gpumem.emulating.host_values.scope import current
mode = current()
TOKENS, EXPERTS, EACH = 1024, 8, 2
SIZES = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, vocab_size=32,
             intermediate_size=256, moe_intermediate_size=256, num_experts_per_tok=EACH, use_cache=False)
LATENT = dict(kv_lora_rank=16, q_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
MODELS = {
    "Mixtral": dict(num_local_experts=EXPERTS),
    "Qwen3Moe": dict(num_experts=EXPERTS, head_dim=16),
    "DeepseekV3": dict(n_routed_experts=EXPERTS, n_group=4, topk_group=2, first_k_dense_replace=0, **LATENT),
}
ids = torch.randint(32, (2, TOKENS // 2)).cuda()
def model(name, form):
    config = getattr(transformers, f"{name}Config")(**SIZES, **MODELS[name])
    kind = getattr(transformers, f"{name}ForCausalLM")
    return kind._from_config(config, experts_implementation=form).to("cuda", torch.bfloat16)
def peak(model, routing):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.allocated"]
    with mode.notes.choosing.by(routing):
        model(input_ids=ids, labels=ids).loss.backward()
    model.zero_grad(set_to_none=True)
    trouble, reads = mode.reads.take_trouble(), mode.reads.take_others()
    stats = torch.cuda.memory_stats()
    figures = stats["requested_bytes.all.peak"], stats["requested_bytes.all.allocated"] - before
    return figures, trouble, [*reads.routed], [*reads.decided]
def balanced(grouped):
    # By hand: in turn among all experts, or among those of two groups of two that are taken in turn themselves.
    if not grouped:
        return [[(token * EACH + one) % EXPERTS for one in range(EACH)] for token in range(TOKENS)]
    return [[4 * (token % 2) + (token // 2 * EACH + one) % 4 for one in range(EACH)] for token in range(TOKENS)]
def forced_peak(model, rows):
    indices = torch.tensor(rows)
    (gate,) = (one for name, one in model.named_modules() if name.endswith("mlp.gate"))
    def choose(gate, args, out):
        out[-1].data.copy_(indices)  # on the memory of what was chosen
    with gate.register_forward_hook(choose):
        return peak(model, None)
"""
FIGURES = """
peak(model("Mixtral", "eager"), "worst")  # cuBLAS has its workspaces
found = {}
for name, form in itertools.product(MODELS, ("eager", "grouped_mm")):
    made = model(name, form)
    for routing in ("balanced", "worst", "balanced", None) if form == "eager" else ("balanced", "worst", None):
        found.setdefault(f"{name} {form} {routing}", []).append(peak(made, routing))
    if form == "eager":
        indices = {"balanced": balanced(name == "DeepseekV3"), "worst": [[*range(EACH)]] * TOKENS}
        for routing, rows in indices.items():
            found[f"{name} forced {routing}"] = [forced_peak(made, rows)]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    pytest.importorskip("transformers")
    from tests.emulated.processes import Processes

    done = Processes(tmp_path_factory.mktemp("figures")).run(f"import torch\n{MODELS}{FIGURES}")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_looped_experts_need_as_much_as_with_a_router_forced_to_the_choice(figures, name):
    bytes_of = {}
    for routing in ("balanced", "worst"):
        again = figures[f"{name} eager {routing}"]
        assert again[0] == again[-1]
        assert [rest for _, *rest in again] == [[None, [routing], []]] * len(again)
        (forced,) = figures[f"{name} forced {routing}"]
        assert forced == [again[0][0], None, [], []]
        bytes_of[routing] = forced[0]
    # What is saved is of as many tokens. But each expert that gets any has a gradient as large as that of all of them.
    assert bytes_of["balanced"][0] <= bytes_of["worst"][0]
    assert bytes_of["balanced"][1] > bytes_of["worst"][1]


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_without_the_word_a_loop_over_experts_is_not_measured(figures, name):
    ((_, trouble, routed, _),) = figures[f"{name} eager None"]
    assert trouble.startswith("nonzero reads values that an emulated GPU does not compute")
    assert routed == []


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3"])
def test_grouped_products_take_the_same_whoever_gets_the_tokens_and_nothing_is_read(figures, name):
    found = [one for routing in ("balanced", "worst", "None") for one in figures[f"{name} grouped_mm {routing}"]]
    assert found == [[found[0][0], None, [], []]] * 3


def test_what_is_made_of_choices_is_known_also_where_there_are_many(on_gpu):
    source = """
from torch.nn.functional import one_hot
from pytest_gpumem.emulating.host_values.scope import current
reads = current().reads
scores = torch.randn(1 << 14, 64, device="cuda")
def looped(chosen):
    hit = one_hot(chosen, 65).permute(2, 1, 0)
    return hit.sum((-1, -2)).tolist()[:64], len(hit.sum((-1, -2)).nonzero()), len(torch.where(hit[1])[0])
def sorted_by_expert(chosen):
    ordered, order = chosen.flatten().sort()
    counts = torch.histc(ordered.int(), bins=64, min=0, max=63)
    return ordered.bincount().tolist(), counts.cumsum(0)[-1].item(), len(order.unique())
def drawn(_):
    return scores.softmax(-1).multinomial(2).flatten().bincount().tolist(), scores.argmax(-1).max().item(), scores.argsort(-1)[0, 0].item()
for routing, share in (("balanced", [512] * 64), ("worst", [16384] * 2 + [0] * 62)):
    for inferring in (False, True):
        with current().notes.choosing.by(routing), torch.inference_mode(inferring):
            for use in (looped, sorted_by_expert, drawn):
                counts, *others = use(scores.topk(2)[1])
                assert counts == share[:len(counts)], (use, routing, inferring, counts)
                print(others, reads.take_trouble(), [*reads.take_others().routed])
            group = torch.zeros(4096, 2, device="cuda").scatter_(1, scores[:4096, :2].topk(1)[1], 1)
            left = group.unsqueeze(-1).expand(-1, 2, 32).reshape(-1, 64).bool()
            chosen = scores[:4096].masked_fill(~left, float("-inf")).topk(2)[1]
            assert left.gather(1, chosen).all() and reads.take_trouble() is None
            reads.take_others()
scores.topk(2)[1].tolist()
print(reads.take_trouble() is not None)
with current().notes.choosing.by("balanced"):
    one_hot(scores.topk(2)[1], 4096).sum().item()
print(reads.take_trouble() is not None)
"""
    balanced = ["[64, 512] None ['balanced']", "[32768, 32768] None ['balanced']", "[63, 63] None ['balanced']"]
    worst = ["[2, 16384] None ['worst']", "[32768, 32768] None ['worst']", "[0, 63] None ['worst']"]
    assert on_gpu(source).splitlines() == [*balanced * 2, *worst * 2, "True", "True"]


def test_generated_text_ends_where_it_ends_without_the_word(on_gpu):
    pytest.importorskip("transformers")
    source = """
import transformers
from pytest_gpumem.emulating.host_values.scope import current
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    num_hidden_layers=1, hidden_size=64, num_attention_heads=4, intermediate_size=128,
    vocab_size=4000, bos_token_id=1, eos_token_id=[0, 5], pad_token_id=5)).cuda()
ids = torch.randint(6, 4000, (2, 80), device="cuda")
for how in (dict(min_new_tokens=4), dict(min_new_tokens=4, do_sample=True, top_k=20, top_p=.9), {}):
    told = []
    for routing in (None, "balanced", "worst"):
        with current().notes.choosing.by(routing):
            text = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, **how)
        reads = current().reads.take_others()
        told.append((text.shape[1], current().reads.take_trouble(), len(reads.decided), dict(reads.routed)))
    print(told[0], told[1:] == [told[0]] * 2)
"""
    certain, decided = "(84, None, 0, {}) True", "(84, None, 1, {}) True"
    assert on_gpu(source).splitlines() == [certain, certain, decided]


PROJECT = """
import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.Linear(128, 128)
        self.gate = nn.Linear(128, 8)
        self.experts = nn.ModuleList(nn.Linear(128, 128) for _ in range(8))

    def forward(self, x):
        x = self.before(x)
        weights, chosen = self.gate(x).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            if len(token):
                out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
        return x + out


def make():
    return nn.Sequential(Experts(), Experts())


def dense():
    return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))


def batch():
    return torch.randn(2048, 128)


def loss(out, _):
    return out.square().mean()
"""
BY_SETTING = """
from project import *


def test_train(gpumem):
    gpumem.train_step(make, batch, loss=loss)


def test_dense(gpumem):
    gpumem.train_step(dense, batch, loss=loss)
"""
BY_WORD = """
import pytest
from project import *


@pytest.mark.parametrize("routing", ["balanced", "worst"])
def test_train(gpumem, routing):
    whole = gpumem.train_step(make, batch, loss=loss, config=f"fp32,routing={routing}", name="whole")
    again = gpumem.train_step(make, batch, loss=loss, config=f"fp32,checkpoint=blocks,routing={routing}", name="again")
    assert again.peak_allocated < whole.peak_allocated
    gpumem.infer_step(make, batch, config=f"fp32,routing={routing}", name="inference")


def test_nothing_is_chosen(gpumem):
    gpumem.train_step(dense, batch, loss=loss, config="fp32,routing=worst")


def test_nothing_is_chosen_in_inference(gpumem):
    gpumem.infer_step(dense, batch, config="fp32,routing=worst")
"""


@pytest.fixture
def project(processes):
    (processes.folder / "project.py").write_text(PROJECT)

    def run(source, *arguments, routing=None):
        (processes.folder / "test_it.py").write_text(source)
        table = "" if routing is None else f'[tool.gpumem]\nrouting = "{routing}"\n'
        (processes.folder / "pyproject.toml").write_text(table)
        options = ("-q", "--gpumem-strict", "--gpumem-explain=never", "--gpumem-report=report.json")
        done = processes.pytest(*options, *arguments, PYTHONPATH=".")
        return done, (processes.folder / "report.json").read_text()

    return run


def test_the_setting_is_said_and_another_one_is_another_workload(project, processes):
    done, report = project(BY_SETTING, "--gpumem-update=new", routing="balanced")
    assert done.returncode == 0, done.stdout
    assert report.count("routing=balanced is assumed for choices that are not computed, read at ") == 1
    (store,) = (processes.folder / "gpumem-baselines").rglob("*.toml")
    assert re.findall('config = "(.*)"', store.read_text()) == ["fp32", "fp32,routing=balanced"]

    done, _ = project(BY_SETTING, "--gpumem-baseline", routing="worst")
    assert "config fp32,routing=worst, was fp32,routing=balanced" in done.stdout
    assert "1 failed, 1 passed" in done.stdout

    done, _ = project(BY_SETTING, "--gpumem-baseline")
    assert "nonzero reads values that an emulated GPU does not compute" in done.stdout
    assert "1 failed, 1 passed" in done.stdout


def test_routing_is_accepted_in_training_and_inference_and_refused_without_a_router(project):
    done, report = project(BY_WORD, "--gpumem-update=new")
    assert done.stdout.count("ConfigError") >= 2
    assert "routing=worst has no effect, because no operator in the step (topk, " in done.stdout
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert report.count("routing=balanced is assumed") == report.count("routing=worst is assumed") == 3
