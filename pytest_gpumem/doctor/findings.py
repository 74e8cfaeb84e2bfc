"""Findings of facts: what can be measured, what only in part, what not, and what mends it. Pure."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from pytest_gpumem.baselines.location import is_url
from pytest_gpumem.command_name import LONG, command_name
from pytest_gpumem.emulation.torch_build import OLDEST
from pytest_gpumem.metrics import METRICS
from pytest_gpumem.timing.validity import disturbance
from pytest_gpumem.units import counted, format_bytes
from pytest_gpumem.values.option_words import EMULATED, EMULATED_SLUG
from pytest_gpumem.variables import CPU_CAPABILITY, CUDA_ALLOC_CONF

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from pytest_gpumem.doctor.facts import DeviceFacts, Facts, StoredFacts
    from pytest_gpumem.measurement import Environment

Status = Literal["ok", "limited", "no"]
STATUSES: tuple[Status, ...] = get_args(Status)
_MACHINE = "machine"
_EMULATE = "measure on an emulated GPU (--gpumem-device=emulated:h100) or on the CPU (--gpumem-device=cpu)"
_RECORD_HERE = '`pytest --gpumem-update=all --gpumem-reason="{}"` records them anew'
_INSTRUCTION_SETS = ("DEFAULT", "AVX2", "AVX512")
"""Those of torch on x86-64, each of which has the ones before it."""
_MEGA = 1e6
_PYPI, _BUILDS = "https://pypi.org/simple", "https://download.pytorch.org/whl"
"""The index that has the CUDA build on Linux, and the one that has each build in a folder of its name."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A row: of what, how it stands with it, the fact, and what mends it."""

    status: Status
    subject: str
    fact: str
    mend: str | None = None


def findings(facts: Facts) -> list[Finding]:
    """Return all findings, those that others follow from first."""
    return [
        _python(facts),
        _torch(facts),
        _driver(facts),
        *(_device(one, facts) for one in facts.devices),
        _auto(facts),
        *_convolutions(facts),
        *_compiling(facts),
        *_clocks(facts),
        *_disturbances(facts),
        *_reports(facts),
        *_store(facts),
        *_ignored(facts),
        *_command(facts),
        _project(facts),
    ]


def exit_status(facts: Facts) -> int:
    """Return 0 if the device of the project's settings can be measured here, else 1."""
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
    fact = f"torch {torch.release or 'of an unknown release'}{build}"
    if torch.trouble is not None:
        fact = f"{fact} cannot be imported: {torch.trouble}"
        if emulated.release is not None and emulated.trouble is None:
            return Finding(
                "limited",
                "torch",
                f"{fact}; on an emulated GPU it can",
                f"pip install --force-reinstall torch=={_public(torch.release)} brings NVIDIA's libraries, which the CPU and a "
                "real GPU need",
            )
        wanted = f"torch=={_public(torch.release)}" if torch.release else "torch"
        return Finding("no", "torch", fact, f"pip install --force-reinstall {wanted}")
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
        belongs = "" if other.module is None else f", of the module {other.module}"
        yield Finding(
            "limited",
            "command",
            f"the first gpumem on the path belongs to another package: {other.path}{belongs}",
            f"type {LONG}, which is this package's command, too",
        )


def _numbers(release: str | None) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release or "")[:2]) or OLDEST


def _public(release: str | int | None) -> str:
    """Return a release without the build, as pip has it: ``"2.13.0"`` of ``"2.13.0+cpu"``."""
    return str(release or "").partition("+")[0]


def _cuda_build(release: str | None) -> str:
    """Return the command that replaces a build of torch by the one for CUDA of the same release."""
    wanted = f"torch=={_public(release)}" if release else "torch"
    return f"pip install --force-reinstall {wanted} --index-url {_PYPI} brings the CUDA build"


def _install(release: str) -> str:
    """Return the command that installs a release of torch in its build, as ``"2.12.0+cpu"`` names it."""
    build = release.partition("+")[2]
    if re.fullmatch(r"cpu|cu[0-9]+|rocm[0-9.]+|xpu", build):
        return f"pip install torch=={release} --index-url {_BUILDS}/{build}"
    return f"pip install torch=={_public(release)}"


def _has_driver(facts: Facts) -> bool:
    return not facts.driver.startswith("unknown")


def _driver(facts: Facts) -> Finding:
    if _has_driver(facts):
        return Finding("ok", "driver", f"NVML has release {facts.driver}")
    says = facts.driver.removeprefix("unknown").strip(" ()")
    fact = f"NVML has none ({says})" if says else "there is no NVML"
    return Finding("no", "driver", fact, f"no real GPU is measured without one: install NVIDIA's driver, or {_EMULATE}")


def _device(device: DeviceFacts, facts: Facts) -> Finding:
    subject = device.word
    if device.trouble is None:
        assert device.environment is not None, "a device that was opened has one"
        memory = device.environment.details.get("total_memory")
        size = f", {format_bytes(memory)}" if isinstance(memory, int) else ""
        times = "bytes, counts and times" if device.tells_time else "bytes and counts, no times"
        return Finding("ok", subject, f"{device.environment.device}{size}: {times}")
    if device.word.startswith(EMULATED):
        # "no C compiler was found, which ...: install one": an EmulationError has the mend behind a colon.
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
            f"see whether nvidia-smi lists a GPU, CUDA_VISIBLE_DEVICES hides it, or driver {facts.driver} is too old for CUDA "
            f"{facts.torch.cuda}"
        )
    return _EMULATE


def _auto(facts: Facts) -> Finding:
    cuda, cpu = facts.of("cuda"), facts.of("cpu")
    if cuda is not None and cuda.trouble is None:
        return Finding("ok", "auto", "takes cuda")
    if cpu is not None and cpu.trouble is None:
        return Finding("ok", "auto", "takes the CPU, as cuda cannot be used")
    return Finding("no", "auto", "neither cuda nor the CPU can be used", "see the rows of both")


def _ignored(facts: Facts) -> Iterator[Finding]:
    if facts.unread is not None:
        fact, _, mend = facts.unread.partition("; ")
        yield Finding("limited", "settings", fact, mend)
    if facts.ignored is not None:
        yield Finding(
            "limited",
            "settings",
            f"{facts.ignored} has [tool.gpumem], which is not read: pytest's root directory is above it",
            "move the table into the pyproject.toml of the root directory, or give this one [tool.pytest.ini_options]",
        )


def _project(facts: Facts) -> Finding:
    fact = f"device = {facts.device!r} " + ("by default" if facts.is_default_device else "in its settings")
    trouble = _trouble_of_project(facts)
    if trouble is None:
        environment = facts.chosen.environment if facts.chosen is not None else None
        assert environment is not None, "without trouble it has been opened"
        return Finding("ok", "project", f"{fact} measures on {environment.device}")
    able = [one.word for one in facts.devices if one.trouble is None]
    others = f"; here --gpumem-device={' or --gpumem-device='.join(able)} can" if able else ""
    return Finding("no", "project", f"{fact} cannot be measured here", f"see the row of {facts.device}{others}")


def _convolutions(facts: Facts) -> Iterator[Finding]:
    for one in facts.devices:
        if one.trouble is not None or not one.word.startswith(EMULATED) or one.environment is None:
            continue
        if one.lacking is None:
            release = one.environment.details.get("emulated_cudnn")
            yield Finding("ok", "convolutions", f"cuDNN {release} plans them on the emulated GPU")
            continue
        wheel = re.search(r"\(pip install (.+?)\)", one.lacking)
        fact = one.lacking.replace(wheel[0], "").rstrip() if wheel else one.lacking
        # cuDNN needs cuBLASLt, of which pip knows: without it the package is not used.
        yield Finding("limited", "convolutions", fact, f"pip install {wheel[1]}" if wheel else None)


def _compiling(facts: Facts) -> Iterator[Finding]:
    if any(one.trouble is None and one.word.startswith(EMULATED) for one in facts.devices):
        if facts.compiling is None:
            yield Finding(
                "ok", "torch.compile", "Triton, a C compiler and Python's headers are there for the emulated GPU"
            )
        else:
            fact, _, mend = facts.compiling.partition(": ")
            yield Finding("limited", "torch.compile", fact, mend)


def _clocks(facts: Facts) -> Iterator[Finding]:
    """Yield whether a step's time can be told in cycles of the device's clock."""
    for one in facts.devices:
        if one.trouble is not None or not one.tells_time or one.conditions is None:
            continue
        subject, after = f"clock of {one.word}", one.conditions[1]
        if one.word == "cpu":
            if one.pace is None:
                yield Finding(
                    "limited", subject, "no work of a fixed size can be timed: times are judged in seconds only"
                )
            elif after.waited is None or after.cores is None:
                lacks = "the waiting for a core" if after.waited is None else "how busy the cores are"
                yield Finding(
                    "limited",
                    subject,
                    f"the reference workload runs {one.pace:,.0f} times a second; {lacks} is not told here, so what slows a "
                    "step by it counts as the step's own",
                    "Linux tells it in /proc: let the container read /proc/stat and /proc/thread-self/schedstat",
                )
            else:
                counts = f"waiting and {counted(after.cores, 'core')} are counted"
                yield Finding("ok", subject, f"the reference workload runs {one.pace:,.0f} times a second; {counts}")
        elif one.pace is None or after.clock_events is None:
            yield Finding(
                "limited",
                subject,
                "NVML does not tell the SM clock or what lowers it: times are judged in seconds only",
                "update the driver, or run where NVML is allowed (in a container: --gpus with the capability utility)",
            )
        else:
            default = f" of {after.sm_clock_default / _MEGA:,.0f} MHz" if after.sm_clock_default else ""
            lowered = f", limited by {', '.join(sorted(after.clock_events))}" if after.clock_events else ""
            yield Finding("ok", subject, f"{one.pace / _MEGA:,.0f} MHz{default}{lowered}")


def _disturbances(facts: Facts) -> Iterator[Finding]:
    for one in facts.devices:
        if one.conditions is None or one.trouble is not None:
            continue
        disturbed = disturbance(*one.conditions)
        if disturbed is None:
            yield Finding("ok", f"load on {one.word}", "nothing else was at work while it was looked at")
        else:
            yield Finding(
                "limited",
                f"load on {one.word}",
                f"{disturbed}: a slowdown that this explains is `uncertain`; bytes and counts do not change",
                "end what else runs, or take no times (--no-gpumem-time)",
            )


def _reports(facts: Facts) -> Iterator[Finding]:
    for sentence in facts.reports:
        fact, _, mend = sentence.partition(": ")
        yield Finding("limited", "reports", fact, mend)
    if not facts.reports:
        yield Finding("ok", "reports", "every format can be written")


def _store(facts: Facts) -> Iterator[Finding]:
    store = facts.store
    if store.trouble is not None:
        yield Finding("no", "store", store.trouble, _mend_of_store(store.location))
        return
    here = facts.chosen
    slug = here.environment.slug if here is not None and here.environment is not None else None
    if not store.stored:
        lacks = f"{store.location} has no baselines" if store.is_there else f"there is no {store.location}"
        yield Finding(
            "limited", "store", f"{lacks}: nothing can be compared", store.restore or "pytest --gpumem-update=new"
        )
        return
    slugs = sorted({one.environment.slug for one in store.stored})
    number = sum(one.baselines for one in store.stored)
    fact = f"{store.location} has {counted(number, 'baseline')} of {counted(len(slugs), 'device')}: {', '.join(slugs)}"
    if slug is not None and slug not in slugs:
        yield Finding(
            "limited", "store", f"{fact}; none is of {slug}, which is measured here", "pytest --gpumem-update=new"
        )
    else:
        yield Finding("ok", "store", fact)
    present = {one.environment.slug: one for one in facts.devices if one.environment is not None}
    for name in slugs:
        of_device = [one for one in store.stored if one.environment.slug == name]
        if name in present:
            yield from _compared(f"baselines of {name}", of_device, present[name])
        else:
            yield _absent(f"baselines of {name}", name, sum(one.baselines for one in of_device))


def _mend_of_store(location: str) -> str:
    if is_url(location):
        return (
            f"mend what it names, until `{command_name()} show --store {location}` works; --store names another store"
        )
    return "fix or remove what it names; its history is in git"


def _absent(subject: str, slug: str, number: int) -> Finding:
    fact = f"{counted(number, 'baseline')}; this machine does not have that device"
    if slug.startswith(EMULATED_SLUG):
        return Finding(
            "no", subject, fact, "see the row of the emulated GPU; another one is emulated by its name: --gpumem-device"
        )
    return Finding("no", subject, fact, "gate them where that device is")


def _compared(subject: str, stored: Iterable[StoredFacts], device: DeviceFacts) -> Iterator[Finding]:
    """Yield a finding for each way in which baselines of a device that is here were recorded otherwise."""
    assert device.environment is not None, "its slug is here"
    numbers: Counter[tuple[str, tuple[str, ...], str | None]] = Counter()
    for one in stored:
        all_differing = differences(one.environment, device.environment)
        moved = _moved(one, all_differing)
        if _MACHINE in all_differing and one.has_times:
            moved[_MACHINE] = all_differing[_MACHINE]
        said = "; ".join(f"{name} was {then}, now {now}" for name, (then, now) in moved.items())
        numbers[said, tuple(_consequences(one, moved)), _mend_of(moved) if moved else None] += one.baselines
    for (said, follows, mend), number in sorted(numbers.items(), key=lambda item: item[0][0]):
        fact = counted(number, "baseline")
        if said:
            yield Finding("limited", subject, f"{fact}: {said}; {', and '.join(follows)}", mend)
        else:
            yield Finding("ok", subject, f"{fact}; nothing in the environment differs that moves what they hold")


def differences(there: Environment, here: Environment) -> dict[str, tuple[str | int, str | int]]:
    """Return the details that both environments know and that differ: what each was ``there``, and is ``here``."""
    pairs = {name: (then, here.details[name]) for name, then in there.details.items() if name in here.details}
    return {name: (then, now) for name, (then, now) in pairs.items() if then != now}


def _moved(
    stored: StoredFacts, differing: Mapping[str, tuple[str | int, str | int]]
) -> dict[str, tuple[str | int, str | int]]:
    """Return the details among ``differing`` that move a metric of the baselines."""
    decisive = {detail for name in stored.metrics for detail in METRICS[name].details}
    return {name: pair for name, pair in differing.items() if name in decisive}


def _consequences(stored: StoredFacts, moved: Mapping[str, object]) -> list[str]:
    titles = [
        METRICS[name].title for name in METRICS if name in stored.metrics and moved.keys() & {*METRICS[name].details}
    ]
    found = [f"a change of {_listed(titles)} may be `uncertain`"] if titles else []
    return [*found, "times are not compared"] if _MACHINE in moved else found


def _listed(words: list[str]) -> str:
    *others, last = words
    return f"{', '.join(others)} or {last}" if others else last


def _mend_of(differing: Mapping[str, tuple[str | int, str | int]]) -> str:
    mends = []
    if "torch" in differing:
        mends.append(_install(str(differing["torch"][0])))
    if "emulated_cudnn" in differing:
        then = differing["emulated_cudnn"][0]
        mends.append("pip uninstall the cuDNN that is here" if then == "none" else f"install cuDNN {then}")
    if "cpu_capability" in differing:
        then, now = differing["cpu_capability"]
        if {then, now} <= {*_INSTRUCTION_SETS} and _INSTRUCTION_SETS.index(str(then)) < _INSTRUCTION_SETS.index(
            str(now)
        ):
            mends.append(f"set {CPU_CAPABILITY}={str(then).lower()}")
    if "allocator" in differing:
        mends.append(f"set {CUDA_ALLOC_CONF}={differing['allocator'][0]}")
    said = ", ".join(f"{name} {now}" for name, (_, now) in differing.items() if name != _MACHINE)
    again = _RECORD_HERE.format(said or "another machine")
    return f"{', '.join(mends)}; or {again}" if mends else again
