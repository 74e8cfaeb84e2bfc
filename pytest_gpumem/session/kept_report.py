"""The report of the last session that measured something, in pytest's cache, where `gpumem why` looks for it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    import pytest

    from pytest_gpumem.reports.session_report import SessionReport

_FOLDER, _FILE = "gpumem", "report.json"


def keep(config: pytest.Config, report: SessionReport) -> None:
    """Keep the report of a session for later, in place of the one before.

    One without a result leaves the one before. Where the cache cannot be written, none is kept, and no session fails for it.
    """
    cache = config.cache if hasattr(config, "cache") else None
    if cache is None or not report.results:
        return
    from pytest_gpumem.reports.json_report import to_json

    with suppress(OSError):
        path = cache.mkdir(_FOLDER) / _FILE
        # If this report cannot be written, the one of an older session must not be taken for it.
        path.unlink(missing_ok=True)
        write_whole(path, to_json(report))


def kept_in(config: pytest.Config) -> Path | None:
    """Return the file that `keep` writes, before pytest makes its cache; ``None`` where the cache is switched off.

    A folder of ``Cache.mkdir`` lies in ``d`` of the folder that the setting ``cache_dir`` names.
    """
    if not config.pluginmanager.has_plugin("cacheprovider"):
        return None
    folder = os.path.expandvars(Path(str(config.getini("cache_dir"))).expanduser())
    return config.rootpath / folder / "d" / _FOLDER / _FILE
