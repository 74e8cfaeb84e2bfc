"""Runs the scripts of a workflow's steps, and of the project's action, with commands that install nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
ACTION = ROOT / "action.yml"
COMMENT_ACTION = ROOT / "comment" / "action.yml"
_OURS = re.compile(r"(?:\./|[^/]+/pytest-gpumem/?)(comment)?")
"""The project's actions, in its own workflows and in those of others."""
_SECONDS = 120
"""Longer than a step needs; one that hangs must not hang the suite."""

# `venv` copies this Python, `pip` installs nothing, and what is there is said: the plugin, and a virtual environment.
_PYTHON = """\
#!/bin/bash
printf '%s\\0' "$0" "$@" >>"$LOG"; echo >>"$LOG"
case " $* " in
  *" -m venv "*) mkdir -p "${@: -1}/bin"; cp "$0" "${@: -1}/bin/python" ;;
  *" --dry-run "*) printf '%s' "$TO_INSTALL" >"$RUNNER_TEMP/gpumem-install.json" ;;
  *" -m pip "*) if [[ $* == *" $GITHUB_ACTION_PATH" ]]; then touch "$PLUGIN"; fi ;;
  *distributions*) [[ -e $PLUGIN ]] ;;
  *base_prefix*) [[ $VENV == no ]] ;;
  *) exec "$REAL" "$@" ;;
esac
"""
_MODULES = {"pip": "pip", "pytest": "pytest", **dict.fromkeys(("gpumem", "pytest-gpumem"), "pytest_gpumem.tools.main")}


def read_yaml(text: str) -> Any:
    """As YAML 1.2, in which ``on`` is a word."""
    return YAML(typ="safe", pure=True).load(text)


@dataclass
class Runner:
    """A machine that runs steps in ``folder``, for a pull request unless ``values`` say otherwise.

    ``values`` are those of expressions, by name; ``log`` is what was printed.
    """

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    log: str = ""

    def __post_init__(self) -> None:
        self.temp = self.folder.parent / "temp"
        commands = self.folder.parent / "bin"
        for folder in (self.folder, self.temp, commands):
            folder.mkdir(parents=True, exist_ok=True)
        scripts = dict.fromkeys(("python", "python3"), _PYTHON)
        scripts |= {name: f'#!/bin/bash\nexec python -m {module} "$@"\n' for name, module in _MODULES.items()}
        for name, script in scripts.items():
            (commands / name).write_text(script, encoding="utf-8")
            (commands / name).chmod(0o755)
        self.python = str(commands / "python3")
        self.plugin = self.temp / "plugin"
        self.plugin.touch()
        ours = ("PYTEST", "PYTHON", "GITHUB_", "GIT_")
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "PATH": f"{commands}:{os.environ['PATH']}",
            "LOG": str(self.temp / "log"),
            "PLUGIN": str(self.plugin),
            "REAL": sys.executable,
            "VENV": "no",
            "TO_INSTALL": '{"install": []}',
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_STEP_SUMMARY": str(self.temp / "summary.md"),
            **self.environment,
        }
        known = {"runner.temp": str(self.temp), "github.token": "a-token", "github.event.pull_request.number": "7"}
        self.values = {**known, **self.values}

    def calls(self) -> list[list[str]]:
        """Each call of a Python, which comes first, with its arguments."""
        return [line.split("\0") for line in (self.temp / "log").read_text().split("\0\n")[:-1]]

    def run_action(self, action: Path = ACTION, /, **inputs: str) -> bool:
        """Tell whether an action of the project succeeded. The values of its steps' outputs are in ``values`` then."""
        plain = read_yaml(action.read_text(encoding="utf-8"))
        given = {name: about["default"] for name, about in plain["inputs"].items()}
        given |= {name.replace("_", "-"): value for name, value in inputs.items()}
        assert given.keys() == plain["inputs"].keys()
        self.values |= {f"inputs.{name}": self.filled(value) for name, value in given.items()}
        self.environment["GITHUB_ACTION_PATH"] = str(action.parent)
        return self.run(plain["runs"]["steps"])

    def run(self, steps: list[Any]) -> bool:
        """Tell whether all steps succeeded; after one that did not, none runs.

        Of others' actions those that keep artifacts do so in a folder, and the rest is left out.
        """
        for step in steps:
            if not self.holds(step.get("if", "")):
                continue
            uses = step.get("uses", "").partition("@")[0]
            ours = _OURS.fullmatch(uses)
            if ours is not None:
                passed = self.run_action(COMMENT_ACTION if ours[1] else ACTION, **step.get("with", {}))
            elif uses.endswith("-artifact"):
                passed = self._artifact(uses, {name: self.filled(value) for name, value in step["with"].items()})
            else:
                passed = "run" not in step or self._run(step)
            if "id" in step:
                self.values[f"steps.{step['id']}.outcome"] = "success" if passed else "failure"
            if not passed and step.get("continue-on-error") is not True:
                return False
        return True

    def _artifact(self, uses: str, inputs: dict[str, str]) -> bool:
        """Upload or download an artifact, as far as the project's workflows ask for it."""
        kept = self.temp / "artifacts" / inputs["name"]
        if uses == "actions/download-artifact":
            if kept.is_dir():
                shutil.copytree(kept, self.folder / inputs["path"], dirs_exist_ok=True)
            return kept.is_dir()
        paths = [self.folder / line for line in inputs["path"].split("\n") if line.strip()]
        files = [file for path in paths for file in sorted(path.parent.glob(path.name))]
        if kept.exists() and inputs.get("overwrite") != "true":
            return False
        shutil.rmtree(kept, ignore_errors=True)
        for file in files:
            kept.mkdir(parents=True, exist_ok=True)
            if file.is_dir():
                shutil.copytree(file, kept, dirs_exist_ok=True)
            else:
                shutil.copy(file, kept)
        return bool(files) or inputs.get("if-no-files-found") != "error"

    def _run(self, step: Any) -> bool:
        told = self.temp / "output"
        told.write_text("")
        environment = {name: self.filled(value) for name, value in step.get("env", {}).items()}
        done = subprocess.run(
            # What GitHub's runner starts for `shell: bash`; without it, the same but for pipefail.
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", str(step["run"])],
            cwd=self.folder / self.filled(step.get("working-directory", ".")),
            env=self.environment | {"GITHUB_OUTPUT": str(told)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            text=True,
            check=False,
        )
        self.log += done.stdout
        for name, value in _outputs(told.read_text(encoding="utf-8")).items():
            self.values[f"steps.{step['id']}.outputs.{name}"] = value
        return done.returncode == 0

    def filled(self, text: object) -> str:
        """Return ``text`` with the values of its expressions: the first name of each that has one."""
        plain = str(text).lower() if isinstance(text, bool) else str(text)

        def value(found: re.Match[str]) -> str:
            values = (self.values.get(name.strip(), "") for name in found[1].split("||"))
            return next(filter(None, values), "")

        return re.sub(r"\$\{\{ *([\w.-]+(?: \|\| [\w.-]+)*) *\}\}", value, plain)

    def holds(self, condition: str) -> bool:
        """Tell whether a condition holds, all of whose clauses have to: a name, ``!name``, or a name and what it is or is not."""
        clauses = condition.removeprefix("${{").removesuffix("}}").split("&&")
        return not condition or all(self._holds(clause.strip()) for clause in clauses)

    def _holds(self, clause: str) -> bool:
        if clause in ("!cancelled()", "always()"):
            return True
        found = re.fullmatch(r"(!?)([\w.-]+)(?: (==|!=) '([^']*)')?", clause)
        assert found, f"no clause that is known here: {clause}"
        negated, name, sign, wanted = found.groups()
        value = self.values.get(name, "")
        return (value == wanted) == (sign == "==") if sign else (not value) == bool(negated)


def _outputs(text: str) -> dict[str, str]:
    """Return what a step wrote into its ``GITHUB_OUTPUT``."""
    found = {}
    while text:
        line, _, text = text.partition("\n")
        name, mark, value = re.split("(=|<<)", line, maxsplit=1)
        if mark == "<<":
            value, _, text = text.partition(f"\n{value}\n")
        found[name] = value
    return found
