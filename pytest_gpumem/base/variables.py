"""Names of the environment variables that users can set for this package.

Variables between this package's own processes are defined in the modules that set them.
"""

from __future__ import annotations

CACHE = "GPUMEM_CACHE"
"""Folder for this package's cached files: libraries for emulation, the counter of other processes' memory on the CPU,
environments for ``gpumem ab``, bisections and compiled kernels. The default is ``pytest-gpumem`` in the user's cache folder
(``~/.cache`` on Linux)."""
EMULATED = "GPUMEM_EMULATED"
"""The emulated GPU, for example ``emulated:h100``. A session with an emulated GPU sets this variable for itself and all
processes that it starts. The session also sets ``GPUMEM_EMULATED_GPU`` to the card's figures, so processes in other folders
know the cards from your settings. A test can use ``GPUMEM_EMULATED`` to skip itself::

    import os

    import pytest
    import torch


    @pytest.mark.skipif("GPUMEM_EMULATED" in os.environ, reason="needs cuSOLVER")
    def test_solve(gpumem):
        matrix = torch.eye(64, device=gpumem.device)
        gpumem.measure(lambda: torch.linalg.solve(matrix, matrix))
"""
EMULATED_CARD = "GPUMEM_EMULATED_CARD"
"""Path of a file through which several processes share the memory of one emulated card. Until a process ends, its bytes and
545 MB for its CUDA context are not available to the other processes. Without this variable each process has its own card.
``--gpumem-pack`` sets this variable for the workers of a session."""
EMULATED_ADDRESSES = "GPUMEM_EMULATED_ADDRESSES"
"""With ``ascending``, an emulated GPU reserves addresses from low to high, as in sandboxes such as gVisor. By default, the
order is from high to low, as on ordinary Linux. Up to torch 2.11, the order changes peaks by less than one percent."""
COMPILER = "CC"
"""C compiler for the libraries of the emulated GPU, and for the counter of other processes' memory on the CPU. The value may
have several words, as in ``ccache gcc``. The default is the first of ``cc``, ``gcc`` and ``clang``. The libraries are compiled
once for each release of torch, and the counter once."""
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
"""The GPUs visible to a process. If there are several, and the session has an option of this plugin or a ``[tool.gpumem]``
table, this plugin assigns one GPU to each pytest-xdist worker before CUDA starts: ``gw0`` gets the first GPU, ``gw1`` the
second. If there are more workers than GPUs, the next worker gets the first GPU again."""
ALLOC_CONF = "PYTORCH_ALLOC_CONF"
"""Settings of torch's allocator. A baseline stores them in its environment as ``allocator``."""
CUDA_ALLOC_CONF = "PYTORCH_CUDA_ALLOC_CONF"
"""The older name of ``PYTORCH_ALLOC_CONF``, with the same effect."""
CPU_CAPABILITY = "ATEN_CPU_CAPABILITY"
"""Instruction set of torch's kernels on the CPU, for example ``avx2``. A baseline stores the instruction set in its
environment as ``cpu_capability``, because it affects ``peak_allocated``."""
ONEDNN_MAX_CPU_ISA = "ONEDNN_MAX_CPU_ISA"
"""Limit for the instruction set of oneDNN's kernels on the CPU, for example ``AVX512_CORE_BF16``. A baseline stores the
effect in its environment as ``cpu_bfloat16``, because it changes ``peak_allocated`` in bfloat16 steps."""
KINETO_LOG_LEVEL = "KINETO_LOG_LEVEL"
"""Log level of torch's profiler. By default, the plugin sets the level to 99 while a recording starts, so the profiler
prints nothing."""
TMPDIR = "TMPDIR"
"""Folder for temporary files. Its subfolder ``pytest-gpumem-<user id>`` contains two kinds of files. A lock file keeps
other measured tests off a GPU while a step is timed. With ``--gpumem-pack``, a ledger file lists the memory reserved by
each process. The ledger file is removed when the last of these processes ends."""
PYTEST_ADDOPTS = "PYTEST_ADDOPTS"
"""Options for pytest. This plugin treats them as if you had typed them on the command line, for example ``--gpumem-store``."""
WORLD_SIZE = "WORLD_SIZE"
"""Number of ranks, set by ``torchrun`` and other launchers. If it is above 1, the session is one of these ranks, and
``RANK``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT`` have to be set as well. ``LOCAL_WORLD_SIZE``, the number of
ranks on this machine, is optional."""
PY_COLORS = "PY_COLORS"
"""``1`` switches colours on, ``0`` switches them off. As in pytest, this variable takes precedence over ``NO_COLOR``,
``FORCE_COLOR`` and ``TERM``."""
NO_COLOR = "NO_COLOR"
"""Any value except an empty one switches colours off. This variable takes precedence over ``FORCE_COLOR``."""
FORCE_COLOR = "FORCE_COLOR"
"""Any value except an empty one switches colours on, even if the output goes to a file or a pipe."""
TERM = "TERM"
"""With ``dumb``, the output to a terminal has no colours and no redrawn lines. On other terminals, colours are on by
default."""
GITHUB_ACTIONS = "GITHUB_ACTIONS"
"""With ``true``, as in each GitHub Actions job, a session and ``gpumem merge`` write annotations and the job's summary. These
commands and ``gpumem comment`` then also read the job's other variables, such as ``GITHUB_STEP_SUMMARY``."""
GITHUB_TOKEN = "GITHUB_TOKEN"  # noqa: S105 - the variable's name
"""Token for GitHub's API, which ``gpumem comment`` needs. In GitHub Actions it is ``${{ github.token }}``."""
