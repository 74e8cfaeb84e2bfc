"""Runs the shell parts of a GitHub workflow and of a composite action, as GitHub's runner would; other actions are noted."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

ROOT = Path(__file__).parents[1]
ACTION = ROOT / ".github" / "actions" / "gpumem" / "action.yml"
_TOKEN = re.compile(r"\s+|'(?:[^']|'')*'|&&|\|\||[!=]=|[!()]|[\w.-]+")
_WORDS = {"&&": "and", "||": "or", "!": "not", "true": "True", "false": "False"}
_SECONDS = 120
"""Longer than a step needs; one that hangs must not hang the suite."""


def read_yaml(text: str) -> Any:
    """As YAML 1.2, in which ``on`` is a word."""
    return YAML(typ="safe", pure=True).load(text)


@dataclass
class Runner:
    """A machine that runs jobs in ``folder``. ``action`` is called whatever its repository and revision are.

    ``github`` is the context of that name. ``uses`` are the actions of others that were to be run, with their inputs.
    """

    folder: Path
    temp: Path
    environment: dict[str, str]
    github: dict[str, Any] = field(default_factory=dict)
    uses: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    log: str = ""

    def run_job(self, job: Any, inputs: dict[str, str] | None = None) -> bool:
        """Whether it succeeded, with the inputs of the workflow. Its own ``if`` is not looked at."""
        return _Steps(self, inputs or {}).run(job["steps"])

    def run_action(self, inputs: dict[str, str]) -> tuple[bool, dict[str, str]]:
        """Whether the project's composite action succeeded, and its outputs."""
        plain = read_yaml(ACTION.read_text(encoding="utf-8"))
        unknown = inputs.keys() - plain["inputs"].keys()
        assert not unknown, f"no such input: {unknown}"
        start = _Steps(self, {})
        given = {name: start.filled(about["default"]) for name, about in plain["inputs"].items()} | inputs
        steps = _Steps(self, given)
        passed = steps.run(plain["runs"]["steps"])
        return passed, {name: steps.filled(about["value"]) for name, about in plain["outputs"].items()}


class _Steps:
    """The steps of one job or action while they are run."""

    def __init__(self, runner: Runner, inputs: dict[str, str]) -> None:
        self._runner = runner
        self._passed = True
        self._contexts: dict[str, Any] = {
            "inputs": inputs,
            "steps": {},
            "github": {"token": "a-token", **runner.github},
            "runner": {"temp": str(runner.temp)},
        }

    def run(self, steps: list[Any]) -> bool:
        for step in steps:
            wanted = str(step.get("if", "success()")).strip()
            wanted = wanted.removeprefix("${{").removesuffix("}}")
            if "(" not in wanted:
                wanted = f"success() && ({wanted})"
            if not self.value_of(wanted):
                continue
            outputs, passed = self._one(step)
            outcome = "success" if passed else "failure"
            self._contexts["steps"][step.get("id")] = {"outputs": outputs, "outcome": outcome}
            self._passed = self._passed and (passed or step.get("continue-on-error") is True)
        return self._passed

    def _one(self, step: Any) -> tuple[dict[str, str], bool]:
        if "uses" in step:
            given = {name: self.filled(value) for name, value in step.get("with", {}).items()}
            if step["uses"].partition("@")[0].endswith("/.github/actions/gpumem"):
                passed, outputs = self._runner.run_action(given)
                return outputs, passed
            self._runner.uses.append((step["uses"], given))
            return {"artifact-url": "https://github.com/a/b/actions/runs/1/artifacts/2"}, True
        told = self._runner.temp / f"output-{len(self._contexts['steps'])}-{os.urandom(4).hex()}"
        told.touch()
        done = subprocess.run(
            # What the runner starts for `shell: bash`; without it, the same but for pipefail.
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", str(step["run"])],
            cwd=self._runner.folder / self.filled(step.get("working-directory", ".")),
            env={
                **self._runner.environment,
                "GITHUB_OUTPUT": str(told),
                "GITHUB_ACTION_PATH": str(ACTION.parent),
                "RUNNER_TEMP": str(self._runner.temp),
                **{name: self.filled(value) for name, value in step.get("env", {}).items()},
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=_SECONDS,
            text=True,
            check=False,
        )
        self._runner.log += done.stdout
        return _outputs(told.read_text(encoding="utf-8")), done.returncode == 0

    def filled(self, text: object) -> str:
        """``text`` with the values of its expressions."""
        return re.sub(r"\$\{\{(.*?)\}\}", lambda found: _written(self.value_of(found[1])), _written(text))

    def value_of(self, expression: str) -> Any:
        """What an expression is, of those that the project writes: names, texts, comparisons, and whether to go on."""
        words = _TOKEN.findall(expression)
        assert "".join(words) == expression, f"not understood: {expression}"
        return eval("".join(map(self._python, words)).strip())

    def _python(self, word: str) -> str:
        value: Any
        if word in _WORDS:
            return f" {_WORDS[word]} "
        if word in ("success", "cancelled", "always"):
            value = {"success": self._passed, "cancelled": False, "always": True}[word]
            return f"(lambda: {value})"
        if word[0] == "'":
            return repr(word[1:-1].replace("''", "'"))
        if word[0].isalpha():
            value = self._contexts
            for name in word.split("."):
                value = value.get(name, "") if isinstance(value, dict) else ""
            return repr(value)
        return word


def _written(value: object) -> str:
    """As an expression's value is put into a text."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _outputs(text: str) -> dict[str, str]:
    """What a step wrote into its ``GITHUB_OUTPUT``."""
    found = {}
    while text:
        line, _, text = text.partition("\n")
        name, mark, value = re.split("(=|<<)", line, maxsplit=1)
        if mark == "<<":
            value, _, text = text.partition(f"\n{value}\n")
        found[name] = value
    return found
