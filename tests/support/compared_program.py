"""A program that a test compares with itself: its code runs in the test's own process, and in a process that the test starts."""

from __future__ import annotations

import json
from collections import Counter

PROGRAM = """
import os
import threading

import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

DEVICE = os.environ["DEVICE"]
AT_PEAK = os.environ.get("AT_PEAK", "backward")


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 2 * x.sign()


class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = torch.nn.Linear(64, 192)
        self.out = torch.nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).view(4, 128, 3, 4, 16).permute(2, 0, 3, 1, 4).unbind(0)
        weights = ((q @ k.transpose(-1, -2)) / 4).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).reshape(4, 128, 64))


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(64)
        self.attention = Attention()
        self.up = torch.nn.Linear(64, 256)
        self.down = torch.nn.Linear(256, 64)

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        hidden = Double.apply(functional.gelu(self.up(x)))
        hidden.mul_(0.5)  # in place
        return x + self.down(hidden)


class Force(torch.nn.Module):
    # Its forward runs a backward.
    def __init__(self):
        super().__init__()
        self.energy = Block()

    def forward(self, x):
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)
        return force * 3


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 64, 8, stride=8)
        self.plain = Block()
        self.again = Block()
        self.reentrant = Block()
        self.force = Force() if AT_PEAK == "double backward" else torch.nn.Identity()
        self.head = torch.nn.Linear(64, 10)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2).repeat(1, 2, 1)
        x = checkpoint(self.again, self.force(self.plain(x)), use_reentrant=False)
        x = checkpoint(self.reentrant, x, use_reentrant=True)
        return self.head(x.mean(1))


def keep_gradients(loss, kept):
    # At the peak, the gradients from all nodes are live.
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            node.register_hook(lambda gradients, _: kept.extend(gradients))
            nodes += [further for further, _ in node.next_functions]


def train(rank=0):
    torch.manual_seed(0)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    net = Net().to(DEVICE)
    optimizer = torch.optim.AdamW(net.parameters())
    for _ in range(2):
        kept, losses = [], []
        for _ in range(2):
            predicted = net(torch.randn(4, 3, 64, 64, device=DEVICE))
            losses.append(functional.cross_entropy(predicted, torch.zeros(4, dtype=torch.long, device=DEVICE)))
        if AT_PEAK == "forward":
            kept = [torch.randn(2048, 2048, device=DEVICE).sigmoid() for _ in range(9)]
            del kept[:]
        for loss in losses:
            if AT_PEAK != "recomputed":
                keep_gradients(loss, kept)
            loss.backward()
        del kept[:]
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    if "THREAD" in os.environ:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    else:
        train(int(os.environ.get("LOCAL_RANK", "0")))
"""
SPAWN = (
    "import compared, torch.multiprocessing as mp\nif __name__ == '__main__':\n    mp.spawn(compared.train, nprocs=1)\n"
)
TEST = """
import json
import os
import sys

from compared import train


def rows(composition):
    return [
        [row.module, row.site, row.library, row.operator, row.category, row.nbytes, row.count]
        for row in composition.rows
    ]


def test_child(gpumem):
    words = os.environ["COMMAND"].split()
    job = gpumem.launch([sys.executable, *words], explain=True)
    measured = gpumem.measure(train, explain=True)
    processes = {name: rows(process.composition) for name, process in job.processes.items()}
    print("ROWS", json.dumps([rows(measured.composition), processes]))
"""
_OWNED = ("parameter", "optimizer state")
_RANDOM_STATE = 5056
"""The bytes of the CPU's random state, which a checkpoint keeps. ``torch.get_rng_state`` calls no operator."""


def common_places(folder, pytest, **variables):
    """Run the test that compares the program with itself, and return the bytes at each place in the test's process.

    Each process must have the same bytes at the same places. A place is a module, a line, a library's line, and an operator or autograd node. These rows differ:

    - An ended process has no parameters. So a parameter, its state and its first gradient have no module there.
    - A call that runs no operator has the module's line in the test's process, and its own line in another process.
    - Scalars may have another line, for example an optimizer's.
    - Rounding and cuBLAS's workspaces have no place.
    """
    for name, text in (("compared.py", PROGRAM), ("spawn.py", SPAWN), ("test_it.py", TEST)):
        (folder / name).write_text(text, encoding="utf-8")
    done = pytest("-s", **variables)
    assert done.returncode == 0, done.stdout
    own, by_process = json.loads(done.stdout.partition("ROWS ")[2].partition("\n")[0])
    assert by_process, done.stdout
    for rows in by_process.values():
        assert _places(rows) == _places(own)
    return _places(own)


def _places(rows):
    found = Counter()
    for module, site, library, operator, category, nbytes, count in rows:
        has_owner = category in _OWNED or operator == "AccumulateGrad"
        is_elsewhere = nbytes <= 8 * count or nbytes % _RANDOM_STATE == 0
        if (site or operator) and not is_elsewhere:
            found["" if has_owner else module, site, library, operator] += nbytes
    return found
