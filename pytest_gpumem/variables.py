"""Environment variables that this package reads.

Variables by which processes of this package hand data to one another are beside the code that sets them.
"""

from __future__ import annotations

CACHE = "GPUMEM_CACHE"
"""Folder for the files that this package keeps, in place of ``pytest-gpumem`` in the user's cache (``~/.cache`` on
Linux): emulation libraries, environments of ``gpumem ab``, bisections and compiled kernels."""
EMULATED = "GPUMEM_EMULATED"
"""The emulated GPU, for example ``emulated:h100``. A session with an emulated GPU sets it for itself and for all
processes that it starts. ``GPUMEM_EMULATED_GPU`` then has the card's figures, so processes in other folders know a card of
your own as well. A test can skip itself by the variable::

    import os

    import pytest
    import torch


    @pytest.mark.skipif("GPUMEM_EMULATED" in os.environ, reason="needs cuSOLVER")
    def test_solve(gpumem):
        matrix = torch.eye(64, device=gpumem.device)
        gpumem.measure(lambda: torch.linalg.solve(matrix, matrix))
"""
EMULATED_CARD = "GPUMEM_EMULATED_CARD"
"""Path of a file by which processes share the memory of one emulated card. A process then lacks the bytes of the others,
with 545 MB for the CUDA context of each, until they end. Without the variable each process has a card of its own.
``--gpumem-pack`` sets it for the workers of a session."""
EMULATED_ADDRESSES = "GPUMEM_EMULATED_ADDRESSES"
"""With ``ascending``, an emulated GPU reserves address space from low to high, as kernels of some sandboxes do (gVisor).
Ordinary Linux reserves it from high to low, and so does the emulated GPU without the variable. Up to torch 2.11 peaks
depend on this order, by less than one percent."""
COMPILER = "CC"
"""C compiler for the libraries of the emulated GPU, with arguments: ``ccache gcc``. Without it the first of ``cc``,
``gcc`` and ``clang`` is used. The libraries are compiled once for each release of torch."""
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The GPUs that a process may use, by CUDA. If there are several, and an option or a ``[tool.gpumem]`` table is there,
each worker of pytest-xdist gets one of them before CUDA starts: ``gw0`` the first, ``gw1`` the second, and so on in
turn."""
ALLOC_CONF = "PYTORCH_ALLOC_CONF"
"""Settings of torch's allocator. A baseline keeps them in its environment as ``allocator``."""
CUDA_ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"
"""The older name of ``PYTORCH_ALLOC_CONF``, with the same effect."""
CPU_CAPABILITY = "ATEN_CPU_CAPABILITY"
"""Instruction set of torch's kernels on the CPU, for example ``avx2``. A baseline keeps it in its environment as
``cpu_capability``, because it moves ``peak_allocated``."""
ONEDNN_MAX_CPU_ISA = "ONEDNN_MAX_CPU_ISA"
"""Limit for the instruction set of oneDNN's kernels on the CPU, for example ``AVX512_CORE_BF16``. A baseline keeps it in its
environment as a part of ``cpu_bfloat16``, because it moves ``peak_allocated`` of steps in bfloat16."""
KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"
"""Log level of torch's profiler. Unless it is set, it is 99 while a recording starts, so the profiler prints nothing."""
TMPDIR = "TMPDIR"
"""Folder for temporary files. Its folder ``pytest-gpumem-<user id>`` has the lock that keeps other measured tests off a
GPU while a step is timed, and the ledger of ``--gpumem-pack`` until the last process that packs has ended."""
PYTEST_ADDOPTS = "PYTEST_ADDOPTS"
"""Options of pytest. They count as typed on the command line, for example for ``--gpumem-store``."""
WORLD_SIZE = "WORLD_SIZE"
"""Number of ranks, which ``torchrun`` and other launchers set. Above 1 a session is one rank of several, and ``RANK``,
``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` have to be set too. ``LOCAL_WORLD_SIZE``, the number of ranks on
this machine, may be set."""
PY_COLORS = "PY_COLORS"
"""``1`` switches colours on, ``0`` switches them off. It wins over ``NO_COLOR``, ``FORCE_COLOR`` and ``TERM``, as for
pytest."""
NO_COLOR = "NO_COLOR"
"""Switches colours off, if it is not empty. It wins over ``FORCE_COLOR``."""
FORCE_COLOR = "FORCE_COLOR"
"""Switches colours on, if it is not empty, also in a file or a pipe."""
TERM = "TERM"
"""With ``dumb``, a terminal gets no colours, and no line is drawn anew. Any other terminal gets colours by default."""
GITHUB_ACTIONS = "GITHUB_ACTIONS"
"""With ``true``, as in each job of GitHub Actions, a session and ``gpumem merge`` write annotations and the job's summary.
They then also read the job's other variables, such as ``GITHUB_STEP_SUMMARY``, and so does ``gpumem comment``."""
GITHUB_TOKEN = "GITHUB_TOKEN"  # noqa: S105 - the variable's name
"""Token for GitHub's API, which ``gpumem comment`` needs. GitHub Actions has it as ``${{ github.token }}``."""
