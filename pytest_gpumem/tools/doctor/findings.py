"""Derive findings from facts. A finding says whether a measurement works fully, partly or not at all, and how to fix it.

All functions are pure: they read no files and start no processes.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from pytest_gpumem.base.command_name import LONG, command_name
from pytest_gpumem.base.units import counted, format_bytes
from pytest_gpumem.base.variables import CPU_CAPABILITY, CUDA_ALLOC_CONF
from pytest_gpumem.emulating.emulation.torch_build import OLDEST
from pytest_gpumem.facts.metrics import METRICS
from pytest_gpumem.facts.values.option_words import EMULATED, EMULATED_SLUG
from pytest_gpumem.judging.baselines.location import is_url
from pytest_gpumem.measuring.timing.validity import disturbance

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpumem.facts.measurement import Environment
    from pytest_gpumem.tools.doctor.facts import DeviceFacts, Facts, StoredFacts

Status = Literal["ok", "limited", "no"]
STATUSES: tuple[Status, ...] = get_args(Status)
_MACHINE = "machine"
_EMULATE = "measure on an emulated GPU (--gpumem-device=emulated:h100) or on the CPU (--gpumem-device=cpu)"
_RECORD_HERE = '`pytest --gpumem-update=all --gpumem-reason="{}"` records them again'
_INSTRUCTION_SETS = ("DEFAULT", "AVX2", "AVX512")
"""torch's instruction sets on x86-64, in ascending order. Each set includes the sets before it."""
_MEGA = 1e6
_PYPI, _BUILDS = "https://pypi.org/simple", "https://download.pytorch.org/whl"
"""Two package indexes. PyPI has torch's CUDA build for Linux. PyTorch's own index has a folder for each build: ``cu126``."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A row in the output of ``gpumem doctor``, with the fix below.

    ``mend`` is the fix, or ``None`` if there is nothing to fix. For example: ``Finding("limited", "store", "there is no
    gpumem-baselines: nothing can be compared", "pytest --gpumem-update=new")``.
    """

    status: Status
    subject: str
    fact: str
    mend: str | None = None


def findings(facts: Facts) -> list[Finding]:
    """Return all findings in the order of the output. Torch comes first, because a problem with torch causes later problems."""
    return [
        _python(facts),
        _torch(facts),
        _driver(facts),
        *(_device(device, facts) for device in facts.devices),
        _auto(facts),
        *_convolutions(facts),
        *_compiling(facts),
        *_clocks(facts),
        *_disturbances(facts),
        *_store(facts),
        *_ignored(facts),
        *_command(facts),
        _project(facts),
    ]


def exit_status(facts: Facts) -> int:
    """Return the exit status: 0 if measuring works here on the device in the project's settings, otherwise 1."""
    return int(_trouble_of_project(facts) is not None)


def _trouble_of_project(facts: Facts) -> str | None:
    return f"there is no {facts.device}" if facts.chosen is None else facts.chosen.trouble


def _python(facts: Facts) -> Finding:
    return Finding("ok", "Python", ", ".join(f"{name} {release}" for name, release in facts.releases.items()))


def _torch(facts: Facts) -> Finding:
    torch, emulated = facts.torch, facts.torch_emulated
    if torch.release is None and torch.trouble is not None and "No module named 'torch'" in torch.trouble:
        return Finding("no", "torch", "it is not installed", "pip install torch")
    build = "" if torch.trouble is not None else f" for CUDA {torch.cuda}" if torch.cuda else " without CUDA"
    fact = f"torch {torch.release or '(unknown release)'}{build}"
    if torch.trouble is not None:
        fact = f"{fact} cannot be imported: {torch.trouble}"
        if emulated.release is not None and emulated.trouble is None:
            return Finding(
                "limited",
                "torch",
                f"{fact}; on an emulated GPU, torch can be imported",
                f"pip install --force-reinstall torch=={_public(torch.release)} also installs NVIDIA's libraries, which torch "
                "needs on the CPU and on a real GPU",
            )
        requirement = f"torch=={_public(torch.release)}" if torch.release else "torch"
        return Finding("no", "torch", fact, f"pip install --force-reinstall {requirement}")
    if _numbers(torch.release) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        return Finding(
            "no", "torch", f"{fact} is too old: {oldest} or newer is needed", f"pip install 'torch>={oldest}'"
        )
    if torch.cuda is None:
        return Finding(
            "limited",
            "torch",
            f"{fact}: no GPU can be measured, real or emulated",
            _cuda_build(torch.release),
        )
    return Finding("ok", "torch", fact)


def _command(facts: Facts) -> Iterator[Finding]:
    other = facts.other_command
    if other is not None:
        module = "" if other.module is None else f", of the module {other.module}"
        yield Finding(
            "limited",
            "command",
            f"the first gpumem on the PATH belongs to another package: {other.path}{module}",
            f"type {LONG}, the second name of this package's command",
        )


def _numbers(release: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release or "")[:2]) or OLDEST


def _public(release: str | int | None) -> str:
    """Return a release as pip needs it, without the name of the build: ``"2.13.0"`` for ``"2.13.0+cpu"``."""
    return str(release or "").partition("+")[0]


def _cuda_build(release: str | None) -> str:
    """Return a sentence with the command to install the CUDA build of the same torch release."""
    requirement = f"torch=={_public(release)}" if release else "torch"
    return f"pip install --force-reinstall {requirement} --index-url {_PYPI} installs the CUDA build"


def _install(release: str) -> str:
    """Return the command to install a torch release in the same build, for example ``"2.12.0+cpu"`` for CPUs."""
    build = release.partition("+")[2]
    if re.fullmatch(r"cpu|cu[0-9]+|rocm[0-9.]+|xpu", build):
        return f"pip install torch=={release} --index-url {_BUILDS}/{build}"
    return f"pip install torch=={_public(release)}"


def _has_driver(facts: Facts) -> bool:
    return not facts.driver.startswith("unknown")


def _driver(facts: Facts) -> Finding:
    if _has_driver(facts):
        return Finding("ok", "driver", f"NVML reports release {facts.driver}")
    error = facts.driver.removeprefix("unknown").strip(" ()")
    fact = f"NVML reports no driver ({error})" if error else "there is no NVML"
    return Finding("no", "driver", fact, f"install NVIDIA's driver to measure a real GPU, or {_EMULATE}")


def _device(device: DeviceFacts, facts: Facts) -> Finding:
    subject = device.word
    if device.trouble is None:
        assert device.environment is not None, "an opened device has an environment"
        memory = device.environment.details.get("total_memory")
        size = f", {format_bytes(memory)}" if isinstance(memory, int) else ""
        times = "bytes, counts and times" if device.tells_time else "bytes and counts, no times"
        return Finding("ok", subject, f"{device.environment.device}{size}: {times}")
    if device.word.startswith(EMULATED):
        # The message of an EmulationError contains the fix behind a colon: "no C compiler was found, which ...: install one".
        fact, _, mend = device.trouble.partition(": ")
        return Finding("no", subject, fact, mend or None)
    if device.word == "cuda":
        return Finding("no", subject, device.trouble, _mend_of_cuda(facts))
    return Finding("no", subject, device.trouble, "see the row of torch" if facts.torch.trouble else None)


def _mend_of_cuda(facts: Facts) -> str:
    if facts.torch.trouble is not None:
        return "see the row of torch"
    if facts.torch.cuda is None and _has_driver(facts):
        return _cuda_build(facts.torch.release)
    if _has_driver(facts):
        return (
            f"check whether nvidia-smi lists a GPU, CUDA_VISIBLE_DEVICES hides the GPU, or driver {facts.driver} is too old "
            f"for CUDA {facts.torch.cuda}"
        )
    return _EMULATE


def _auto(facts: Facts) -> Finding:
    cuda, cpu = facts.device_facts("cuda"), facts.device_facts("cpu")
    if cuda is not None and cuda.trouble is None:
        return Finding("ok", "auto", "uses cuda")
    if cpu is not None and cpu.trouble is None:
        return Finding("ok", "auto", "uses the CPU, because cuda cannot be used")
    return Finding("no", "auto", "neither cuda nor the CPU can be used", "see the rows of cuda and cpu")


def _ignored(facts: Facts) -> Iterator[Finding]:
    if facts.unread is not None:
        fact, _, mend = facts.unread.partition("; ")
        yield Finding("limited", "settings", fact, mend)
    if facts.ignored is not None:
        yield Finding(
            "limited",
            "settings",
            f"{facts.ignored} has [tool.gpumem], which is not read, because pytest's root directory is above this file",
            "move the table into the pyproject.toml in the root directory, or add [tool.pytest.ini_options] to this file",
        )


def _project(facts: Facts) -> Finding:
    fact = f"device = {facts.device!r} " + ("by default" if facts.is_default_device else "in its settings")
    trouble = _trouble_of_project(facts)
    if trouble is None:
        environment = facts.chosen.environment if facts.chosen is not None else None
        assert environment is not None, "a device without trouble was opened"
        return Finding("ok", "project", f"{fact} measures on {environment.device}")
    usable = [device.word for device in facts.devices if device.trouble is None]
    alternatives = f"; here --gpumem-device={' or --gpumem-device='.join(usable)} can" if usable else ""
    return Finding("no", "project", f"{fact} cannot be measured here", f"see the row of {facts.device}{alternatives}")


def _convolutions(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        if device.trouble is not None or not device.word.startswith(EMULATED) or device.environment is None:
            continue
        if device.lacking is None:
            release = device.environment.details.get("emulated_cudnn")
            yield Finding("ok", "convolutions", f"cuDNN {release} plans convolutions on the emulated GPU")
            continue
        wheel = re.search(r"\(pip install (.+?)\)", device.lacking)
        fact = device.lacking.replace(wheel[0], "").rstrip() if wheel else device.lacking
        # The fix names only cuDNN. cuDNN cannot be used without cuBLASLt, but pip installs cuBLASLt along with cuDNN.
        yield Finding("limited", "convolutions", fact, f"pip install {wheel[1]}" if wheel else None)


def _compiling(facts: Facts) -> Iterator[Finding]:
    if any(device.trouble is None and device.word.startswith(EMULATED) for device in facts.devices):
        if facts.compiling is None:
            yield Finding("ok", "torch.compile", "the emulated GPU has Triton, a C compiler and Python's headers")
        else:
            fact, _, mend = facts.compiling.partition(": ")
            yield Finding("limited", "torch.compile", fact, mend)


def _clocks(facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each device, which says whether its step times can be compared in clock cycles or only in seconds."""
    for device in facts.devices:
        if device.trouble is not None or not device.tells_time or device.conditions is None:
            continue
        subject, conditions = f"clock of {device.word}", device.conditions[1]
        if device.word == "cpu":
            if device.pace is None:
                yield Finding(
                    "limited", subject, "the reference workload cannot be timed, so times are compared in seconds only"
                )
            elif device.load_source is None or conditions.cores is None:
                yield Finding(
                    "limited",
                    subject,
                    f"the reference workload runs {device.pace:,.0f} times a second; nothing reports the load on the cores, "
                    "so a slowdown by other programs counts as the step's own",
                    "on macOS and Windows, pip install psutil; on Linux, let the container read /proc/stat and "
                    "/proc/thread-self/schedstat",
                )
            else:
                wait = (
                    "not the wait for a core, whose bound is the load"
                    if conditions.waited is None
                    else "the wait for a core"
                )
                yield Finding(
                    "ok",
                    subject,
                    f"the reference workload runs {device.pace:,.0f} times a second; {device.load_source} reports the load on "
                    f"{counted(conditions.cores, 'core')} and {wait}",
                )
        elif device.pace is None or conditions.clock_events is None:
            yield Finding(
                "limited",
                subject,
                "NVML does not report the SM clock and its limits, so times are compared in seconds only",
                "update the driver, or give the container access to NVML (docker run --gpus with the capability utility)",
            )
        else:
            default = f" of {conditions.sm_clock_default / _MEGA:,.0f} MHz" if conditions.sm_clock_default else ""
            limits = f", limited by {', '.join(sorted(conditions.clock_events))}" if conditions.clock_events else ""
            yield Finding("ok", subject, f"{device.pace / _MEGA:,.0f} MHz{default}{limits}")


def _disturbances(facts: Facts) -> Iterator[Finding]:
    for device in facts.devices:
        if device.conditions is None or device.trouble is not None:
            continue
        subject, cause = f"load on {device.word}", disturbance(*device.conditions)
        if cause is None:
            yield Finding("ok", subject, "no other load during the check")
        else:
            yield Finding(
                "limited",
                subject,
                f"{cause}: if this can explain a slowdown, the verdict is `uncertain`; bytes and counts do not change",
                "end the other programs, or do not time steps (--no-gpumem-time)",
            )


def _store(facts: Facts) -> Iterator[Finding]:
    store = facts.store
    if store.trouble is not None:
        yield Finding("no", "store", store.trouble, _mend_of_store(store.location))
        return
    device = facts.chosen
    slug = device.environment.slug if device is not None and device.environment is not None else None
    if not store.stored:
        absence = f"{store.location} has no baselines" if store.is_there else f"there is no {store.location}"
        yield Finding(
            "limited", "store", f"{absence}: nothing can be compared", store.restore or "pytest --gpumem-update=new"
        )
        return
    slugs = sorted({stored.environment.slug for stored in store.stored})
    number = sum(stored.baselines for stored in store.stored)
    fact = (
        f"{store.location} has {counted(number, 'baseline')} from {counted(len(slugs), 'device')}: {', '.join(slugs)}"
    )
    if slug is not None and slug not in slugs:
        yield Finding(
            "limited",
            "store",
            f"{fact}; but no baseline from {slug}, which is measured here",
            "pytest --gpumem-update=new",
        )
    else:
        yield Finding("ok", "store", fact)
    present = {device.environment.slug: device for device in facts.devices if device.environment is not None}
    for name in slugs:
        of_device = [stored for stored in store.stored if stored.environment.slug == name]
        if name in present:
            yield from _comparison(f"baselines of {name}", of_device, present[name])
        else:
            yield _absent(f"baselines of {name}", name, sum(stored.baselines for stored in of_device))


def _mend_of_store(location: str) -> str:
    if is_url(location):
        return (
            f"fix the error until `{command_name()} show --store {location}` works, or name another store with --store"
        )
    return "correct or remove the file or folder that the error names; git has earlier versions of it"


def _absent(subject: str, slug: str, number: int) -> Finding:
    fact = f"{counted(number, 'baseline')}; this machine does not have that device"
    if slug.startswith(EMULATED_SLUG):
        mend = "see the row of the emulated GPU; --gpumem-device=emulated:NAME emulates another GPU"
        return Finding("no", subject, fact, mend)
    return Finding("no", subject, fact, "run pytest --gpumem-baseline on a machine with that device")


def _comparison(subject: str, stored: Iterable[StoredFacts], device: DeviceFacts) -> Iterator[Finding]:
    """Compare the environments in which a device's baselines were recorded with the current environment.

    Yields a finding for each group of baselines whose environments differ from the current environment in the same details.
    For example, three baselines with the metric ``operators`` were recorded with torch 2.13.0, and torch 2.15.0 is installed.
    The three are ``limited``: "3 baselines: torch was 2.13.0, now 2.15.0; a change of operators may be `uncertain`". Baselines
    with only ``peak_allocated`` are ``ok``, because a release of torch does not change how this metric is compared.
    """
    assert device.environment is not None, "the device has a slug"
    numbers: Counter[tuple[str, tuple[str, ...], str | None]] = Counter()
    for stored_facts in stored:
        all_differing = differences(stored_facts.environment, device.environment)
        moved = _moved(stored_facts, all_differing)
        if _MACHINE in all_differing and stored_facts.has_times:
            moved[_MACHINE] = all_differing[_MACHINE]
        changes = "; ".join(f"{name} was {recorded}, now {current}" for name, (recorded, current) in moved.items())
        mend = _mend_of(moved) if moved else None
        numbers[changes, tuple(_consequences(stored_facts, moved)), mend] += stored_facts.baselines
    for (changes, consequences, mend), number in sorted(numbers.items(), key=lambda item: item[0][0]):
        fact = counted(number, "baseline")
        if changes:
            yield Finding("limited", subject, f"{fact}: {changes}; {', and '.join(consequences)}", mend)
        else:
            yield Finding("ok", subject, f"{fact}; no difference in the environment can change their figures")


def differences(recorded: Environment, current: Environment) -> dict[str, tuple[str | int, str | int]]:
    """Return the differing details of two environments, each with its recorded and its current value.

    For example, ``{"torch": ("2.12.0", "2.13.0")}``. Details that are missing in one of the environments are left out.
    """
    pairs = {
        name: (value, current.details[name]) for name, value in recorded.details.items() if name in current.details
    }
    return {name: (old, new) for name, (old, new) in pairs.items() if old != new}


def _moved(
    stored: StoredFacts, differing: Mapping[str, tuple[str | int, str | int]]
) -> dict[str, tuple[str | int, str | int]]:
    """Return the details in ``differing`` that can change a metric in the baselines."""
    decisive = {detail for name in stored.metrics for detail in METRICS[name].details}
    return {name: pair for name, pair in differing.items() if name in decisive}


def _consequences(stored: StoredFacts, moved: Mapping[str, object]) -> list[str]:
    titles = [
        METRICS[name].title for name in METRICS if name in stored.metrics and moved.keys() & {*METRICS[name].details}
    ]
    consequences = [f"a change of {_listed(titles)} may be `uncertain`"] if titles else []
    return [*consequences, "times are not compared"] if _MACHINE in moved else consequences


def _listed(words: list[str]) -> str:
    *first_words, last = words
    return f"{', '.join(first_words)} or {last}" if first_words else last


def _mend_of(differing: Mapping[str, tuple[str | int, str | int]]) -> str:
    mends = []
    if "torch" in differing:
        mends.append(_install(str(differing["torch"][0])))
    if "emulated_cudnn" in differing:
        release = differing["emulated_cudnn"][0]
        mends.append("uninstall cuDNN with pip" if release == "none" else f"install cuDNN {release}")
    if "cpu_capability" in differing:
        recorded, current = differing["cpu_capability"]
        if {recorded, current} <= {*_INSTRUCTION_SETS} and (
            _INSTRUCTION_SETS.index(str(recorded)) < _INSTRUCTION_SETS.index(str(current))
        ):
            mends.append(f"set {CPU_CAPABILITY}={str(recorded).lower()}")
    if "allocator" in differing:
        mends.append(f"set {CUDA_ALLOC_CONF}={differing['allocator'][0]}")
    reason = ", ".join(f"{name} {current}" for name, (_, current) in differing.items() if name != _MACHINE)
    record_again = _RECORD_HERE.format(reason or "another machine")
    return f"{', '.join(mends)}; or {record_again}" if mends else record_again
