"""torch.compile for a model, with a check that something was compiled."""

from __future__ import annotations

import os
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ConfigError
from pytest_gpumem.emulating.emulation.load import current_emulation
from pytest_gpumem.emulating.emulation.torch_build import missing_for_compiling
from pytest_gpumem.measuring.measure.reading import run_phases
from pytest_gpumem.torch_support.garbage_collector import collect_everything
from pytest_gpumem.torch_support.private_api.compiler import compiled_graphs, compiles_within_modes, load_compiler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from pytest_gpumem.measuring.measure.reading import Phase

BACKENDS = ("eager", "aot_eager")


@contextmanager
def compiled_model(model: torch.nn.Module, word: str) -> Iterator[Callable[..., Any]]:
    """Compile the model with the mode or backend from ``compile=``, and yield the compiled module.

    torch's caches of compiled code are emptied before and after the context, because code compiled by an earlier test changes
    the result. For example, torch compiles a shape as dynamic if it has compiled the same code with another shape.

    Raises:
        ConfigError: A library for compiling on an emulated GPU is missing, or this torch release cannot compile there.
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
        return f"torch {torch.__version__} cannot compile within the dispatch mode of an emulated GPU; use torch 2.11 or later"
    return None if word in BACKENDS else missing_for_compiling(os.environ)


def compile_now(phases: Iterable[Phase], word: str) -> None:
    """Run a compiled step once, so torch compiles it, and collect garbage among all objects.

    The compiler creates reference cycles between new and older objects. Without this collection, tensors in such a cycle might
    count as the step's own memory, depending on earlier compilations.

    Raises:
        ConfigError: Nothing was compiled.
    """
    with warnings_of_compiling(), compilation_required(word):
        run_phases(phases)
    collect_everything()


@contextmanager
def compilation_required(word: str) -> Iterator[None]:
    """Raise `ConfigError` at the end if nothing was compiled within the context."""
    graphs_before = compiled_graphs()
    yield
    if compiled_graphs() == graphs_before:
        raise ConfigError(f"compile={word}: torch.compile found nothing to compile in the model's forward")


@contextmanager
def warnings_of_compiling() -> Iterator[None]:
    """Ignore warnings within the context, in which torch compiles.

    Tests do not cause the compiler's warnings. But if a test suite turns warnings into errors, these warnings would fail a
    test.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
