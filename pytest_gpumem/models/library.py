"""Libraries of models, loaded when a model of theirs is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pytest_gpumem.models.errors import ModelError
from pytest_gpumem.steps.model_step import import_quietly

if TYPE_CHECKING:
    from pytest_gpumem.models.name import ModelName


def library_of(name: ModelName, word: str) -> Any:
    """Return the module of a library.

    Raises:
        ModelError: It is not installed, or lacks something itself, or is built for another torch.
    """
    try:
        return import_quietly(word)
    except ImportError as error:
        why = "" if error.name == word else f" ({' '.join(str(error).split())})"
        raise ModelError(f"{name} needs {word}: pip install {word}{why}") from None
    except RuntimeError as error:  # as torchvision's operators
        raise ModelError(
            f"{name} needs {word} of a build that fits this torch: {' '.join(str(error).split())}"
        ) from None
