"""What writing a report needs that is not always installed: said before any test runs."""

from __future__ import annotations

import importlib.util
from pathlib import PurePath

_NEEDED = {".html": ("jinja2", "plotly")}
"""By a file's suffix: what the extra ``report`` installs."""


def lacking(file: str) -> str | None:
    """Why the report ``file`` cannot be written here, as a sentence that says how to mend it; ``None`` where it can."""
    missing = [name for name in _NEEDED.get(PurePath(file).suffix, ()) if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"the HTML report needs {' and '.join(missing)}: pip install 'pytest-gpumem[report]'"
