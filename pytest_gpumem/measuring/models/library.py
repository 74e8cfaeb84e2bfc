"""Import model libraries when they are needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ModelError
from pytest_gpumem.measuring.steps.model_step import import_quietly

if TYPE_CHECKING:
    from pytest_gpumem.measuring.models.name import ModelName


def library_of(name: ModelName, word: str) -> Any:
    """Return a library's module.

    Args:
        name: The model that needs the library, for messages.
        word: The library's name, with which it is imported and installed.

    Raises:
        ModelError: The library or a dependency is not installed, or the library was built for another torch release.
    """
    try:
        return import_quietly(word)
    except ImportError as error:
        why = "" if error.name == word else f" ({' '.join(str(error).split())})"
        raise ModelError(f"{name} needs {word}: pip install {word}{why}") from None
    except RuntimeError as error:  # for example, torchvision's operators do not fit torch
        raise ModelError(
            f"{name} needs a build of {word} for the installed torch: {' '.join(str(error).split())}"
        ) from None
