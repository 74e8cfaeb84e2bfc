"""A training script on several ranks: ``gpumem run`` with what torchrun gives each."""

from __future__ import annotations

SCRIPT = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
rows = 64 + (int(os.environ.get("MORE", "0")) if dist.get_rank() == 1 else 0)
for _ in range(1000):
    model(torch.ones(rows, 256)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_script_is_gated_on_each_rank_and_growth_of_one_is_named(project, run_ranks):
    (project.path / "train.py").write_text(SCRIPT)

    def run(*arguments: str, **variables: str):
        program = ("pytest_gpumem.tools.main", "run")
        return run_ranks(project.path, 2, "--steps=8", *arguments, "train.py", program=program, **variables)

    recorded = run("--gpumem-update=new")
    assert recorded.status == 0, recorded.output
    clean = run("--gpumem-baseline")
    assert clean.status == 0, clean.output
    assert "gpumem: 1 gated\n" in clean.output
    red = run("--gpumem-baseline", MORE="2000")
    assert red.status != 0
    assert "loop rank 1 of 2: Memory regressed: peak" in red.output, red.output
    assert "gpumem: 1 gated, 1 regressed\n" in red.output
    assert red.left == ()


LEAK = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(256, 256))
optimizer = torch.optim.AdamW(model.parameters())
kept = []
for _ in range(1000):
    if "LEAK" in os.environ and dist.get_rank() == 1:
        kept.append(torch.zeros(64, 256))
    batch = torch.ones(64, 256)
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_leak_of_one_rank_is_told_and_all_ranks_run_as_many_steps_for_that(project, run_ranks):
    (project.path / "train.py").write_text(LEAK)
    program = ("pytest_gpumem.tools.main", "run")
    recorded = run_ranks(project.path, 2, "--gpumem-update=new", "train.py", program=program)
    assert recorded.status == 0, recorded.output
    red = run_ranks(project.path, 2, "--gpumem-baseline", "train.py", program=program, LEAK="1")
    assert red.status != 0
    assert "loop rank 1 of 2: Memory regressed: growth per step 65.54 kB" in red.output, red.output
    rows = [line.split() for line in red.output.splitlines() if "train.py:12" in line and "zeros" in line]
    assert rows, red.output
    assert "kept in: train.kept[...]" in red.output
    assert red.left == ()
