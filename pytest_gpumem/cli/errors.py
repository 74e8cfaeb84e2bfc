"""What ends a command before it has anything to say: exit status 2, as click has it for wrong usage."""

from __future__ import annotations

import sys

import click

from pytest_gpumem.reports.text_width import Screen


class InputError(click.ClickException):
    """Something that was given cannot be used; the message says what, and what would be right.

    Each of ``lines`` is made legible, since ids of tests may be in it: a line of theirs could command whoever reads logs.
    """

    exit_code = 2

    def __init__(self, *lines: str) -> None:
        screen = Screen(encoding=getattr(sys.stderr, "encoding", None) or "utf-8")
        super().__init__("\n".join(map(screen.legible, lines)))
