"""The pages of `docs/reference/`: each name of the code is one entry, and a stale page is named."""

from __future__ import annotations

import inspect
import re
from collections import Counter

import click
import pytest

from pytest_gpumem.base import variables
from pytest_gpumem.emulating.emulation.gpus import known_slices, known_words
from pytest_gpumem.judging.gate.verdict import Outcome
from pytest_gpumem.plugin import hookspecs
from pytest_gpumem.plugin.config.keys import BUDGET_KEYS, GPU_KEYS, MODEL_KEYS, OTHER_KEYS
from pytest_gpumem.plugin.config.options import OPTIONS
from pytest_gpumem.plugin.session.exit_status import EXIT_CODES
from pytest_gpumem.tools.advise.search_order import INFERENCE, candidates
from pytest_gpumem.tools.main import COMMANDS, main
from tests.pages import FENCE, ROOT

FOLDER = ROOT / "docs" / "reference"


def headings(*pages: str) -> Counter[str]:
    """How often each name is an entry of the pages: a heading that is code."""
    texts = [FENCE.sub("", (FOLDER / f"{page}.md").read_text(encoding="utf-8")) for page in pages]
    return Counter(name for text in texts for name in re.findall(r"^#+ `([^`]+)`$", text, flags=re.MULTILINE))


def first_cells(page: str) -> Counter[str]:
    """How often each name in code is in the first cell of a row."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.+?) \|", text, flags=re.MULTILINE)
    return Counter(name for cell in cells for name in re.findall(r"`([^`]+)`", cell))


def test_options_are_entries_of_their_page_in_the_order_of_help():
    assert list(headings("options")) == [option.flag for option in OPTIONS]


def test_options_that_are_keys_have_a_row_in_the_page_of_settings():
    rows = first_cells("settings")
    assert list(rows) == [option.name for option in OPTIONS if option.is_key]


def test_settings_that_are_no_options_are_entries():
    expected = [*OTHER_KEYS, *(f"budget.{key}" for key in BUDGET_KEYS)]
    assert headings("settings") == Counter(expected)
    assert headings("models-by-name") == Counter(f"models.{key}" for key in MODEL_KEYS)
    assert headings("cards") == Counter(f"gpus.NAME.{key}" for key in GPU_KEYS)


def test_settings_of_the_page_are_read_as_it_says():
    text = (FOLDER / "settings.md").read_text(encoding="utf-8")
    assert '- Type: a string\n- Default: `"2 s"`' in text.partition("## `time_budget`")[2].partition("\n## ")[0]
    options = (FOLDER / "options.md").read_text(encoding="utf-8")
    device = options.partition("## `--gpumem-device`")[2].partition("\n## ")[0]
    assert '- Key: ``device`` (a string)\n- Default: ``"cuda"``' in device


def test_verdicts_are_entries_in_the_order_of_their_weight():
    assert list(headings("verdicts")) == [outcome.value for outcome in Outcome]


def test_exit_codes_of_pytest_have_a_row_each():
    rows = first_cells("verdicts")
    assert {int(name): count for name, count in rows.items() if name.isdigit()} == dict.fromkeys(
        map(int, EXIT_CODES), 1
    )
    assert [*EXIT_CODES] == [*pytest.ExitCode][:6]


def test_cards_have_a_row_each():
    text = (FOLDER / "cards.md").read_text(encoding="utf-8").partition("\n## Cards\n")[2]
    cells = re.findall(r"^\| (.+?) \|", text, flags=re.MULTILINE)
    words = Counter(name for cell in cells for name in re.findall(r"`([^`]+)`", cell))
    assert words == Counter([*known_words(), *(gpu.word for gpu in known_slices())])


def names_of_variables() -> list[str]:
    return [value for name, value in vars(variables).items() if name.isupper()]


def test_environment_variables_are_entries():
    assert headings("environment") == Counter(names_of_variables())


def test_environment_variables_read_by_the_package_are_on_the_page_or_foreign():
    """A literal beside `os.environ` is a variable that a program sets: pytest, a launcher, GitHub Actions."""
    set_by_others = {
        "PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "PYTEST_CURRENT_TEST", "RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
        "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "USERNAME", "PYTHONPATH",
        "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "GPUMEM_EMULATED", "GPUMEM_USAGE", "PATH",
        "XDG_RUNTIME_DIR",
    }  # fmt: skip
    named = {
        name
        for path in (ROOT / "pytest_gpumem").rglob("*.py")
        for name in re.findall(r'environ(?:ment)?(?:\.get\(|\[)"([A-Z_]+)"', path.read_text(encoding="utf-8"))
    }
    assert {name for name in named if not name.startswith("GITHUB_")} <= set_by_others
    native = {
        name
        for path in (ROOT / "pytest_gpumem").rglob("*.c")
        for name in re.findall(r'getenv\("([A-Z_]+)"\)', path.read_text(encoding="utf-8"))
    }
    assert native <= set(names_of_variables())


def test_hooks_are_entries_with_their_arguments():
    hooks = [name for name in vars(hookspecs) if name.startswith("pytest_gpumem_")]
    assert list(headings("hooks")) == hooks


class TestCommands:
    GROUP = click.Context(main, info_name="gpumem")

    def options(self, command: click.Command) -> set[str]:
        """The longest name of each option that a command's help shows, those of its own commands included."""
        context = click.Context(command, parent=self.GROUP)
        found = {
            max(option.opts, key=len)
            for option in command.get_params(context)
            if isinstance(option, click.Option) and not option.hidden
        } - {"--help"}
        if isinstance(command, click.Group):
            found |= {
                name
                for word in command.list_commands(context)
                for name in self.options(command.get_command(context, word))
            }
        return found

    @pytest.mark.parametrize("name", COMMANDS)
    def test_a_command_and_each_of_its_options_has_one_entry(self, name):
        command = main.get_command(self.GROUP, name)
        expected = {f"gpumem {name}", *self.options(command)}
        if isinstance(command, click.Group):
            expected |= {f"gpumem {name} {word}" for word in command.list_commands(self.GROUP)}
        of_pytest = {option for option in expected if option.startswith("--gpumem-")}
        assert headings(f"command-{name}") == dict.fromkeys(expected - of_pytest, 1)
        options = headings("options")
        assert {option: options[option] for option in of_pytest} == dict.fromkeys(of_pytest, 1)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_the_page_has_each_exit_status_that_the_help_names(self, name):
        help_text = " ".join(str(main.get_command(self.GROUP, name).help).split()).partition("Exit status: ")[2]
        section = (
            (FOLDER / f"command-{name}.md")
            .read_text(encoding="utf-8")
            .partition("\n## Exit status\n")[2]
            .partition("\n## ")[0]
        )
        listed = re.findall(r"^- `(\d+)` \w", section, flags=re.MULTILINE)
        assert listed == re.findall(r"(?:^|, )(\d+) (?=if |when |for |after )", help_text)

    def test_the_help_of_advise_has_the_configs_in_the_order_of_the_search(self):
        help_text = inspect.cleandoc(main.get_command(self.GROUP, "advise").help)
        training, inference = re.split(r"\n  inference ", help_text.partition("  training ")[2].partition("\b")[0])
        words = [str(value) for _, values in candidates(16) for value in values]
        told = re.findall(r"[\w.-]+", re.sub(r"\b(?:checkpoint|accumulate|optimizer)=", "", training))
        assert [word for word in told if word in words] == words
        assert re.findall(r"`([^`]+)`", inference) == [str(config) for config in INFERENCE]
