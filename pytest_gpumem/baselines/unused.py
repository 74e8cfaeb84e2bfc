"""Unused baselines: those of tests that are gone. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pytest_gpumem.gate.baseline import Key


def unused(
    stored: Iterable[tuple[str, Key]],
    *,
    measured: Collection[tuple[str, str]],
    whole_files: Collection[str],
    exists: Callable[[str], bool],
) -> list[tuple[str, Key]]:
    """Return the baselines among ``stored``, given as (slug, key), that belong to no test.

    ``measured`` are the (file, test) that were collected and are measured. Only files that were collected whole
    (``whole_files``) can tell that a test is gone; one that does not exist any more has none.
    """
    return [
        (slug, key)
        for slug, key in stored
        if (key.file in whole_files or not exists(key.file)) and (key.file, key.test) not in measured
    ]


def of_absent_devices(
    gone: Iterable[tuple[str, Key]], *, present: Collection[str], exists: Callable[[str], bool]
) -> list[tuple[str, Key]]:
    """Return those of ``gone`` whose device is not ``present`` and whose file exists: they may have a test elsewhere.

    Suites are parametrised over the devices that a machine has.
    """
    return [(slug, key) for slug, key in gone if slug not in present and exists(key.file)]


def unused_line(gone: Sequence[tuple[str, Key]]) -> str:
    """Return the sentence on unused baselines, given as (slug, key)."""
    shown = ", ".join(str(key) for _, key in gone[:3]) + (", ..." if len(gone) > 3 else "")
    return f"store: {len(gone)} unused baseline{'' if len(gone) == 1 else 's'}: {shown}; `gpumem prune` removes them"
