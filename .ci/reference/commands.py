"""The pages of the commands, made from click's commands.

A command's docstring has a help text, a block ``Examples:``, and a paragraph that begins with ``Exit status:``. The text behind
a form feed is Markdown for the page alone, which `--help` leaves out.
"""

from __future__ import annotations

import inspect
import re
from functools import partial
from typing import TYPE_CHECKING

import click

from pytest_gpumem.cli.main import main
from reference.markdown import page, paragraphs

if TYPE_CHECKING:
    from collections.abc import Callable


def pages() -> dict[str, Callable[[], str]]:
    """Return a function for the page of each command, by the name of its file."""
    context = click.Context(main, info_name="gpumem")
    return {f"command-{name}": partial(_page, context, name) for name in main.list_commands(context)}


def _page(group: click.Context, name: str) -> str:
    command = main.get_command(group, name)
    assert command is not None
    context = click.Context(command, info_name=name, parent=group)
    help_text, _, details = inspect.cleandoc(command.callback.__doc__ or "").partition("\f")
    text, examples, status = _parts(help_text)
    summary, _, rest = text.partition("\n\n")
    usage = " ".join(["gpumem", name, *command.collect_usage_pieces(context)])
    return page(
        f"`gpumem {name}`",
        paragraphs(summary),
        f"```text\n{usage}\n```",
        paragraphs(rest),
        f"## Examples\n\n```sh\n{examples}\n```" if examples else "",
        _options(command, context),
        f"## Exit status\n\n{_statuses(status)}" if status else "",
        inspect.cleandoc(details),
    )


def _parts(help_text: str) -> tuple[str, str, str]:
    """Return the text, the examples and the exit status of a help text."""
    kept, examples, status = [], "", ""
    for block in re.split(r"\n\s*\n", help_text):
        lines = block.replace("\b", "").strip("\n").splitlines()
        if lines and lines[0].strip() == "Examples:":
            examples = "\n".join(line.strip() for line in lines[1:])
        elif lines and lines[0].startswith("Exit status:"):
            status = " ".join(" ".join(lines).split()).removeprefix("Exit status:").strip()
        else:
            kept.append("\n".join(lines))
    return "\n\n".join(kept), examples, status


def _statuses(text: str) -> str:
    """Return a list with an item for each exit status of a sentence: ``0 when ..., 1 when ..., 2 for ...``."""
    items = re.split(r",? (?:and )?(?=\d+ (?:when|if|for|after)\b)", text)
    if len(items) < 2:
        return text
    return "\n".join(f"- `{item.split()[0]}` {' '.join(item.split()[1:]).rstrip('.')}." for item in items)


def _options(command: click.Command, context: click.Context) -> str:
    rows = []
    for parameter in command.get_params(context):
        if not isinstance(parameter, click.Option) or parameter.hidden or "--help" in parameter.opts:
            continue
        record = parameter.get_help_record(context)
        assert record is not None
        written, text = record
        default = re.search(r"\[default: ([^\]]*)\]", text)
        text = re.sub(r"\s*\[(?:default|required|env var)[^\]]*\]", "", text)
        shown = f"`{default[1].split(';')[0]}`" if default else ""
        rows.append(
            f"### `{parameter.opts[-1]}`\n\n`{written}`" + (f", default {shown}" if shown else "") + f"\n\n{text}"
        )
    return "## Options\n\n" + "\n\n".join(rows) if rows else ""
