"""torch.compile around a model, and detection of what it compiled."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.emulation.load import current_emulation
from pytest_gpumem.emulation.torch_build import what_compiling_lacks
from pytest_gpumem.measure.reading import run_phases
from pytest_gpumem.step_config.errors import ConfigError
from pytest_gpumem.torch_support.garbage_collector import collect_everything
from pytest_gpumem.torch_support.private_api import compiled_graphs, compiles_within_modes, load_compiler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from pytest_gpumem.measure.reading import Phase

BACKENDS = ("eager", "aot_eager")


@contextmanager
def compiled(model: torch.nn.Module, word: str) -> Iterator[Callable[..., Any]]:
    """Compile the model in the mode or by the backend that ``compile=`` names, and yield what is to be called in its place.

    torch's caches of compiled code are emptied before and after: what an earlier test compiled decides, for instance,
    whether a shape is compiled as a dynamic one. Raises `ConfigError` where an emulated GPU lacks what compiles for it.
    """
    import torch

    torch.compiler.reset()
    try:
        lacking = None if current_emulation() is None else _lacking(word)
        if lacking is not None:
            raise ConfigError(f"compile={word}: {lacking}")
        if word in BACKENDS:
            yield torch.compile(model, backend=word)
        else:
            load_compiler()
            yield torch.compile(model, mode=word)
    finally:
        torch.compiler.reset()


def _lacking(word: str) -> str | None:
    import torch

    if not compiles_within_modes():
        return f"torch {torch.__version__} does not compile on an emulated GPU, whose values are computed in a mode; 2.11 does"
    return None if word in BACKENDS else what_compiling_lacks(os.environ)


def compile_now(phases: Iterable[Phase], word: str) -> None:
    """Run a compiled step once, which compiles it.

    Garbage of it is collected among all objects: a compiler ties what it made to what was there before, and tensors in such
    a cycle would count as the step's own, or not, by what had been compiled before. Raises `ConfigError` when nothing was
    compiled.
    """
    with warnings_of_compiling(), something_compiled(word):
        run_phases(phases)
    collect_everything()


@contextmanager
def something_compiled(word: str) -> Iterator[None]:
    """Raise `ConfigError` when nothing is compiled within."""
    before = compiled_graphs()
    yield
    if compiled_graphs() == before:
        raise ConfigError(f"compile={word}: torch.compile found nothing to compile in the model's forward")


@contextmanager
def warnings_of_compiling() -> Iterator[None]:
    """Ignore warnings: a compiler's imports and hints are not the test's, whose suite may make them errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
