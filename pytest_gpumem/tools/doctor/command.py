"""``gpumem doctor``: checks which measurements work on this machine, and how to enable the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.git import restoring_command
from pytest_gpumem.emulating.emulated_process.before_torch import DESCRIPTION
from pytest_gpumem.emulating.emulation.gpus import DEFAULT, described, emulated_gpu
from pytest_gpumem.facts.values.option_words import EMULATED
from pytest_gpumem.judging.baselines.errors import BackendError
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.judging.baselines.url_backend import without_credentials
from pytest_gpumem.measuring.devices.registry import AUTO, BUILT_IN
from pytest_gpumem.plugin.config.errors import SettingsError
from pytest_gpumem.plugin.config.settings import check_device, read_table
from pytest_gpumem.tools.console.project import (
    NOT_LOADED,
    backend_at,
    devices_of_plugins,
    files_around,
    read_baselines,
    with_store,
)
from pytest_gpumem.tools.console.store_options import store_option
from pytest_gpumem.tools.console.streams import InputError, format_option, input_errors, screen, write_lines
from pytest_gpumem.tools.doctor import collecting
from pytest_gpumem.tools.doctor.facts import DeviceFacts, Facts, StoreFacts
from pytest_gpumem.tools.doctor.findings import exit_status, findings
from pytest_gpumem.tools.doctor.probe import open_device
from pytest_gpumem.tools.doctor.texts import lines, to_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pytest_gpumem.plugin.config.project_files import ProjectFiles
    from pytest_gpumem.plugin.config.settings import Settings

_SETTINGS = "pyproject.toml"


@click.command()
@store_option
@format_option("json")
@click.option(
    "--conftest",
    is_flag=True,
    help="Also check a device that the project's `conftest.py` adds. This runs that file.",
)
def doctor(*, store: str | None, form: str, conftest: bool) -> None:
    """Check which measurements work here, and how to enable the others.

    The command prints a row for each finding: `ok`, `limited` or `no`, its subject and a fact. The line below says how to fix
    it. The command compares the current environment with the environments in which the store's baselines were recorded.

    Each device is opened in a process of its own. No step is run, and no code of the project except with --conftest. The
    command writes only the compiled libraries of an emulated GPU, if they are missing.

    \b
    Examples:
      gpumem doctor
      gpumem doctor --format json

    Exit status: 0 if the device in the project's settings can be measured here, 1 if it cannot, or after Ctrl-C, 2 if the
    settings are wrong or name an unknown device, or for wrong usage.
    \f
    With `device = "auto"`, the exit status is 0, because the CPU can always be measured.

    ## Output

    With the CPU build of torch, in a project without settings and baselines:

    ```console
    $ gpumem doctor
    ...
    no       cuda           no CUDA device: torch 2.13.0+cpu is built without CUDA
             fix: measure on an emulated GPU (--gpumem-device=emulated:h100) or on the CPU (--gpumem-device=cpu)
    ok       cpu            CPU (x86_64): bytes, counts and times
    ...
    limited  store          there is no gpumem-baselines: nothing can be compared
             fix: pytest --gpumem-update=new
    no       project        device = 'cuda' by default cannot be measured here
             fix: see the row of cuda; here --gpumem-device=cpu can

    gpumem: 5 ok, 3 limited, 4 no; device = 'cuda' by default cannot be measured here
    ```

    | status | meaning |
    |---|---|
    | `ok` | it is measured as it should be |
    | `limited` | it is measured with limits: times only in seconds, workspaces counted as 0, verdicts that may be `uncertain` |
    | `no` | it is not measured, which matters only if a test needs it: see the row `project` |

    ## Rows

    - `cuda`, `cpu` and an emulated GPU (that of the settings, or `h100`) are always opened. If torch cannot be imported there,
      the row says so. A device from an installed plugin, or with `--conftest` from a `conftest.py`, is opened if the settings
      name it. The lock for timed steps is not taken.
    - `clock of` a device says whether times can also be measured in cycles.
    - `load on` a device names other load within half a second, if the gate would judge a step as disturbed by it.
    - `baselines of` a device lists differences between the current environment and theirs, if a difference can change a
      [metric](metrics.md) that they contain. A release of cuDNN counts only if convolutions run.
    - `settings` names a `[tool.gpumem]` that pytest does not read: in the `pyproject.toml` of a nested project, above pytest's
      root directory, or with a mistyped name such as `[tool.gpumen]`.

    ## JSON

    `--format json` prints `format` (1), `exit_status`, `findings` (each with `status`, `subject`, `fact` and `mend`, the fix)
    and `facts`, the values from which the findings were made.
    """
    # A conftest.py that runs later could change the environment.
    environment = dict(os.environ)
    files = files_around()
    if not files.is_plugin_loaded:
        raise InputError(NOT_LOADED)
    facts = _facts(files, store, environment, conftest=conftest)
    rows = findings(facts)
    if form == "json":
        click.echo(to_json(facts, rows), nl=False)
    else:
        write_lines(lines(rows, screen()))
    sys.exit(exit_status(facts))


def _facts(files: ProjectFiles, store: str | None, environment: Mapping[str, str], *, conftest: bool) -> Facts:
    with input_errors(SettingsError):
        settings, is_default = with_store(files.settings, store), not files.names_device
    word = settings.device
    emulated = word if word.startswith(EMULATED) else EMULATED + DEFAULT
    with input_errors(ValueError):
        gpu = emulated_gpu(emulated, settings.gpus)
    in_process = collecting.probe(list(BUILT_IN), environment)
    on_emulated = collecting.probe([emulated], {**environment, DESCRIPTION: described(gpu)})
    added = () if word in (*BUILT_IN, AUTO, emulated) else (_added(settings, conftest=conftest),)
    return Facts(
        device=word,
        releases=collecting.releases(),
        driver=collecting.driver(),
        torch=in_process.torch,
        torch_emulated=on_emulated.torch,
        devices=(*in_process.devices, *on_emulated.devices, *added),
        store=_store(settings),
        compiling=collecting.compiling(environment),
        other_command=collecting.other_command(),
        ignored=_ignored(files.root),
        is_default_device=is_default,
        unread=files.unread,
    )


def _ignored(root: Path) -> str | None:
    """Return the nearest pyproject.toml if pytest does not read its settings, because the root directory is above it."""
    current_folder = Path.cwd()
    folders = (current_folder, *current_folder.parents)
    nearest = next((folder for folder in folders if (folder / _SETTINGS).exists()), None)
    if nearest is None or root not in nearest.parents:
        return None
    with input_errors(SettingsError):
        return None if read_table(nearest / _SETTINGS) is None else str(nearest / _SETTINGS)


def _added(settings: Settings, *, conftest: bool) -> DeviceFacts:
    """Return the facts about a device from a plugin or a conftest.py. Raises `InputError` if no such device exists."""
    factories = {name: make for devices in devices_of_plugins(conftest=conftest) for name, make in devices.items()}
    try:
        check_device(settings, [*BUILT_IN, AUTO, *factories], typed=False)
    except SettingsError as error:
        hint = (
            ""
            if conftest
            else "; if a conftest.py adds it, `gpumem doctor --conftest` runs that file and checks the device"
        )
        raise InputError(f"{error}{hint}") from None
    return open_device(settings.device, factories[settings.device])


def _store(settings: Settings) -> StoreFacts:
    location = without_credentials(settings.store)
    try:
        backend = backend_at(settings.store, settings.store_base)
        if isinstance(backend, Folder) and not backend.root.is_dir():
            return StoreFacts(location, is_there=False, restore=restoring_command(backend.root))
        return StoreFacts(location, collecting.stored_facts(read_baselines(backend)))
    except (BackendError, InputError) as error:
        message = error.message if isinstance(error, InputError) else str(error)
        return StoreFacts(location, trouble=message.replace(f"{Path.cwd()}{os.sep}", ""))
