"""``gpumem doctor``: checks which measurements work on this machine, and how to enable the others."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pytest_gpumem.base.errors import BackendError, SettingsError
from pytest_gpumem.base.git import restoring_command
from pytest_gpumem.emulating.emulated_process.before_torch import DESCRIPTION
from pytest_gpumem.emulating.emulation.gpus import DEFAULT, described, emulated_gpu
from pytest_gpumem.facts.values.option_words import EMULATED
from pytest_gpumem.judging.baselines.bucket import without_credentials
from pytest_gpumem.judging.baselines.folder import Folder
from pytest_gpumem.measuring.devices.registry import AUTO, BUILT_IN
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
    help="Also check the device in the project's settings if the project's `conftest.py` adds it. This runs the `conftest.py`.",
)
def doctor(*, store: str | None, form: str, conftest: bool) -> None:
    """Check which measurements work here, and how to enable the others.

    The command checks torch, the driver, each device, the project's settings and its store. For each check it prints a row with
    `ok`, `limited` or `no`, and below the row a way to fix the problem. It also compares the current environment with the
    environments in which the baselines in the store were recorded.

    Separate processes open the devices, so a crash in torch does not end the command. No step runs, and no code of the project
    except with --conftest. The command writes only the compiled libraries of an emulated GPU, if they are missing.

    \b
    Examples:
      gpumem doctor
      gpumem doctor --format json

    Exit status: 0 if measuring works here on the device in the project's settings, 1 if it does not, or after Ctrl-C, 2 if the
    settings are wrong or name an unknown device, or for wrong usage.
    \f
    With `device = "auto"` the exit status is 0, because measuring on the CPU works on any machine.

    ## Output

    This project has no settings and no baselines, and the CPU build of torch is installed:

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
    | `ok` | the measurement works without limits |
    | `limited` | it works with limits: times only in seconds, workspaces counted as 0, or verdicts that may be `uncertain` |
    | `no` | the measurement does not work; the row `project` says whether the project's settings need it |

    ## Rows

    - The command always opens `cuda`, `cpu` and an emulated GPU. This is the emulated GPU in the settings, or `emulated:h100`
      if the settings name another device. If torch cannot be imported for a device, the device's row says so. A device from an
      installed plugin, or with `--conftest` from a `conftest.py`, is opened only if the settings name it. The command does not
      wait for the lock that protects timed steps.
    - `clock of` a device says whether step times can be compared in clock cycles, or only in seconds.
    - `load on` a device watches the device for half a second. The row names other load that would make a step's time invalid.
    - `baselines of` a device lists the differences between the current environment and the environment in which the baselines
      were recorded. Only differences that can change a [metric](metrics.md) in these baselines are listed. Another release of
      cuDNN changes only the metrics of steps with convolutions.
    - `settings` names a table `[tool.gpumem]` that pytest does not read: the table is in the `pyproject.toml` of a nested
      project, is above pytest's root directory, or has a mistyped name such as `[tool.gpumen]`.

    ## JSON

    `--format json` prints an object with `format` (1), `exit_status`, `findings` and `facts`. Each finding is a row of the
    text, with `status`, `subject`, `fact` and `mend`, the fix. `facts` are the values from which the findings follow.
    """
    # Copy the environment variables now, because a conftest.py could change them later.
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
    """Return the nearest pyproject.toml with settings, if pytest's root directory is above this file, so pytest ignores it."""
    current_folder = Path.cwd()
    folders = (current_folder, *current_folder.parents)
    nearest = next((folder for folder in folders if (folder / _SETTINGS).exists()), None)
    if nearest is None or root not in nearest.parents:
        return None
    with input_errors(SettingsError):
        return None if read_table(nearest / _SETTINGS) is None else str(nearest / _SETTINGS)


def _added(settings: Settings, *, conftest: bool) -> DeviceFacts:
    """Open the device in the settings, which a plugin or a conftest.py adds, and return the facts about it.

    Raises:
        InputError: No plugin or conftest.py adds this device.
    """
    factories = {name: make for devices in devices_of_plugins(conftest=conftest) for name, make in devices.items()}
    try:
        check_device(settings, [*BUILT_IN, AUTO, *factories], typed=False)
    except SettingsError as error:
        hint = (
            ""
            if conftest
            else "; if a conftest.py adds the device, `gpumem doctor --conftest` runs this conftest.py and checks the device"
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
