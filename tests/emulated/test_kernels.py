"""Kernels that are compiled at run time or launched as a graph, and the times that they take, on an emulated GPU."""

from __future__ import annotations


def test_the_kernels_of_a_graph_are_launched_with_it_and_not_when_it_is_captured(on_gpu):
    told = on_gpu(
        "from pytest_gpumem.emulating.emulation.load import current_emulation\n"
        "x, graph = torch.ones(64, 64, device='cuda'), torch.cuda.CUDAGraph()\n"
        "y = x @ x\n"
        "current_emulation().forget_launches()\n"
        "with torch.cuda.graph(graph):\n    y = (x @ x).sin()\n"
        "def launched(name):\n    return sum(n for k, n in current_emulation().launches().items() if name in k)\n"
        "captured = launched('sin_kernel')\n"
        "graph.replay(); graph.replay()\n"
        # cublasSgemm_v2, and from torch 2.15 on cublasGemmEx.
        "print(captured, launched('sin_kernel'), launched('cublas'))\n"
    )
    assert told == "0 2 2\n"


def test_everything_takes_the_same_time_so_that_choices_by_time_repeat(on_gpu):
    told = on_gpu(
        "def taken(size):\n"
        "    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))\n"
        "    begin.record(); x = torch.ones(size, device='cuda').cumsum(0); end.record()\n"
        "    torch.cuda.synchronize()\n"
        "    return begin.elapsed_time(end)\n"
        "print(taken(10), taken(10**8))\n"
    )
    assert told == "1.0 1.0\n"


def test_a_kernel_that_torch_compiles_at_run_time_is_launched(on_gpu):
    told = on_gpu(
        "from pytest_gpumem.emulating.emulation.load import current_emulation\n"
        "twice = torch.cuda.jiterator._create_jit_fn('template <typename T> T twice(T x) { return 2 * x; }')\n"
        "current_emulation().forget_launches()\n"
        "print(twice(torch.empty(10, device='cuda')).shape, [n for n in current_emulation().launches() if 'twice' in n])\n"
    )
    assert told.startswith("torch.Size([10]) [")
    assert "twice" in told
