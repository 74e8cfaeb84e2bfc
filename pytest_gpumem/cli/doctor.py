"""``gpumem doctor``: what can be measured here, and what is to be done about the rest."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.baselines.errors import BackendError
from pytest_gpumem.baselines.folder import Folder
from pytest_gpumem.baselines.url_backend import without_credentials
from pytest_gpumem.cli import completion
from pytest_gpumem.cli.project import (
    NOT_LOADED,
    backend_at,
    devices_of_plugins,
    files_around,
    read_baselines,
    with_store,
)
from pytest_gpumem.cli.streams import InputError, format_option, input_errors, not_there, screen, write_lines
from pytest_gpumem.config.errors import SettingsError
from pytest_gpumem.config.settings import check_device, read_table
from pytest_gpumem.devices.registry import AUTO, BUILT_IN
from pytest_gpumem.doctor import looking
from pytest_gpumem.doctor.facts import DeviceFacts, Facts, StoreFacts
from pytest_gpumem.doctor.findings import exit_status, findings
from pytest_gpumem.doctor.probe import opened
from pytest_gpumem.doctor.texts import lines, to_json
from pytest_gpumem.emulated_process.before_torch import DESCRIPTION
from pytest_gpumem.emulation.gpus import DEFAULT, described, emulated_gpu
from pytest_gpumem.git import restoring_command
from pytest_gpumem.values.option_words import EMULATED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.config.project_files import ProjectFiles
    from pytest_gpumem.config.settings import Settings

_SETTINGS = "pyproject.toml"


@click.command()
@click.option(
    "--store",
    metavar="PATH|URL",
    shell_complete=completion.folders,
    help="Where the baselines lie, if not where the project's settings say.",
)
@format_option("json")
@not_there("--json", "write --format json")
@click.option(
    "--conftest", is_flag=True, help="Also look at a device that the project's conftest.py adds, which runs that file."
)
def doctor(*, store: str | None, form: str, conftest: bool) -> None:
    """Tell what can be measured here and what not, and how to fix it.

    Prints a row for each finding: `ok`, `limited` or `no`, of what, the fact, and on the next line how to fix it. Opens each
    device in a process of its own, and runs no step and no code of the project. Compares the environment here with those that
    the baselines of these devices were recorded in. Writes nothing except the compiled stand-ins of an emulated GPU, as a
    session does.

    \b
    Examples:
      gpumem doctor
      gpumem doctor --format json

    Exit status: 0 when the device of the project's settings can be measured here, 1 when it cannot, 2 for wrong settings or
    usage.
    """
    # Before a conftest.py can change it.
    environment = dict(os.environ)
    files = files_around()
    if not files.is_plugin_loaded:
        raise InputError(NOT_LOADED)
    facts = _facts(files, store, environment, conftest=conftest)
    found = findings(facts)
    if form == "json":
        click.echo(to_json(facts, found), nl=False)
    else:
        write_lines(lines(found, screen()))
    sys.exit(exit_status(facts))


def _facts(files: ProjectFiles, store: str | None, environment: Mapping[str, str], *, conftest: bool) -> Facts:
    with input_errors(SettingsError):
        settings, is_default = with_store(files.settings, store), not files.names_device
    word = settings.device
    emulated = word if word.startswith(EMULATED) else EMULATED + DEFAULT
    with input_errors(ValueError):
        gpu = emulated_gpu(emulated, settings.gpus)
    here = looking.look(list(BUILT_IN), environment)
    on_emulated = looking.look([emulated], {**environment, DESCRIPTION: described(gpu)})
    added = () if word in (*BUILT_IN, AUTO, emulated) else (_added(settings, conftest=conftest),)
    return Facts(
        device=word,
        releases=looking.releases(),
        driver=looking.driver(),
        torch=here.torch,
        torch_emulated=on_emulated.torch,
        devices=(*here.devices, *on_emulated.devices, *added),
        store=_store(settings),
        compiling=looking.compiling(environment),
        reports=looking.reports(),
        other_command=looking.other_command(),
        ignored=_ignored(files.root),
        is_default_device=is_default,
        unread=files.unread,
    )


def _ignored(root: Path) -> str | None:
    """Return the nearest pyproject.toml if it has settings that are not read, since pytest's root directory is above it."""
    here = Path.cwd()
    nearest = next((each for each in (here, *here.parents) if (each / _SETTINGS).exists()), None)
    if nearest is None or root not in nearest.parents:
        return None
    with input_errors(SettingsError):
        return None if read_table(nearest / _SETTINGS) is None else str(nearest / _SETTINGS)


def _added(settings: Settings, *, conftest: bool) -> DeviceFacts:
    """Return the facts about a device that a plugin or a conftest.py adds. Raises `InputError` where none does."""
    known = {name: make for one in devices_of_plugins(conftest=conftest) for name, make in one.items()}
    try:
        check_device(settings, [*BUILT_IN, AUTO, *known], typed=False)
    except SettingsError as error:
        hint = (
            "" if conftest else "; if a conftest.py adds it, `gpumem doctor --conftest` runs that file and looks at it"
        )
        raise InputError(f"{error}{hint}") from None
    return opened(settings.device, known[settings.device])


def _store(settings: Settings) -> StoreFacts:
    location = without_credentials(settings.store)
    try:
        backend = backend_at(settings.store, settings.store_base)
        if isinstance(backend, Folder) and not backend.root.is_dir():
            return StoreFacts(location, is_there=False, restore=restoring_command(backend.root))
        return StoreFacts(location, looking.stored(read_baselines(backend)))
    except (BackendError, InputError) as error:
        message = error.message if isinstance(error, InputError) else str(error)
        return StoreFacts(location, trouble=message.replace(f"{Path.cwd()}{os.sep}", ""))
