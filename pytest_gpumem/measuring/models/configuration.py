"""Read a model's config.json. A configuration that names code to load is refused."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from pytest_gpumem.base.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pytest_gpumem.measuring.models.name import ModelName

_IMPLEMENTATION = "implementation"
"""Part of each key that chooses an implementation for attention or experts:

``attn_implementation``, ``_experts_implementation_internal``, ...
"""
_IN_THE_LIBRARY = re.compile(r"\w*")
"""Matches an implementation in transformers itself, such as ``sdpa``. Texts such as ``ORG/NAME``, ``ORG/NAME:function`` and
``paged|ORG/NAME`` name kernels on the hub instead, which are not loaded."""
_FETCHED = ("backbone", "architecture", "backbone_kwargs", "model_args")
"""Keys for which timm or ``AutoConfig`` downloads or opens a file if the value contains a repository, a path or a URL.

Any other value for these keys names a class.
"""
_ELSEWHERE = re.compile(r"[/\\:]")
_CODE = ("trust_remote_code", "use_kernels", "kernel_config", "checkpoint_path")
"""Keys that allow code from the hub, or load a pickled file. For example, LightGlue models in transformers up to 5.0 obey
``trust_remote_code`` in a configuration."""
_REPLACED = ("attribute_map",)
"""Keys that replace an attribute of the configuration's class. With ``attribute_map``, any key could be renamed to a refused
key."""
AUTO_MAP = "auto_map"
LINKS = (AUTO_MAP, "_name_or_path", "name_or_path", "configuration_files", "custom_pipelines")
"""Keys that lead to other files or repositories.

Such keys are removed and not refused, because many published configurations contain one, and no model in the library needs one.
"""
_WEIGHTS = "use_pretrained_backbone"


def read_configuration(name: ModelName, file: Path) -> dict[str, Any]:
    """Return the configuration in a file without changes.

    Args:
        name: The model's name, for messages.
        file: A config.json, which may have been written by strangers.

    Raises:
        ModelError: The file does not contain a JSON object, or the configuration names code or files to load.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        refused = next(_named_code(content), None)
    except RecursionError:
        raise ModelError(f"{name}: not a configuration: the JSON file is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{name}: not a valid JSON file: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{name}: not a configuration: the JSON file contains no object")
    if refused is not None:
        key, value = (json.dumps(each) for each in refused)
        raise ModelError(
            f"{name}: the configuration names code or files outside the library ({key[1:-1]}: {value[:80]}), "
            "which are not loaded; remove the key from a copy of the config.json, and give the path of the copy"
        )
    return content


def without_links(value: Any) -> Any:
    """Return a configuration, or a nested part, without the keys that lead to other files or repositories."""
    if isinstance(value, dict):
        settings = {key: without_links(child) for key, child in value.items() if key not in LINKS}
        # Switch pretrained backbone weights off. They would be downloaded, but all weights are random here.
        return settings | {_WEIGHTS: False} if settings.get(_WEIGHTS) else settings
    return [without_links(element) for element in value] if isinstance(value, list) else value


def _named_code(value: object, key: str = "", path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted path and the value for each value that names code or a file.

    ``key`` is the innermost key above ``value`` that restricts which values are allowed, for example ``attn_implementation``.
    """
    if isinstance(value, dict):
        for name, child in value.items():
            child_path = f"{path}.{name}" if path else name
            if (name in _CODE and child) or name in _REPLACED or name.startswith("__"):
                yield child_path, child
            else:
                decides = _IMPLEMENTATION in name or name in _FETCHED
                yield from _named_code(child, name if decides else key, child_path)
    elif isinstance(value, list):
        for element in value:
            yield from _named_code(element, key, path)
    elif isinstance(value, str) and (
        (_IMPLEMENTATION in key and not _IN_THE_LIBRARY.fullmatch(value))
        or (key in _FETCHED and _ELSEWHERE.search(value))
    ):
        yield path, value
