"""Environment variables for this package.

Variables that processes of this package set for each other are defined beside the code that sets them.
"""

from __future__ import annotations

CACHE = "GPUMEM_CACHE"
"""Folder for this package's files: emulation libraries, environments of ``gpumem ab``, bisections and compiled kernels. The
default is ``pytest-gpumem`` in the user's cache (``~/.cache`` on Linux)."""
EMULATED = "GPUMEM_EMULATED"
"""The emulated GPU, for example ``emulated:h100``. A session with an emulated GPU sets it for itself and all processes
that it starts. It also sets ``GPUMEM_EMULATED_GPU`` to the card's figures, so processes in other folders know your own cards.
A test can use the variable to skip itself::

    import os

    import pytest
    import torch


    @pytest.mark.skipif("GPUMEM_EMULATED" in os.environ, reason="needs cuSOLVER")
    def test_solve(gpumem):
        matrix = torch.eye(64, device=gpumem.device)
        gpumem.measure(lambda: torch.linalg.solve(matrix, matrix))
"""
EMULATED_CARD = "GPUMEM_EMULATED_CARD"
"""Path of a file by which processes share one emulated card's memory. The bytes of each process, and 545 MB for its CUDA
context, are then missing for the other processes until it ends. Without the variable each process has a card of its own.
``--gpumem-pack`` sets it for the workers of a session."""
EMULATED_ADDRESSES = "GPUMEM_EMULATED_ADDRESSES"
"""With ``ascending``, an emulated GPU reserves address space from low to high, as sandboxes such as gVisor do. Without the
variable it reserves from high to low, as ordinary Linux does. Up to torch 2.11 this order changes peaks by less than one
percent."""
COMPILER = "CC"
"""C compiler for the libraries of the emulated GPU, with arguments: ``ccache gcc``. The default is the first of ``cc``,
``gcc`` and ``clang``. The libraries are compiled once for each release of torch."""
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The GPUs that CUDA shows to a process. If there are several, and the session has an option of this plugin or a
``[tool.gpumem]`` table, each worker of pytest-xdist gets one GPU before CUDA starts: ``gw0`` the first, ``gw1`` the second, and
so on in turn."""
ALLOC_CONF = "PYTORCH_ALLOC_CONF"
"""Settings of torch's allocator. A baseline stores them in its environment as ``allocator``."""
CUDA_ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"
"""The older name of ``PYTORCH_ALLOC_CONF``, with the same effect."""
CPU_CAPABILITY = "ATEN_CPU_CAPABILITY"
"""Instruction set of torch's kernels on the CPU, for example ``avx2``. A baseline stores it in its environment as
``cpu_capability``, because it affects ``peak_allocated``."""
ONEDNN_MAX_CPU_ISA = "ONEDNN_MAX_CPU_ISA"
"""Limit for the instruction set of oneDNN's kernels on the CPU, for example ``AVX512_CORE_BF16``. A baseline stores it in its
environment as a part of ``cpu_bfloat16``, because it affects ``peak_allocated`` in bfloat16 steps."""
KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"
"""Log level of torch's profiler. Unless it is set, the plugin sets it to 99 while a recording starts, so the profiler prints
nothing."""
TMPDIR = "TMPDIR"
"""Folder for temporary files. Its subfolder ``pytest-gpumem-<user id>`` contains two kinds of files: the lock that keeps other
measured tests off a GPU while a step is timed, and the ledger of ``--gpumem-pack``, until the last process with it has
ended."""
PYTEST_ADDOPTS = "PYTEST_ADDOPTS"
"""Options of pytest. They count as typed on the command line, for example for ``--gpumem-store``."""
WORLD_SIZE = "WORLD_SIZE"
"""Number of ranks, which ``torchrun`` and other launchers set. If it is above 1, the session is one rank, and ``RANK``,
``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` have to be set as well. ``LOCAL_WORLD_SIZE``, the number of ranks on this
machine, may be set."""
PY_COLORS = "PY_COLORS"
"""``1`` switches colours on, ``0`` switches them off. As in pytest, it wins over ``NO_COLOR``, ``FORCE_COLOR`` and
``TERM``."""
NO_COLOR = "NO_COLOR"
"""Switches colours off if it is not empty. It wins over ``FORCE_COLOR``."""
FORCE_COLOR = "FORCE_COLOR"
"""Switches colours on if it is not empty, also in a file or a pipe."""
TERM = "TERM"
"""With ``dumb``, a terminal gets no colours and no redrawn lines. All other terminals get colours by default."""
GITHUB_ACTIONS = "GITHUB_ACTIONS"
"""With ``true``, as in each GitHub Actions job, a session and ``gpumem merge`` write annotations and the job's summary. These
commands and ``gpumem comment`` then also read the job's other variables, such as ``GITHUB_STEP_SUMMARY``."""
GITHUB_TOKEN = "GITHUB_TOKEN"  # noqa: S105 - the variable's name
"""Token for GitHub's API, which ``gpumem comment`` needs. In GitHub Actions it is ``${{ github.token }}``."""
