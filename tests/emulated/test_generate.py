"""Text generated on an emulated GPU: tokens have no values, and its length is certain where they cannot end it."""

from __future__ import annotations

import json

import pytest

MODELS = """
import torch
import transformers
SIZES = dict(vocab_size=1000, bos_token_id=1, eos_token_id=[0, 5], pad_token_id=5)
def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128, **SIZES)).cuda()
def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, **SIZES)).cuda()
def generate(model, **how):
    ids = torch.randint(6, 1000, (2, 8), device="cuda")
    return model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=5, **how)
"""
READS = """
from pytest_gpumem.emulating.host_values.scope import current
def told():
    return [current().reads.take_trouble(), *current().reads.take_others().notes()]
"""
CERTAIN = [
    "min_new_tokens=4, max_new_tokens=4",
    "min_length=12, max_length=12",
    "min_new_tokens=3, max_new_tokens=4",  # the last token is not masked, and ends nothing
    "min_new_tokens=4, max_new_tokens=4, repetition_penalty=1.3",
    "min_new_tokens=4, max_new_tokens=4, do_sample=True, temperature=0.7, top_k=20, top_p=0.9",
    "min_new_tokens=4, max_new_tokens=4, cache_implementation='static', disable_compile=True",
    "min_new_tokens=4, max_new_tokens=4, cache_implementation='static', disable_compile=True, do_sample=True",
    "max_new_tokens=4, eos_token_id=None",
]
DECIDED = [
    "max_new_tokens=4",
    "min_new_tokens=2, max_new_tokens=4",
    "min_new_tokens=2, max_new_tokens=4, do_sample=True",
]


@pytest.mark.parametrize("inferring", [False, True])
def test_tokens_that_cannot_end_the_text_decide_nothing(on_gpu, inferring):
    calls = "".join(f"        print(generate(model, {how}).shape[1], told())\n" for how in CERTAIN)
    source = f"for model in (llama(), gpt2()):\n    with torch.inference_mode({inferring}):\n{calls}"
    assert on_gpu(MODELS + READS + source).splitlines() == ["12 [None]"] * 2 * len(CERTAIN)


def test_a_token_that_may_end_the_text_is_told(on_gpu):
    source = "".join(f"print(generate(model, {how}).shape[1], told())\n" for how in DECIDED)
    printed = on_gpu(MODELS + READS + "model = llama()\n" + source).splitlines()
    assert len(printed) == len(DECIDED)
    for line in printed:
        assert line.startswith("12 [None, 'an uncomputed value decided a branch at ")


def test_a_token_that_is_read_is_told_although_it_cannot_end_the_text(on_gpu):
    source = """
out = generate(llama(), min_new_tokens=4, max_new_tokens=4)
print(out[0, 7].item() in range(6, 1000), told())
print(out[0, -1].item(), told())
"""
    assert on_gpu(MODELS + READS + source).count("a value is read that an emulated GPU does not compute") == 2


ENDS = """
scores = torch.randn(2, 1000, 1000, device="cuda").mean(1)
prompt, end = torch.tensor([[0, 7], [8, 9]]).cuda(), torch.tensor([0, 5]).cuda()
masked = torch.isin(torch.arange(1000).cuda(), end)
of_one_row = masked & torch.tensor([[True], [False]]).cuda()
infinity = float("inf")
def ends(tokens, among=end):
    found = torch.isin(tokens, among)
    return bool(found.any()), told()
def chosen(scores):
    return scores.argmax(-1)
def drawn(scores):
    return scores.softmax(-1).multinomial(1)[:, 0]
"""
# What is certain is true or false by itself; else the branch is told.
CHOICES = {
    "chosen(scores.masked_fill(masked, -infinity))": False,
    "chosen(torch.where(~masked, scores, -infinity))": False,
    "chosen(scores.masked_fill_(masked, -infinity))": False,
    "drawn(scores.masked_fill(masked, -infinity).masked_fill(scores < 1, -infinity))": False,
    "chosen(scores.masked_fill(masked, -infinity)) * torch.ones(2, dtype=int).cuda()": False,
    "torch.cat([prompt, chosen(scores.masked_fill(masked, -infinity))[:, None]], 1)[:, 1:]": False,
    "torch.cat([prompt, chosen(scores.masked_fill(masked, -infinity))[:, None]], 1)": True,
    "chosen(scores)": None,
    "chosen(scores.masked_fill(masked, -1e9))": None,
    "chosen(scores.masked_fill(of_one_row, -infinity))": None,
    "chosen(scores.masked_fill(masked, -infinity).masked_fill(scores < 1, -infinity))": None,  # may be all of them
    "chosen(scores.masked_fill(scores < 1, -infinity).masked_fill(masked, -infinity))": None,
    "chosen(scores.masked_fill(masked | of_one_row.any(1, keepdim=True), -infinity))": None,  # one row has nothing left
    "drawn(scores.masked_fill(masked, -infinity) * -1)": None,
    "chosen(scores.masked_fill(masked, -infinity)) * torch.tensor([1, 0]).cuda()": None,
    "chosen(scores.masked_fill(masked, -infinity) + scores.masked_fill(masked, infinity))": None,
    "chosen(scores.masked_fill(masked, -infinity)) + 1": None,
    "chosen(scores.masked_fill(masked, -infinity)) * 2": None,
    "chosen(scores.masked_fill(masked, -infinity).view(1000, 2))": None,
    "scores.masked_fill(masked, -infinity).argmax(0)": None,
    "scores.masked_fill(masked, -infinity).softmax(-1).multinomial(2)": None,
    "torch.cat([chosen(scores), chosen(scores.masked_fill(masked, -infinity))])": None,
    "chosen(scores.masked_fill(masked, -infinity)).copy_(chosen(scores))": None,
}


def test_a_choice_is_none_of_those_that_a_known_mask_excludes(on_gpu):
    source = "".join(
        f"print([*ends({how})])\nscores = torch.randn(2, 1000, 1000, device='cuda').mean(1)\n" for how in CHOICES
    )
    source += "print([*ends(chosen(scores.masked_fill(masked, -infinity)), prompt)])\n"  # 7, 8 and 9 are not masked
    printed = on_gpu(MODELS + READS + ENDS + source).splitlines()
    for how, value, line in zip([*CHOICES, "others"], [*CHOICES.values(), None], printed, strict=True):
        if value is None:
            assert " an emulated GPU " in line or "an uncomputed value decided a branch" in line, how
        else:
            assert line == str([value, [None]]), how


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize(("made", "heads"), [("llama", 2), ("gpt2", 4)])
def test_a_cache_takes_the_bytes_of_its_keys_and_values(on_gpu, made, heads, static):
    source = f"""
how = dict(min_new_tokens=4, max_new_tokens=4, return_dict_in_generate=True, use_cache=True)
if {static}:
    how.update(cache_implementation="static", disable_compile=True)
def held():
    return torch.cuda.memory_stats()["requested_bytes.all.current"]
generate({made}(), **how)  # cuBLAS keeps its workspaces
model = {made}()
before = held()
cache = generate(model, **how).past_key_values
kept = [one for layer in cache.layers for one in (layer.keys, layer.values)]
print(sum(one.nbytes for one in kept), held() - before, told())
"""
    layers, batch, length, head_dim, itemsize = 2, 2, 8 + 4 - 1, 16, 4
    nbytes = layers * 2 * batch * heads * length * head_dim * itemsize
    counters = layers * 8 if static else 0  # the length, in each layer
    assert on_gpu(MODELS + READS + source) == f"{nbytes} {nbytes + counters} [None]\n"


SESSION = """
import pytest
@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("least", [0, 4])
@pytest.mark.gpumem
def test_generate(make, sampled, least):
    generate(make(), min_new_tokens=least, max_new_tokens=4, do_sample=sampled)
"""


def test_generation_is_gated_alone_in_a_suite_and_strictly_if_its_length_is_certain(processes, tmp_path):
    (tmp_path / "test_it.py").write_text(MODELS + SESSION, encoding="utf-8")
    recorded = processes.pytest("--gpumem-update=new", "--gpumem-explain=never")
    assert "8 passed" in recorded.stdout
    strict = processes.pytest("--gpumem-baseline", "--gpumem-strict", "--gpumem-report=all.json")
    assert "4 failed, 4 passed" in strict.stdout
    assert strict.stdout.count("FAILED test_it.py::test_generate[0-") == 4
    alone = processes.pytest(
        "--gpumem-baseline", "--gpumem-strict", "--gpumem-report=one.json", "test_it.py::test_generate[4-True-gpt2]"
    )
    assert alone.returncode == 0, alone.stdout
    peaks = [
        verdict["measurement"]["metrics"]["peak_allocated"]
        for name in ("all.json", "one.json")
        for result in json.loads((tmp_path / name).read_text(encoding="utf-8"))["results"]
        if result["verdict"]["test"] == "test_generate[4-True-gpt2]"
        for verdict in result["verdict"]["verdicts"]
    ]
    assert len(peaks) == 2
    assert peaks[0] == peaks[1] > 0
