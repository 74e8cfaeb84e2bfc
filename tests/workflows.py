"""Runs the shell lines of workflows and of the project's actions, with commands that install nothing.

An expression such as ``${{ inputs.name }}`` is replaced as text, and conditions are not evaluated. ``make lint`` checks the
rest of a workflow with zizmor and check-jsonschema.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
ACTION = ROOT / "action.yml"
COMMENT_ACTION = ROOT / "comment" / "action.yml"
_OUTPUT = re.compile(r"^(\w+)(?:=([^\n]*)|<<(\w+)\n(.*?)\n\3)$", re.MULTILINE | re.DOTALL)
"""An output that a step writes into ``GITHUB_OUTPUT``: ``name=value``, or a value of several lines between two marks."""
PASSED = "steps.gate.outputs.passed"
"""The output of the action's gate: ``true`` or ``false``."""
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
    """A machine that runs steps in ``folder``.

    ``values`` maps the text of an expression to its value, for example ``inputs.name`` to ``gpumem``. ``log`` is what was
    printed.
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
        run = "github.event.workflow_run.id || github.run_id"
        self.values = {"runner.temp": str(self.temp), "github.token": "a-token", run: "77", **self.values}

    def calls(self) -> list[list[str]]:
        """Each call of a Python, which comes first, with its arguments."""
        return [line.split("\0") for line in (self.temp / "log").read_text().split("\0\n")[:-1]]

    def run_action(self, action: Path = ACTION, /, **inputs: str) -> bool:
        """Return whether an action of the project succeeded. ``Bisect`` runs if the input asks for it and the gate is red."""
        plain = read_yaml(action.read_text(encoding="utf-8"))
        given = {name: about["default"] for name, about in plain["inputs"].items()}
        given |= {name.replace("_", "-"): value for name, value in inputs.items()}
        assert given.keys() == plain["inputs"].keys()
        self.values |= {f"inputs.{name}": self.filled(value) for name, value in given.items()}
        self.environment["GITHUB_ACTION_PATH"] = str(action.parent)
        searches = self.values.get("inputs.bisect") == "true"
        for step in plain["runs"]["steps"]:
            left_out = step.get("id") == "bisect" and not (searches and self.values[PASSED] == "false")
            if not left_out and not self.run([step]):
                return False
        return True

    def run(self, steps: list[Any]) -> bool:
        """Return whether the steps succeeded. The first failure ends the run, and other projects' actions are left out."""
        for step in steps:
            if "/pytest-gpumem@" in step.get("uses", ""):
                passed = self.run_action(**step.get("with", {}))
            else:
                passed = "run" not in step or self._run(step)
            if not passed:
                return False
        return True

    def _run(self, step: Any) -> bool:
        output = self.temp / "output"
        output.write_text("")
        environment = {name: self.filled(value) for name, value in step.get("env", {}).items()}
        done = subprocess.run(
            # What GitHub's runner starts for `shell: bash`; without it, the same but for pipefail.
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", str(step["run"])],
            cwd=self.folder / self.filled(step.get("working-directory", ".")),
            env=self.environment | {"GITHUB_OUTPUT": str(output)} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            text=True,
            check=False,
        )
        self.log += done.stdout
        for name, line, _, lines in _OUTPUT.findall(output.read_text(encoding="utf-8")):
            self.values[f"steps.{step['id']}.outputs.{name}"] = line or lines
        return done.returncode == 0

    def filled(self, text: object) -> str:
        """Return ``text`` with the values of its expressions; an expression without a value becomes nothing."""
        plain = str(text).lower() if isinstance(text, bool) else str(text)
        return re.sub(r"\$\{\{ (.*?) \}\}", lambda found: self.values.get(found[1], ""), plain)
