"""Values on an emulated GPU: what the host knows is true, and what it does not is told when it is read."""

from __future__ import annotations

import pytest

from pytest_gpumem.torch_support.private_api.compiler import compiles_within_modes
from tests.emulated.conftest import WITHOUT_VALUES

SEEN = """
from pytest_gpumem.emulating.host_values.scope import current
seen = current().reads.take_trouble
"""


def test_small_models_have_true_values_in_forward_and_in_what_is_computed_again(on_gpu):
    source = """
from torch.utils.checkpoint import checkpoint
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def forward(self, x, mask):
        branches.append(bool(mask.all()))
        return self.layer(x).relu()
branches = []
torch.manual_seed(1)
block, head, x, y = Block(), torch.nn.Linear(8, 4), torch.randn(32, 8), torch.arange(32) % 4
def loss(device):
    out = checkpoint(block.to(device), x.to(device), torch.arange(1, 9).to(device), use_reentrant=False)
    return torch.nn.functional.cross_entropy(head.to(device)(out), y.to(device))
theirs = loss("cpu").item()
ours = loss("cuda")
assert abs(ours.item() - theirs) < 1e-5 and theirs > 1, (ours, theirs)
ours.backward()
print(branches, seen())
"""
    assert on_gpu(SEEN + source) == "[True, True, True] None\n"


AS_WITHOUT_THE_VALUES = {
    "an index in backward": ("weight, i = torch.nn.Parameter(torch.empty(10000, 4096, device='cuda')), torch.arange(8).cuda()", "weight[i, :].sum().backward()"),
    # With a dispatch mode torch's own write to no tensor in place: the scores of attention were there twice.
    "attention with a bias": (
        "q, k, v, bias = (torch.randn(1, 8, 512, one, device='cuda', requires_grad=True) for one in (64, 64, 64, 512))",
        "torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias.mT.contiguous().mT, dropout_p=0.1)",
    ),
    "isclose": ("x, y = torch.randn(2, 1 << 20, device='cuda')", "torch.isclose(x, y, equal_nan=True)"),
    # A mode of the program is still told of operators.
    "isclose, counted": (
        "from torch.utils.flop_counter import FlopCounterMode as Mode\nx, y = torch.randn(2, 1 << 20, device='cuda')",
        "Mode(display=False).__enter__(), torch.isclose(x, y, equal_nan=True)",
    ),
}  # fmt: skip
BESIDE_GRAPHS = """
from torch._dynamo.utils import counters


class Around:
    def __enter__(self):
        torch._dynamo.graph_break()

    def __exit__(self, *raised):
        torch._dynamo.graph_break()


def step(x):
    with Around():
        y = x.sin()
    return [y.cos() for _ in range(2) if not torch._dynamo.graph_break()]


torch.compile(step, backend="eager")(torch.ones(10, device="cuda"))
print((counters["frames"]["total"], counters["stats"]["unique_graphs"]))
"""
"""Between graphs, operators are run by themselves while torch.compile looks at every function that is called."""


def test_neither_memory_nor_what_is_compiled_is_other_than_without_the_values(on_gpu):
    source = f"""
for given, call in {[*AS_WITHOUT_THE_VALUES.values()]!r}:
    names = {{"torch": torch}}
    exec(given, names)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()
    names["result"] = eval(call, names)
    after = torch.cuda.memory_stats()
    print(after["requested_bytes.all.peak"] - before["requested_bytes.all.current"],
          after["allocation.all.allocated"] - before["allocation.all.allocated"])
    names.clear()
"""
    source = (BESIDE_GRAPHS if compiles_within_modes() else "") + source
    found = on_gpu(source)
    assert found == on_gpu(source, before=WITHOUT_VALUES)
    *_, plain, counted = found.splitlines()
    assert plain != counted


def test_a_default_device_holds_for_the_functions_that_are_watched(on_gpu):
    source = """
made = {
    "tensor": lambda: torch.tensor([1.0]),
    "as_tensor": lambda: torch.as_tensor([1.0]),
    "asarray": lambda: torch.asarray([1.0]),
    "sparse_coo_tensor": lambda: torch.sparse_coo_tensor([[0]], [1.0], (2,)),
}
with torch.device("cuda"):
    print({name for name, make in made.items() if not make().is_cuda})
torch.set_default_device("cuda")
print({name for name, make in made.items() if not make().is_cuda})
"""
    assert on_gpu(source) == "set()\nset()\n"


def test_models_are_built_on_meta_after_a_loss_was_read(on_gpu):
    source = """
float(torch.rand(10**7, device="cuda").sum())  # the host has an uncomputed number from here on
with torch.device("meta"):
    made = torch.tensor([1.0]), torch.as_tensor([1.0]), torch.asarray([1.0]), torch.nn.Linear(2, 2).weight
print({tensor.device.type for tensor in made})
"""
    assert on_gpu(source) == "{'meta'}\n"


def test_a_process_ends_when_autograds_thread_has_let_go_of_what_it_ran(on_gpu):
    # Were it ending while the thread asks for Python's lock, it would abort. The callback goes with the thread's last hold on it.
    before = (
        "import atexit\ngone = []\natexit.register(lambda: print(gone))  # after all that torch and gpumem registered\n"
    )
    source = """
import hashlib, threading, time
going = threading.Event()
class Callback:
    def __call__(self):
        pass
    def __del__(self):
        if threading.current_thread() is not threading.main_thread():
            going.set()
            until = time.monotonic() + 2
            while time.monotonic() < until:
                hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000)  # a hundredth of a second without the lock
            gone.append(True)
weight = torch.ones(4, device="cuda", requires_grad=True)
weight.register_hook(lambda _: torch.autograd.Variable._execution_engine.queue_callback(Callback()))
while not going.wait(0.01):
    (2 * weight).sum().backward()
"""
    assert on_gpu(source, before=before) == "[True]\n"


def test_an_initialisation_that_draws_again_ends_and_is_no_read(on_gpu):
    source = "torch.nn.init.trunc_normal_(torch.empty(1000, 1000, device='cuda'))\nprint(seen())"
    assert on_gpu(SEEN + source) == "None\n"


MADE = """
import copy, io, pickle
def loaded(tensor):
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    return torch.load(file, map_location="cpu")
def pickled(tensor):
    return pickle.loads(pickle.dumps(tensor))
def padded(mask):
    return torch._nested_tensor_from_mask(torch.ones(2, 3, 4).cuda(), mask)
"""
# One process for all: it is torch's start that takes time.
KNOWN = {
    "torch.arange(4, device='cuda').tolist()": [0, 1, 2, 3],
    "sorted(torch.randperm(9, device='cuda').tolist())": [*range(9)],
    "torch.randint(4, 5, (3,), device='cuda').tolist()": [4, 4, 4],
    "loaded(torch.arange(3).cuda()).tolist()": [0, 1, 2],
    "pickled(torch.arange(3).cuda()).tolist()": [0, 1, 2],
    "pickled(torch.arange(6).cuda()[2:4]).tolist()": [2, 3],
    "pickled([torch.nn.Parameter(torch.ones(2).cuda())])[0].gt(0).tolist()": [True, True],
    "copy.copy(torch.arange(3).cuda()).tolist()": [0, 1, 2],
    "copy.deepcopy(torch.arange(3).cuda()).tolist()": [0, 1, 2],
    "torch.zeros(3, device='cuda').tolist()": [0.0, 0.0, 0.0],
    "torch.full((2,), 7, device='cuda').tolist()": [7, 7],
    "[int(one) for one in torch.tensor([3, 1], device='cuda')]": [3, 1],
    "torch.tensor([3, 1, 2]).cuda().resize_(2).tolist()": [3, 1],
    "torch.tensor([3, 1, 2]).cuda().sort().values.tolist()": [1, 2, 3],
    "(torch.tensor([3, 1, 2]).cuda() > 1).nonzero().flatten().tolist()": [0, 2],
    "torch.tensor([3, 1, 3]).cuda().unique().tolist()": [1, 3],
    "torch.arange(6, device='cuda')[torch.arange(6).cuda() % 2 == 0].tolist()": [0, 2, 4],
    "torch.ones(5, dtype=torch.bool, device='cuda').all().item()": True,
    "torch.arange(5).cuda().cumsum(0)[-1].item()": 10,
    "torch.arange(3).cuda().repeat_interleave(torch.tensor([1, 0, 2]).cuda()).tolist()": [0, 2, 2],
    "torch.arange(3).cuda().equal(torch.arange(3).cuda())": True,
    "torch.arange(6).cuda().view(2, 3).t()[1].tolist()": [1, 4],
    "torch.isin(torch.arange(100).cuda(), torch.arange(60).cuda()).sum().item()": 60,
    "torch.isin(7, torch.arange(60).cuda()).item()": True,
    "torch._nested_tensor_from_mask_left_aligned(torch.ones(2, 3, 4).cuda(), torch.ones(2, 3).cuda().tril() > 0)": True,
    "torch._nested_tensor_from_mask_left_aligned(torch.ones(2, 3, 4).cuda(), torch.ones(2, 3).cuda().triu() > 0)": False,
    "padded(torch.ones(2, 3).cuda().tril() > 0)._nested_tensor_size().tolist()": [[1, 4], [2, 4]],
    "torch.randn(4000, 4000, device='cuda').isfinite().all().item()": True,
    "torch.randn(4000, 4000, device='cuda').isnan().any().item()": False,
}
READ = {
    "x.nonzero()": "nonzero reads values",
    "x[x > 0]": "a boolean index reads values",
    "int(x.sum())": "a value is read",
    "bool((x > 0).any())": "a value is read",
    "x.argmax().item()": "a value is read",
    "int(x.new_tensor(x.sum()))": "a value is read",
    "(x * 0).long().unique()": "unique reads values",
}


def test_what_the_host_can_know_is_true(on_gpu):
    source = MADE + "".join(f"print([{expression}, seen()])\n" for expression in KNOWN)
    assert on_gpu(SEEN + source).splitlines() == [str([value, None]) for value in KNOWN.values()]


def test_a_value_that_is_not_computed_is_told_with_the_line_that_reads_it(on_gpu, tmp_path):
    (tmp_path / "reads.py").write_text(
        "".join(f"def f{at}(x): {one}\n" for at, one in enumerate(READ)), encoding="utf-8"
    )
    source = "import sys; sys.path.insert(0, '.')\nimport reads\nx = torch.randn(1000, 1000, device='cuda')\n"
    source += "".join(f"reads.f{at}(x)\nprint(seen())\n" for at in range(len(READ)))
    for at, (told, said) in enumerate(zip(on_gpu(SEEN + source).splitlines(), READ.values(), strict=True), start=1):
        assert told.startswith(f"{said} that an emulated GPU does not compute")
        assert told.endswith(f", at {tmp_path / 'reads.py'}:{at}")
        assert ("(prediction == target).float().mean().item()" in told) == (said == "a value is read")


READING = """
import copy, io, warnings
import numpy
warnings.simplefilter("ignore")
reading = {
    "bool": lambda x: x * 2 if (x > 0).any() else x,
    "item": lambda x: x + x.sum().item(),
    "float": lambda x: x + float(x.sum()),
    "int": lambda x: x + int((x > 0).sum()),
    "index": lambda x: x[: (x > 0).sum() + 1],
    "complex": lambda x: x + complex(x.sum()).real,
    "tolist": lambda x: x + sum(x[0, :3].tolist()),
    "numpy": lambda x: x + float(x.cpu().numpy().sum()),
    "to": lambda x: x.cpu().to("cuda") + 1,
    "text": lambda x: x + len(f"{x.sum():.3f}") + len(repr(x)),
    "mask": lambda x: x[x > 0.5].sum() + x,
    "nonzero": lambda x: x + (x > 0).nonzero().shape[0],
    "is_nonzero": lambda x: x * 2 if torch.is_nonzero(x.sum()) else x,
    "tensor": lambda x: x + torch.tensor([x.sum(), 1.0], device="cuda").sum(),
    "as_tensor": lambda x: x + torch.as_tensor(x.sum()),
    "new_tensor": lambda x: x + x.new_tensor([1.0, 2.0]).sum(),
    "tensor_split": lambda x: torch.tensor_split(x, torch.tensor([1, 2]))[0],
    "data_ptr": lambda x: x + x.data_ptr() % 2,
    "deepcopy": lambda x: copy.deepcopy(x) + x,
    "sparse": lambda x: torch.sparse_coo_tensor(torch.tensor([[0, 1], [0, 1]], device="cuda"), x[0, :2]).to_dense(),
    "equal": lambda x: x if torch.equal(x, x) else x + 1,
    "contains": lambda x: x if 1.0 in x else x + 1,
    "iterate": lambda x: sum(list(x)[:2]),
    "apply": lambda x: x + x.cpu().apply_(abs).cuda(),
    "sizes": lambda x: x.view(x.shape[0] * x.shape[1]) + torch.zeros(x.numel(), device=x.device),
    "dlpack": lambda x: torch.from_dlpack(x) + x,
    "unique": lambda x: torch.unique((x * 3).long()).sum() + x,
    "from_numpy": lambda x: x + torch.from_numpy(numpy.ones(3, "float32")).cuda().sum(),
    "save": lambda x: (torch.save(x, io.BytesIO()), x + 1)[1],
}
x = torch.rand(300, 300, device="cuda")
"""


def test_no_read_calls_itself_while_a_program_is_traced(on_gpu):
    source = """
for name, read in reading.items():
    try:
        script = torch.jit.trace(read, x, check_trace=False)
        if str(script.graph).count("aten::numel") > (name == "sizes"):
            print(name, "is traced with an operator of ours")
        script(x)
    except Exception as error:
        print(name, type(error), error)
print(len(reading), seen())
"""
    told = on_gpu(SEEN + READING + source)
    assert told.startswith("29 a value is read that an emulated GPU does not compute"), told


def test_reads_under_transformations_and_export_end_as_they_do_on_the_cpu(on_gpu):
    source = """
from torch.fx.experimental.proxy_tensor import make_fx
class Reader(torch.nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read
    def forward(self, x):
        return self.read(x)
del reading["sparse"], reading["save"]  # parts and storages: a GPU has other operators for them than the CPU
for name, read in reading.items():
    for run in (
        lambda: torch.func.jvp(read, (x,), (x,)),
        lambda: torch.func.grad(lambda y: read(y).sum())(x),
        lambda: torch.vmap(read)(x[None]),
        lambda: make_fx(read)(x),
        lambda: torch.export.export(Reader(read), (x,), strict=False),
    ):
        try:
            run()
            print(name, "ends")
        except Exception as error:
            print(name, type(error).__name__)
"""
    on_cpu = (READING + source).replace('"cuda"', '"cpu"').replace(".cuda()", "")
    cpu, gpu = on_gpu(on_cpu).splitlines(), on_gpu(READING + source).splitlines()
    assert len(cpu) == 27 * 5
    assert [pair for pair in zip(cpu, gpu, strict=True) if pair[0] != pair[1]] == []


def test_operators_that_take_functions_run_and_what_they_read_is_told(on_gpu):
    source = """
from torch._higher_order_ops.map import map as map_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
import warnings
warnings.simplefilter("ignore")
def run(device):
    x, q = torch.ones(300, 300, device=device), torch.ones(1, 2, 128, 64, device=device, requires_grad=device == "cuda")
    yes, at = torch.ones((), dtype=torch.bool, device=device), torch.zeros((), dtype=torch.long, device=device)
    twice = torch.cond(yes, lambda x: torch.cat([x, x]), lambda x: x + 1, (x,))
    end, powers = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (at, x))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device=device)
    attended = flex_attention(q, q, q, block_mask=mask)
    if device == "cuda":
        attended.sum().backward()
        assert q.grad.shape == q.shape
    rows = map_rows(lambda row: row[:7] * 2, x)
    last, sums = scan(lambda carry, row: (carry + row, carry * row), torch.zeros(300, device=device), x)
    return [int(end), *(one.shape for one in (twice, powers, attended, rows, last, sums))]
assert run("cuda") == run("cpu"), (run("cuda"), run("cpu"))
print(seen())
x = torch.rand(300, 300, device="cuda")
torch.cond(x.sum() > 0, lambda x: x * 2, lambda x: x + 1, (x,))
print(seen())
"""
    # The compiler, which `torch.cond` asks, looks names up in the main module.
    known, unknown = on_gpu(SEEN + source, before="import os\n").splitlines()
    assert known == "None"
    assert unknown.startswith("a value is read that an emulated GPU does not compute")


def test_a_decision_by_the_time_between_events_is_noted(on_gpu):
    source = """
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
begin.record()
end.record()
torch.cuda.synchronize()
milliseconds = begin.elapsed_time(end)
print(f"{milliseconds:.1f} ms", current().reads.take_others().notes())
if begin.elapsed_time(end) > 5:
    print("slow")
print(len(current().reads.take_others().decided), seen())
"""
    assert on_gpu(SEEN + source) == "1.0 ms ()\n1 None\n"


def test_random_integers_repeat_with_the_seed_and_leave_the_hosts_numbers_alone(on_gpu):
    source = """
def drawn():
    return torch.randint(1000, (4,), device="cuda").tolist()
torch.manual_seed(1)
host = torch.rand(3).tolist()
torch.manual_seed(1)
first, second = drawn(), drawn()
print(torch.rand(3).tolist() == host)
torch.manual_seed(1)
print(drawn() == first, first != second)
generator = torch.Generator("cuda").manual_seed(5)
one = torch.randperm(50, device="cuda", generator=generator).tolist()
print(torch.randperm(50, device="cuda", generator=generator).tolist() != one)
print(torch.randperm(50, device="cuda", generator=generator.manual_seed(5)).tolist() == one)
"""
    assert on_gpu(source) == "True\nTrue True\nTrue\nTrue\n"


def test_text_is_generated_up_to_its_longest_and_the_branches_on_its_end_are_noted(on_gpu):
    source = """
import transformers
ends = dict(vocab_size=1000, bos_token_id=1, eos_token_id=5, pad_token_id=5)
gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_embd=64, n_head=2, **ends))
llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=2, intermediate_size=128, **ends))
for model in (gpt2, llama):
    ids = torch.randint(6, 1000, (2, 8), device="cuda")
    for sampled, inferring in ((False, False), (True, False), (False, True)):
        with torch.inference_mode(inferring):
            out = model.cuda().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=sampled)
        print(tuple(out.shape), seen(), *current().reads.take_others().notes())
"""
    for line in on_gpu(SEEN + source).splitlines():
        assert line.startswith("(2, 12) None an uncomputed value decided a branch at ")
        assert line.endswith(" (3 times)")


def test_a_text_from_tokens_is_counted_and_their_numbers_invalidate(on_gpu):
    source = """
import transformers
from tokenizers import Tokenizer, models
words = {f"w{number}": number for number in range(1000)}
tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
    vocab_size=1000, num_hidden_layers=1, hidden_size=64, num_attention_heads=2, intermediate_size=128)).cuda()
ids = torch.randint(6, 1000, (2, 8), device="cuda")
tokens = model.generate(ids, attention_mask=torch.ones_like(ids), min_new_tokens=4, max_new_tokens=4)
current().reads.take_others()
texts = tokenizer.batch_decode(tokens)
print(len(texts), seen(), *current().reads.take_others().notes())
streamer = transformers.TextStreamer(tokenizer, skip_prompt=True)
model.generate(ids[:1], attention_mask=torch.ones_like(ids[:1]), min_new_tokens=4, max_new_tokens=4, streamer=streamer)
print(seen())
tokens.tolist()
print(seen())
"""
    batch, *_, stream, numbers = on_gpu(SEEN + source).splitlines()
    assert batch.startswith("2 None ")
    assert "uncomputed value" in batch
    assert stream == "None"
    assert numbers.startswith("a value is read that an emulated GPU does not compute")


def test_what_is_made_of_unknown_integers_follows_from_those_that_stand_for_them(on_gpu):
    source = """
found = torch.randn(1000, 1000, device="cuda").argmax(1)
count = (found == torch.arange(1000).cuda()).sum()
for _ in range(3):
    count = count + 2
count += 1
print(int(count), count.cpu().item(), int(found.max()), seen() is not None)
"""
    assert on_gpu(SEEN + source) == "8 8 0 True\n"


def test_unknown_integers_are_0_whatever_lay_in_their_memory_and_however_they_lie(on_gpu):
    source = """
def left_by_another(nbytes):
    block = torch.full((nbytes,), 7, dtype=torch.uint8, device="cuda")
    (block + 0).cpu()  # known bytes, which stay where they are when it is freed
x = torch.randn(400, 300, device="cuda")
left_by_another(400 * 300)
mask = x.t() > 0
left_by_another(8 * 200_000)
ids = torch.randn(200_000, 8, device="cuda").argmax(1)
print(sorted({*mask.cpu().flatten().tolist()}), ids[:4].cpu().tolist(), seen() is not None)
"""
    assert on_gpu(SEEN + source) == "[False] [0, 0, 0, 0] True\n"


@pytest.mark.parametrize("how", ["assistant_model=small", "num_beams=3"])
def test_generation_by_drafts_or_beams_ends_and_is_told(on_gpu, how):
    source = f"""
import transformers
def model(layers):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        num_hidden_layers=layers, hidden_size=64, num_attention_heads=2, intermediate_size=128,
        vocab_size=1000, bos_token_id=1, eos_token_id=5, pad_token_id=5)).cuda()
big, small = model(2), model(1)
ids = torch.randint(6, 1000, (1, 8), device="cuda")
out = big.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, {how})
print(tuple(out.shape), seen())
"""
    assert " that an emulated GPU does not compute" in on_gpu(SEEN + source)


def test_sparse_and_nested_tensors_run_and_what_reads_their_values_is_told(on_gpu):
    source = """
i, v = torch.tensor([[0, 2, 0], [1, 0, 1]]).cuda(), torch.ones(3).cuda()
coo = torch.sparse_coo_tensor(i, v, (3, 3))
coo * 2, coo.to_dense(), coo._indices(), coo.cpu(), coo.is_coalesced(), str(coo.shape)
csr = torch.sparse_csr_tensor(torch.tensor([0, 1, 2]), torch.tensor([0, 1]), torch.ones(2), (2, 2))
csr.cuda().values(), torch.ones(4).to_mkldnn().to_dense()
torch.nested.nested_tensor([torch.ones(2).cuda(), torch.ones(3).cuda()]) * 2
(torch.nested.nested_tensor([torch.ones(2).cuda(), torch.ones(3).cuda()], layout=torch.jagged) * 2).sum()
print(seen())
print(coo.coalesce().indices().tolist(), coo.coalesce().values().tolist(), seen())
torch.sparse_coo_tensor(torch.randn(1000, 1000, device="cuda").argsort()[:2], torch.ones(1000).cuda(), (1000, 1000)).coalesce()
print(seen())
embedding = torch.nn.Embedding(1000, 64, sparse=True).cuda()
optimizer = torch.optim.SparseAdam(embedding.parameters())
embedding(torch.arange(8).cuda()).sum().backward()
print(embedding.weight.grad.is_sparse, embedding.weight.grad._values().shape, seen())
optimizer.step()
print(seen())
"""
    plain, distinct, coalesced, trained, stepped = on_gpu(SEEN + source).splitlines()
    assert plain == "None"
    assert distinct == "[[0, 2], [1, 0]] [2.0, 1.0] None"
    assert coalesced.startswith("coalesce reads values")
    assert trained == "True torch.Size([8, 64]) None"
    assert stepped.startswith("coalesce reads values")


AFTER_ANOTHER = """
def left_by_another(value):
    for dtype in (torch.int64, torch.int32):
        blocks = [torch.full((1 << 16,), value, dtype=dtype, device="cuda") for _ in range(16)]
        del blocks
def peak(call):
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    try:
        call()
    except RuntimeError as error:
        print(type(error).__name__, end=" ")
    return torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
def edges(indices):
    return torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1]).cuda(), (1000, 1000))
known = torch.tensor([[0, 2, 0, 7, 5], [1, 0, 1, 7, 5]]).cuda()
scores = torch.randn(1000, 1000, device="cuda")
"""
TOLD_IN_KERNELS = {
    "torch.sparse.softmax(edges(known), 1)": "sparse_softmax reads values",
    "torch.sparse.softmax(edges(scores.argsort()[:2]), 1)": "sparse_softmax reads values",
    "edges(scores.argsort()[:2]).sum(0)": "sum reads values",
    "torch.sparse.sum(edges(scores.argsort()[:2]), 0).norm()": "sparse_sum reads values",
    "edges(scores.argsort()[:2]).index_select(0, known[0])": "index_select reads values",
    "torch.mode(scores.expand(5, 1000, 1000).reshape(1000, 5000))": "mode reads values",
    "torch.ops.aten._padded_dense_to_jagged_forward(scores[:4, :, None], [scores.argmax(1)[:5]])": "padded_dense_to_jagged_forward reads values",
    "scores.unique()": "unique reads values",
    "torch.nested.nested_tensor([scores[:2], scores[:3]]) @ torch.nested.nested_tensor([scores, scores])": "matmul reads values",
}


def test_what_kernels_read_of_unknown_memory_is_told_and_peaks_repeat(on_gpu):
    source = f"""
for expression in {[*TOLD_IN_KERNELS]!r}:
    eval(expression) if "mode" not in expression else None  # what is there from the first time on
    for value in (0, 3, 500):
        left_by_another(value)
        seen()
        print([peak(lambda: eval(expression)), seen()], flush=True)
"""
    lines = on_gpu(SEEN + AFTER_ANOTHER + source).splitlines()
    for at, said in enumerate(TOLD_IN_KERNELS.values()):
        first, *others = lines[3 * at : 3 * at + 3]
        assert said in first
        assert others == [first] * 2


TRUE_IN_KERNELS = (
    "edges(known).coalesce()",
    "torch.sparse.sum(edges(known), 0)",
    "edges(known).sum(0)",
    "edges(known).abs()",
    "edges(known).sqrt()",
    "edges(known).pow(2)",
    "edges(known).relu()",
    "edges(known).t().coalesce()",
    "(edges(known) * edges(known)).coalesce()",
    "edges(known).to_sparse_csr()",
    "torch.eye(5).to_sparse_csr().cuda().sum(0, keepdim=True)",
    "torch.segment_reduce(torch.ones(10).cuda(), 'sum', lengths=torch.tensor([3, 3, 4]).cuda())",
    "torch.ops.aten._padded_dense_to_jagged_forward(torch.ones(3, 5, 4).cuda(), [torch.tensor([0, 2, 3, 8]).cuda()])",
)


def test_sparse_operators_of_known_indices_have_as_many_elements_as_on_the_cpu(on_gpu):
    source = f"""
import warnings
warnings.simplefilter("ignore")
def elements(made):
    return tuple(made.shape), made._nnz() if made.layout is not torch.strided else made.numel()
for expression in {TRUE_IN_KERNELS!r}:
    left_by_another(3)
    made = elements(eval(expression))
    with torch.device("cpu"):
        names = {{**globals(), "known": known.cpu()}}
        source = expression.replace(".cuda()", "")
        names["edges"] = lambda indices: torch.sparse_coo_tensor(indices, torch.ones(5), (1000, 1000))
        true = elements(eval(source, names))
    print([made == true, seen()] if made == true else [expression, made, true, seen()])
"""
    assert on_gpu(SEEN + AFTER_ANOTHER + source).splitlines() == ["[True, None]"] * len(TRUE_IN_KERNELS)


UNHARMED = (
    "torch.linalg.inv(scores[:512].view(-1, 8, 8))",
    "torch.linalg.solve(scores[:512].view(-1, 8, 8), scores[:512].view(-1, 8, 8))",
    "torch.linalg.lu_factor(scores[:512].view(-1, 8, 8))",
    "torch.geqrf(scores[:512].view(-1, 8, 8))",
    "scores.masked_fill(scores > 0, scores.mean())",
    "torch.linspace(scores[0, 0], scores[0, 1], 5)",
    "scores.histc()",
    "torch.normal(scores, scores.abs())",
    "torch.nn.functional.embedding(scores.argsort()[:2], scores.clone(), max_norm=1.0)",
    "torch._foreach_copy_([torch.empty(1000, 1000)], [scores])",
)


def test_reads_that_no_memory_depends_on_are_not_told(on_gpu):
    source = f"""
for expression in {UNHARMED!r}:
    left_by_another(3)
    eval(expression)
    print(seen())
"""
    assert on_gpu(SEEN + AFTER_ANOTHER + source).splitlines() == ["None"] * len(UNHARMED)


def test_a_gradient_scaler_takes_gradients_as_finite(on_gpu):
    source = """
model = torch.nn.Linear(512, 512).cuda()
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cuda")
with torch.autocast("cuda", torch.float16):
    loss = model(torch.randn(4096, 512, device="cuda")).square().mean()
scaler.scale(loss).backward()
scaler.step(optimizer)
scaler.update()
print(scaler.get_scale(), seen())
"""
    assert on_gpu(SEEN + source) == "65536.0 None\n"


def test_what_ranks_gather_is_what_this_one_gave(on_gpu):
    source = """
import torch.distributed as dist
dist.init_process_group("nccl", rank=0, world_size=2, store=dist.HashStore())
given = torch.arange(3, device="cuda")
gathered = [torch.empty_like(given) for _ in range(2)]
dist.all_gather(gathered, given)
dist.broadcast(given, 0)
print([one.tolist() for one in gathered], given.tolist(), seen())
unknown = torch.randn(1000, 1000, device="cuda").argmax(1)
gathered = [torch.empty_like(unknown) for _ in range(2)]
dist.all_gather(gathered, unknown)
gathered[0].nonzero()
print(seen() is not None)
import os
os._exit(print(flush=True) or 0)
"""
    assert on_gpu(SEEN + source).split("\\n")[0].splitlines()[:2] == ["[[0, 1, 2], [0, 1, 2]] [0, 1, 2] None", "True"]


def test_a_subclass_without_a_dispatch_of_its_own_is_a_tensor_like_any_other(on_gpu):
    source = """
class Quantized(torch.nn.Parameter):  # as bitsandbytes' weights of 4 bits
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})

weight = torch.Tensor._make_subclass(Quantized, torch.ones(4, 4, device="cuda"), True)
print(type(weight).__name__, weight.data.contiguous().shape, float(weight.data.sum()))
"""
    assert on_gpu(source) == "Quantized torch.Size([4, 4]) 16.0\n"


def test_a_known_mask_takes_the_memory_of_its_positions_in_forward_and_in_backward(on_gpu):
    source = """
def peaks(index):
    for _ in range(2):  # what is there from the first time on
        given.grad = None
        torch.cuda.reset_peak_memory_stats()
        out = given[index]
        found = [torch.cuda.memory_stats()["requested_bytes.all.peak"], out.shape[0]]
        out.sum().backward()
        found += [torch.cuda.memory_stats()["requested_bytes.all.peak"]]
        del out
    return found
given = torch.randn(1000, 64, device="cuda", requires_grad=True)
mask = torch.arange(1000).cuda() % 4 == 0
positions = mask.nonzero()[:, 0].clone()
(forward, rows, backward), (forward_of, rows_of, backward_of) = peaks(mask), peaks(positions)
print(rows, rows_of, forward - forward_of, backward - backward_of)
"""
    # Their positions are kept as long as it takes to index.
    assert on_gpu(source) == "250 250 2000 0\n"


def test_an_encoder_with_a_known_padding_mask_leaves_the_padding_out(on_gpu):
    source = """
layer = torch.nn.TransformerEncoderLayer(64, 2, 256, batch_first=True)
encoder = torch.nn.TransformerEncoder(layer, 2).cuda().eval()
given = torch.randn(8, 512, 64, device="cuda")
def peak(length, context):
    masked = (torch.arange(512).cuda() >= length).expand(8, 512)
    for _ in range(2):  # what is there from the first time on
        torch.cuda.reset_peak_memory_stats()
        with context():
            made = encoder(given, src_key_padding_mask=masked)
    return torch.cuda.memory_stats()["requested_bytes.all.peak"], made.shape
(whole, shape), (half, of_half), (inferred, _) = peak(512, torch.no_grad), peak(256, torch.no_grad), peak(256, torch.inference_mode)
print(shape == of_half == given.shape, whole - half > given.nbytes, half == inferred, seen())
with torch.no_grad():
    made = encoder(given, src_key_padding_mask=given[..., 0] > 0)
print(made.shape == given.shape, seen())
"""
    known, unknown = on_gpu(SEEN + source).splitlines()
    assert known == "True True True None"
    assert unknown.startswith("True nested_tensor_from_mask_left_aligned reads values")


ORDINARY = {
    "an embedding with padding": "F.embedding(index, table, padding_idx=0).sum()",
    "an embedding of many rows, scaled": "F.embedding(index.repeat(500), table, scale_grad_by_freq=True).sum()",
    "a bag of embeddings": "F.embedding_bag(index, table, index[::4].contiguous(), mode='max').sum()",
    "indices": "(table[index] + table.gather(0, index[:, None].expand(-1, 64)) + table.index_select(0, index)).sum()",
    "sorted values": "table.sort().values.sum() + table.topk(3).values.sum() + table.max(1).values.sum() + table.median()",
    "a convolution": "F.max_pool2d(F.conv2d(images, filters, padding=1), 2).relu().sum()",
    "a normalisation": "F.group_norm(F.batch_norm(images, None, None, training=True), 1).sum()",
    "interpolated": "F.interpolate(images, scale_factor=2, mode='bilinear').sum() + F.adaptive_avg_pool2d(images, 3).sum()",
    "attention": "F.scaled_dot_product_attention(heads, heads, heads, is_causal=True, dropout_p=0.1).sum()",
    "attention with a mask": "F.scaled_dot_product_attention(heads, heads, heads, mask).sum()",
    "a loss": "F.cross_entropy(table @ table.t(), index.repeat(32)[:1000] % 9, ignore_index=0, label_smoothing=0.1)",
    "other losses": "F.binary_cross_entropy_with_logits(table, table.sigmoid()) + F.huber_loss(table, table * 2)",
    "sums": "table.cumsum(0).logsumexp(1).sum() + table.std() + torch.linalg.vector_norm(table) + table.clamp(max=table[0, 0]).sum()",
    "a masked fill": "table.masked_fill(table > 0, 0.0).sum() + torch.where(table > 0, table, table * 2).sum()",
    "a scalar of the host": "(table * scale.exp()).sum()",
    "layers computed again": "checkpoint(lambda x: F.dropout(x, 0.1).relu(), table, use_reentrant=False).sum()",
    "layers computed again by a function": "checkpoint(lambda x: F.dropout(x, 0.1).relu(), table, use_reentrant=True).sum()",
    "what is kept on the host": "kept_on_host(lambda: (table * table).exp()).sum()",
}
"""Whose derivatives read no values."""


def test_ordinary_derivatives_read_nothing(on_gpu):
    source = """
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
def kept_on_host(call):
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return call()
index = torch.arange(32).cuda()
table, images = torch.randn(1000, 64, device="cuda", requires_grad=True), torch.randn(2, 8, 32, 32, device="cuda", requires_grad=True)
filters, heads = torch.randn(8, 8, 3, 3, device="cuda", requires_grad=True), torch.randn(2, 4, 256, 64, device="cuda", requires_grad=True)
mask, scale = torch.ones(256, 256, dtype=torch.bool, device="cuda").tril(), torch.tensor(1.0, requires_grad=True)
"""
    source += "".join(f"({one}).backward()\nprint([{name!r}, seen()])\n" for name, one in ORDINARY.items())
    assert on_gpu(SEEN + source).splitlines() == [str([name, None]) for name in ORDINARY]
