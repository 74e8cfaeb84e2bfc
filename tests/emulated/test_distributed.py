"""torch.distributed on emulated GPUs: torch's own ProcessGroupNCCL, where every other rank does what this one does."""

from __future__ import annotations

import pytest

from tests.workspaces import KEPT

LAYERS, WIDTH = 8, 1024
WEIGHTS = LAYERS * WIDTH * WIDTH * 4
WORKSPACES = 2 * KEPT
"""Of the thread that runs forward and of autograd's."""

BEGIN = f"""
import os, sys, time
import torch
import torch.distributed as dist
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", init_method="file://" + os.environ["STORE"], rank=rank, world_size=world)
def live():
    torch.cuda.synchronize()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]
def layers():
    return torch.nn.Sequential(*(torch.nn.Linear({WIDTH}, {WIDTH}, bias=False) for _ in range({LAYERS}))).cuda()
"""
END = """
sys.stdout.flush()
dist.destroy_process_group()
"""
TRAINED = """
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(layers(), device_ids=[rank], gradient_as_bucket_view=VIEW)
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
def step():
    torch.cuda.reset_peak_memory_stats()
    model(torch.ones(4, 1024, device="cuda")).sum().backward()
    after_backward = live()
    optimizer.step()
    optimizer.zero_grad()
    return after_backward
for _ in range(2):
    step()
# Buckets are made anew in the second step. ProcessGroupNCCL looks every 0.1 s which collectives are done, and lets go of theirs.
lowest = live()
for _ in range(100):
    time.sleep(0.05)
    if live() < lowest:
        break
print(step(), live(), torch.cuda.memory_stats()["requested_bytes.all.peak"])
"""


@pytest.fixture
def ranks(processes, tmp_path):
    """Run Python as each of some ranks, on a GPU of its own, and return what each prints; all must end well."""

    def run(source: str, world: int) -> list[str]:
        store = tmp_path / f"store-{world}-{len(list(tmp_path.iterdir()))}"
        started = [
            processes.start(BEGIN + source + END, f"h100x{max(world, 2)}", RANK=rank, WORLD_SIZE=world, STORE=store)
            for rank in range(world)
        ]
        try:
            said = [process.communicate(timeout=200) for process in started]
        finally:
            for process in started:
                process.kill()
        for process, (out, error) in zip(started, said, strict=True):
            assert process.returncode == 0, out + error
        return [out for out, _ in said]

    return run


@pytest.mark.parametrize(
    ("world", "view", "copies"), [(2, False, 3), (1, True, 2)], ids=["buckets", "gradients are views of buckets"]
)
def test_ddp_holds_weights_gradients_and_buckets_on_every_rank_alike(ranks, world, view, copies):
    figures = [tuple(map(int, said.split())) for said in ranks(f"VIEW = {view}\n" + TRAINED, world)]
    # What is live, on every rank. A peak has in it what ProcessGroupNCCL has not let go of yet, which it does by
    # the clock: gradients, at most.
    assert len({one[:2] for one in figures}) == 1
    after_backward = figures[0][0]
    # And two averages of AdamW's.
    assert after_backward == (copies + 2) * WEIGHTS + WORKSPACES
    peaks = [peak for _, _, peak in figures]
    assert min(peaks) >= after_backward
    assert max(peaks) - min(peaks) < WEIGHTS


def test_fsdp_holds_its_share(ranks):
    source = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
model = layers()
for layer in model:
    fully_shard(layer, mesh=init_device_mesh("cuda", (world,)))
fully_shard(model, mesh=init_device_mesh("cuda", (world,)))
optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
for _ in range(3):
    model(torch.ones(4, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(live(), torch.cuda.memory_stats()["requested_bytes.all.peak"])
"""
    figures = [tuple(map(int, said.split())) for said in ranks(source, 2)]
    assert figures[0] == figures[1]
    assert figures[0][0] == pytest.approx(3 * WEIGHTS / 2 + WORKSPACES, abs=10_000)


def test_values_that_are_exchanged_are_known_where_this_ranks_are(ranks):
    source = """
import warnings
warnings.simplefilter("ignore")
from pytest_gpumem.emulating.host_values.scope import current
for dtype in (torch.int64, torch.int32, torch.float32, torch.bfloat16):
    sums = torch.tensor([1, 2, 3], dtype=dtype, device="cuda")
    dist.all_reduce(sums)
    assert [int(one) for one in sums] == [2, 4, 6], (dtype, sums)
most = torch.tensor([1, 2, 3], device="cuda")
dist.all_reduce(most, op=dist.ReduceOp.MAX)
assert most.tolist() == [1, 2, 3]
parts = [torch.empty_like(most) for _ in range(world)]
dist.all_gather(parts, most)
assert [part.tolist() for part in parts] == [[1, 2, 3]] * 2
both = torch.empty(6, dtype=torch.int64, device="cuda")
dist.all_gather_into_tensor(both, most)
assert both.tolist() == [1, 2, 3, 1, 2, 3]
dist.reduce_scatter_tensor(most, both)
assert int(most[2]) == 6
objects = [None] * world
dist.all_gather_object(objects, {"a": 1})
assert objects == [{"a": 1}] * 2
dist.barrier()
trouble = current().reads.take_trouble()
assert trouble is None, trouble
unknown = torch.randn(3000, 3000, device="cuda").argmax(1)
dist.all_reduce(unknown)
int(unknown[0])
print(current().reads.take_trouble())
"""
    for said in ranks(source, 2):
        assert said.startswith("a value is read that an emulated GPU does not compute")


def test_what_another_rank_sends_is_known_only_where_this_one_would_send_the_same(ranks):
    source = """
import warnings
warnings.simplefilter("ignore")
from pytest_gpumem.emulating.host_values.scope import current
def own():
    return torch.arange(1, 5, device="cuda")
def other():
    return torch.randn(3000, 3000, device="cuda").argmax(1)[:4].contiguous()
def into():
    return torch.full((4,), 7, device="cuda")
def exchanged(sent):
    received = into()
    dist.all_to_all_single(received, sent)
    return received
def exchanged_parts(sent):
    received = list(into().split(2))
    dist.all_to_all(received, list(sent.split(2)))
    return torch.cat(received)
def exchanged_unevenly(sent):
    received = into()[:3]
    dist.all_to_all_single(received, sent, [1, 2] if rank else [2, 1], [2, 2])
    return received
def functional(sent):
    from torch.distributed import _functional_collectives as collectives
    return collectives.all_to_all_single(sent, [2, 2], [2, 2], dist.group.WORLD) + 0
def gathered(sent, at):
    received = [into(), into()] if rank == at else None
    dist.gather(sent, received, dst=at)
    return torch.cat(received)[4:] if received else sent
def scattered(sent, by):
    received = into()
    dist.scatter(received, [sent, sent] if rank == by else None, src=by)
    return received
def received(begin):
    received = into()
    work = begin(received, src=1 - rank)
    if begin is dist.irecv:
        work.wait()
    return received
def batched(sent):
    received = into()
    sends = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in dist.batch_isend_irecv(sends):
        work.wait()
    return received
def coalesced(sent):
    received = into()
    dist.all_gather_into_tensor(received, sent[:2])
    return received
def is_caught(call, *given):
    current().reads.take_trouble()
    read = call(*given).tolist()
    assert read == [1, 2, 3, 4] or current().reads.first_trouble, (call.__name__, read)
    return current().reads.take_trouble() is not None
for call in (exchanged, exchanged_parts, functional, lambda sent: gathered(sent, rank)):
    assert not is_caught(call, own()) and is_caught(call, other())
for call in (batched, exchanged_unevenly):
    assert is_caught(call, own()) and is_caught(call, other())
assert not is_caught(scattered, own(), rank) and is_caught(scattered, other(), rank)
assert is_caught(scattered, own(), 1 - rank)
assert is_caught(received, dist.recv) and is_caught(received, dist.irecv)
assert is_caught(coalesced, other())
objects = [None, None]
dist.gather_object({"a": 1}, objects if rank == 0 else None, dst=0)
assert objects == [{"a": 1}] * 2 or rank, objects
assert current().reads.take_trouble() is None
print("all as expected")
"""
    assert ranks(source, 2) == ["all as expected\n"] * 2


OBJECTS = """
import os, time, torch
import torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl")
gathered = [None, None]
for number in range(2):
    dist.all_gather_object(gathered, (rank, number))
plans = [None, None] if rank == 1 else None
dist.gather_object("plan" * rank, plans, dst=1)
sent = [rank, torch.tensor([rank])]
dist.broadcast_object_list(sent, src=1)
scattered = [None]
dist.scatter_object_list(scattered, ["a", "b"] if rank == 0 else None, src=0)
alone = dist.new_group([1])
in_both = [None, None]
dist.all_gather_object(in_both, rank, group=dist.new_group([0, 1]))
assert in_both == [0, 1]
if rank == 1:
    own = [None]
    dist.all_gather_object(own, "own", group=alone)
    assert own == ["own"]
if rank == 0:
    time.sleep(0.5)
    open("written", "w").close()
dist.barrier()
# torchrun's ranks do not buffer: a single write, or their lines mix.
print(f"{rank} {gathered} {plans} {sent} {scattered} {os.path.exists('written')}\\n", end="")
dist.destroy_process_group()
"""


def test_ranks_of_torchrun_exchange_objects_and_wait_at_a_barrier(processes, tmp_path):
    (tmp_path / "ranks.py").write_text(OBJECTS, encoding="utf-8")
    torchrun = (
        "import sys; from torch.distributed.run import main; main(['--standalone', '--nproc-per-node=2', 'ranks.py'])"
    )
    done = processes.run(torchrun, "h100x2", new=True)
    assert done.returncode == 0, done.stderr
    same = "[(0, 1), (1, 1)] {} [1, tensor([1])] ['{}'] True"
    first, second = sorted(done.stdout.splitlines())
    assert first == "0 " + same.format(None, "a")
    assert second == "1 " + same.format(["", "plan"], "b")
