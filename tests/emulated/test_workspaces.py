"""Workspaces of several threads in a process."""

from __future__ import annotations

PROGRAM = """
from pytest_gpumem.emulating.emulated_process.workspaces import workspaces

# A weight with the size of a workspace is none.
weight = torch.ones(4096, 4096, dtype=torch.bfloat16, device="cuda")
assert weight.nbytes == 32 << 20
barrier = threading.Barrier(3)


def work():
    barrier.wait()
    torch.ones(8, 8, device="cuda") @ torch.ones(8, 8, device="cuda")
    barrier.wait()


threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found = workspaces()[0]
print(found.total, found.once)
"""


def test_a_workspace_for_each_thread_is_found_and_a_weight_is_not(on_gpu):
    # A new process, because the suite's preloaded process has frozen its objects.
    total, once = map(int, on_gpu(PROGRAM, before="import threading\n", TORCH_CUBLAS_WORKSPACE_CACHE="1").split())
    assert once in (32 << 20, 33 << 20), "cuBLAS's, and that of cuBLASLt if it has one"
    assert total == 3 * once
