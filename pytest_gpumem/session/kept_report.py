"""The report of the last session that measured something, in pytest's cache, where `gpumem why` looks for it."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from pytest_gpumem.config.project_files import cache_folder
from pytest_gpumem.whole_file import write_whole

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from pytest_gpumem.reports.session_report import SessionReport

_FOLDER, _FILE = "gpumem", "report.json"


def keep(config: pytest.Config, report: SessionReport) -> str | None:
    """Keep the report of a session for later, in place of the previous one.

    A session without a result keeps the previous report. A cache that cannot be written keeps none, and fails no session.

    Returns:
        A sentence if the cache is reached by a symbolic link that leaves the root directory. A branch can have such a link,
        so nothing is written through it.
    """
    cache = config.cache if hasattr(config, "cache") else None
    if cache is None or not report.results:
        return None
    from pytest_gpumem.reports.json_report import to_json

    folder = cache_folder(config.rootpath, config.getini("cache_dir"))
    with suppress(OSError):
        if _leaves(config.rootpath, folder):
            return (
                f"why: no report is kept, because {folder} leads out of the root directory by a symbolic link, which is not "
                "followed; remove the link, or name another folder by pytest's setting cache_dir"
            )
        path = cache.mkdir(_FOLDER) / _FILE
        # If this report cannot be written, the one of an older session must not be taken for it.
        path.unlink(missing_ok=True)
        write_whole(path, to_json(report))
    return None


def _leaves(root: Path, cache: Path) -> bool:
    """Return whether the folder that is written to is outside of the root, though its path is within it.

    A cache that the settings put outside is trusted itself.
    """
    trusted = root if cache.is_relative_to(root) else cache
    return not kept_in(cache).parent.resolve().is_relative_to(trusted.resolve())


def kept_in(cache: Path) -> Path:
    """Return the file that `keep` writes into pytest's cache. A folder from ``Cache.mkdir`` is in its folder ``d``."""
    return cache / "d" / _FOLDER / _FILE
