"""Store the report of the last session with measurements in pytest's cache, for `gpumem why`."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpumem.base.atomic_file import write_atomically
from pytest_gpumem.plugin.config.project_files import cache_folder

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from pytest_gpumem.reporting.reports.session_report import SessionReport

_FOLDER, _FILE = "gpumem", "report.json"


def write_cached_report(config: pytest.Config, report: SessionReport) -> str | None:
    """Write a session's report into pytest's cache, and replace the previous report.

    If the session has no results, the previous report stays. If the cache cannot be written, there is no report afterwards,
    but the session does not fail.

    Returns:
        A sentence if a symbolic link leads from the cache out of the root directory; otherwise ``None``. Nothing is written
        through such a link, because it may come from somebody else's branch.
    """
    cache = config.cache if hasattr(config, "cache") else None
    if cache is None or not report.results:
        return None
    from pytest_gpumem.reporting.reports.json_report import to_json

    folder = cache_folder(config.rootpath, config.getini("cache_dir"))
    with suppress(OSError):
        if _leaves(config.rootpath, folder):
            return (
                f"why: no report is kept, because {folder} leads out of the root directory by a symbolic link, which is not "
                "followed; remove the link, or set pytest's cache_dir to another folder"
            )
        path = cache.mkdir(_FOLDER) / _FILE
        # Remove the old report first. Otherwise, if writing fails, somebody may take the old report for this session's
        # report.
        path.unlink(missing_ok=True)
        write_atomically(path, to_json(report))
    return None


def _leaves(root: Path, cache: Path) -> bool:
    """Return whether a symbolic link leads from the report's folder in the root directory to a folder outside of it.

    If the settings place the cache outside of the root directory, only links that lead out of the cache folder count.
    """
    trusted = root if cache.is_relative_to(root) else cache
    return not cached_report_path(cache).parent.resolve().is_relative_to(trusted.resolve())


def cached_report_path(cache: Path) -> Path:
    """Return the report's path in pytest's cache: ``.pytest_cache/d/gpumem/report.json``."""
    return cache / "d" / _FOLDER / _FILE
