r"""The pages of the commands, made from click's commands.

A command's docstring has a help text, a block ``Examples:``, and a paragraph that begins with ``Exit status:``. The text behind
a form feed is Markdown for the page alone, which `--help` leaves out. There, a section headed by an option in code adds
paragraphs to the entry of this option. Other sections stand at the end of the page.

In a help text, options and the names of arguments become code by themselves. Lines behind ``\b`` become a list or a table.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from functools import partial
from typing import TYPE_CHECKING

import click

from pytest_gpumem.tools.main import GROUPS, main
from reference.markdown import page, paragraphs, table

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_OF_PYTEST = "--gpumem-"
"""Begins the options that a command shares with pytest: their entries are on the page of these."""
_NOT_A_NAME = frozenset({"GPU", "ID", "JSON", "TEXT", "URL"})
"""Words in capitals that mean themselves, although an argument has the same name."""
_WIDTH = 80


def pages() -> dict[str, Callable[[], str]]:
    """Return a function for each page by the name of its file: the page about all commands, and one for each command."""
    context = click.Context(main, info_name="gpumem")
    names = main.list_commands(context)
    return {"commands": partial(_common_page, context)} | {
        f"command-{name}": partial(_page, context, name) for name in names
    }


def _common_page(context: click.Context) -> str:
    help_text = _Help(main, context)
    groups = [
        "\n".join([f"{title}:\n", *(f"- `gpumem {name}`: {subcommand.help}" for name, subcommand in group.items())])
        for title, group in GROUPS.items()
    ]
    return page(
        "Commands",
        help_text.summary,
        help_text.usage,
        help_text.body,
        "\n\n".join(["## All commands", *groups]),
        *help_text.sections(_options([(main, context)], help_text.details)),
    )


def _page(group: click.Context, name: str) -> str:
    assert isinstance(group.command, click.Group)
    command = _command(group.command, group, name)
    context = click.Context(command, info_name=name, parent=group)
    help_text = _Help(command, context)
    owners = [(command, context)]
    subcommands = []
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            subcommand = _command(command, context, word)
            owners.append((subcommand, click.Context(subcommand, info_name=word, parent=context)))
            subcommands.append(_subcommand(*owners[-1]))
    return page(
        f"`gpumem {name}`",
        help_text.summary,
        help_text.usage,
        help_text.body,
        *help_text.sections(_options(owners, help_text.details), subcommands),
    )


def _command(group: click.Group, context: click.Context, name: str) -> click.Command:
    command = group.get_command(context, name)
    assert command is not None
    return command


def _subcommand(command: click.Command, context: click.Context) -> str:
    """Return the section about a command of a command."""
    help_text = _Help(command, context)
    parts = [f"## `{context.command_path}`", help_text.summary, help_text.usage, help_text.body, help_text.examples]
    return "\n\n".join(part for part in [*parts, help_text.rest] if part)


class _Help:
    """The parts of a command's docstring, in Markdown."""

    def __init__(self, command: click.Command, context: click.Context) -> None:
        text, _, details = inspect.cleandoc(command.callback.__doc__ or "").partition("\f")
        names = _names_of_arguments(command, context)
        kept, self.examples, self.status = [], "", ""
        for block in re.split(r"\n\s*\n", text):
            keeps_lines, lines = "\b" in block, block.replace("\b", "").strip("\n").splitlines()
            if lines and lines[0].strip() in ("Example:", "Examples:"):
                self.examples = "\n".join(["```sh", *(line.strip() for line in lines[1:]), "```"])
            elif lines and lines[0].startswith("Exit status:"):
                sentence = " ".join(" ".join(lines).split()).removeprefix("Exit status:").strip()
                self.status = _in_code(_statuses(sentence), names)
            elif keeps_lines:
                kept.append(_in_code(_kept_lines(lines), names))
            else:
                kept.append(_in_code(paragraphs("\n".join(lines)), names))
        self.summary, self.body = kept[0], "\n\n".join(kept[1:])
        self.usage = f"```text\n{_usage(command, context)}\n```"
        self.details, self.rest = _split_details(details)

    def sections(self, options: str, between: Iterable[str] = ()) -> Iterator[str]:
        """Yield the sections of a page behind its body."""
        yield f"## Examples\n\n{self.examples}" if self.examples else ""
        yield from between
        yield f"## Options\n\n{options}" if options else ""
        yield f"## Exit status\n\n{self.status}" if self.status else ""
        yield self.rest


def _split_details(text: str) -> tuple[dict[str, str], str]:
    """Return the Markdown behind the form feed: that of each option by its name, and the rest."""
    parts = re.split(r"^## `(--?[\w-]+)`$", inspect.cleandoc(text), flags=re.MULTILINE)
    rest, of_options = [parts[0].strip()], {}
    for name, body in zip(parts[1::2], parts[2::2], strict=True):
        own, heading, following = body.partition("\n## ")
        of_options[name] = own.strip()
        rest.append(f"{heading}{following}".strip())
    return of_options, "\n\n".join(part for part in rest if part)


def _names_of_arguments(command: click.Command, context: click.Context) -> list[str]:
    """Return the words in capitals by which a command's help calls its arguments and the values of its options."""
    metavars = [_metavar(parameter, context) for parameter in command.params]
    written = " ".join([*command.collect_usage_pieces(context), *metavars])
    words = set(re.findall(r"\b[A-Z][A-Z_]*(?:\.json)?\b", written)) - _NOT_A_NAME - {"OPTIONS", "A", "I"}
    return sorted(words, key=len, reverse=True)


def _in_code(text: str, names: Iterable[str]) -> str:
    """Return Markdown with options and the names of arguments as code, where they are not yet."""
    words = "|".join(
        [
            r"(?<![\w-])--[a-z][a-z-]*(?:=[^\s,;)]*[^\s,;).])?",
            *(rf"(?<![\w/-]){re.escape(name)}(?![\w/])" for name in names),
        ]
    )
    kept = r"^```.*?^```$|`[^`\n]+`"
    return re.sub(
        f"(?P<kept>{kept})|(?P<word>{words})",
        lambda match: match["kept"] or f"`{match['word']}`",
        text,
        flags=re.MULTILINE | re.DOTALL,
    )


def _kept_lines(lines: list[str]) -> str:
    """Return a table for lines ``Task:  command``, or a list for a heading and lines ``  term  meaning``."""
    tasks = [re.fullmatch(r"(\S.*?):? {2,}(gpumem .*)", line) for line in lines]
    if all(tasks):
        return table(("task", "command"), ((match[1], f"`{match[2]}`") for match in tasks if match))
    heading, items = [], list[str]()
    for line in lines:
        term = re.fullmatch(r" {2}(\S.*?) {2,}(\S.*)", line)
        if term:
            # A word is a heading, anything else can be typed.
            items.append(f"- {term[1] if term[1].isalpha() else f'`{term[1]}`'}: {term[2]}")
        elif items:
            items[-1] += f" {line.strip()}"
        else:
            heading.append(line.strip())
    return "\n".join([" ".join(heading), "", *items])


def _statuses(text: str) -> str:
    """Return a list with an item for each exit status of a sentence, ``0 if ..., 1 if ..., 2 for ...``, and then the rest."""
    sentence, stop, rest = text.partition(". ")
    items = re.split(r",? (?:and )?(?=\d+ (?:when|if|for|after)\b)", sentence)
    if len(items) < 2:
        return text
    listed = [f"- `{item.split()[0]}` {' '.join(item.split()[1:]).rstrip('.')}." for item in items]
    return "\n".join([*listed, "", rest] if stop else listed)


def _usage(command: click.Command, context: click.Context) -> str:
    """Return the whole usage, with each option, in lines of a page's width."""
    pieces = []
    for piece in command.collect_usage_pieces(context):
        if piece == "[OPTIONS]":
            pieces += [_usage_of(option, context) for option in _visible(command, context)]
        else:
            pieces.append(piece)
    begin = f"{context.command_path} "
    # A piece is not broken at the spaces within it.
    text = " ".join(piece.replace(" ", "\0") for piece in pieces)
    lines = textwrap.wrap(text, _WIDTH - len(begin), break_long_words=False, break_on_hyphens=False)
    return (begin + f"\n{' ' * len(begin)}".join(lines)).replace("\0", " ")


def _usage_of(option: click.Option, context: click.Context) -> str:
    names = " | ".join([_name(option), *option.secondary_opts])
    value = "" if option.is_flag or option.count else f" {_metavar(option, context).strip('[]')}"
    written = f"{names}{value}" if option.required else f"[{names}{value}]"
    return f"{written}..." if option.multiple else written


def _visible(command: click.Command, context: click.Context) -> list[click.Option]:
    """Return the options that have an entry on the page of a command."""
    return [
        parameter
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option)
        and not (parameter.hidden or "--help" in parameter.opts or _name(parameter).startswith(_OF_PYTEST))
    ]


def _name(option: click.Option) -> str:
    """Return the longest name of an option: ``--quiet``, not ``-q``."""
    return max(option.opts, key=len)


def _metavar(parameter: click.Parameter, context: click.Context) -> str:
    return "" if isinstance(parameter, click.Option) and parameter.is_flag else parameter.make_metavar(context)


def _options(owners: list[tuple[click.Command, click.Context]], details: Mapping[str, str]) -> str:
    """Return the entries of the options of a command, or of all commands of a group: one for each option."""
    users: dict[str, dict[str, list[str]]] = {}
    for command, context in owners:
        names = _names_of_arguments(command, context)
        for option in _visible(command, context):
            entry = _entry(option, context, names)
            users.setdefault(_name(option), {}).setdefault(entry, []).append(f"`{context.info_name}`")
    is_of_all = max(len(owners) - 1, 1)
    written = []
    for name, entries in users.items():
        texts = [
            entry if len(commands) == is_of_all else f"For {', '.join(commands)}: {entry}"
            for entry, commands in entries.items()
        ]
        written.append("\n\n".join(filter(None, [f"### `{name}`", *texts, details.get(name, "")])))
    unknown = details.keys() - users.keys()
    assert not unknown, f"{owners[0][1].command_path} has no option {', '.join(unknown)}"
    shared = [
        f"`{_name(option)}`"
        for command, context in owners
        for option in command.get_params(context)
        if isinstance(option, click.Option) and _name(option).startswith(_OF_PYTEST)
    ]
    if shared:
        written.append(f"### Options of pytest\n\nThese options mean what they mean for pytest: {', '.join(shared)}.")
    return "\n\n".join(written)


def _entry(option: click.Option, context: click.Context, names: Iterable[str]) -> str:
    """Return the way in which an option is written, its default and its help."""
    value = "" if option.is_flag or option.count else f" {_metavar(option, context)}"
    written = ", ".join(
        f"`{name}{value}`" for name in [*sorted(option.opts, key=len, reverse=True), *option.secondary_opts]
    )
    extra = option.get_help_extra(context)
    # As text, since a value in code could become a link to something else of this name.
    facts = [f"default {extra['default']}"] if "default" in extra else []
    if isinstance(option.type, click.IntRange) and (option.type.min or 0) > 1:
        facts.append(f"at least {option.type.min}")
    written += f" ({', '.join(facts)})" if facts else ""
    text = _in_code(paragraphs(option.help or ""), names)
    if isinstance(option.type, click.Choice) and option.metavar:
        text += f"\n\nOne of {', '.join(f'`{choice}`' for choice in option.type.choices)}."
    return f"{written}\n\n{text}"
