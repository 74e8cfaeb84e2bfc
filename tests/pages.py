"""Patterns of the headings and code blocks of a page of the docs."""

from __future__ import annotations

import re

FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
"""A fenced block of code."""
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
