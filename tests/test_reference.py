"""The pages in `docs/reference/`: each name in the code has one entry there."""

from __future__ import annotations

import inspect
import re
from collections import Counter

import click
import pytest

from pytest_gpumem.advice.search_order import INFERENCE, candidates
from pytest_gpumem.cli.main import COMMANDS, main
from tests.pages import FENCE, read


def entries_of(page: str) -> Counter[str]:
    """How often each name in code is the heading of an entry."""
    return Counter(re.findall(r"^#+ `([^`]+)`$", FENCE.sub("", read(f"docs/reference/{page}.md")), flags=re.MULTILINE))


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
        assert entries_of(f"command-{name}") == dict.fromkeys(expected - of_pytest, 1)
        options = entries_of("options")
        assert {option: options[option] for option in of_pytest} == dict.fromkeys(of_pytest, 1)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_the_page_has_each_exit_status_that_the_help_names(self, name):
        help_text = " ".join(str(main.get_command(self.GROUP, name).help).split()).partition("Exit status: ")[2]
        section = read(f"docs/reference/command-{name}.md").partition("\n## Exit status\n")[2].partition("\n## ")[0]
        listed = re.findall(r"^- `(\d+)` \w", section, flags=re.MULTILINE)
        assert listed == re.findall(r"(?:^|, )(\d+) (?=if |when |for |after )", help_text)

    def test_the_help_of_advise_has_the_configs_in_the_order_of_the_search(self):
        help_text = inspect.cleandoc(main.get_command(self.GROUP, "advise").help)
        training, inference = re.split(r"\n  inference ", help_text.partition("  training ")[2].partition("\b")[0])
        words = [str(value) for _, values in candidates(16) for value in values]
        told = re.findall(r"[\w.-]+", re.sub(r"\b(?:checkpoint|accumulate|optimizer)=", "", training))
        assert [word for word in told if word in words] == words
        assert re.findall(r"`([^`]+)`", inference) == [str(config) for config in INFERENCE]
