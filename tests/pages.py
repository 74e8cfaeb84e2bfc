"""What a page of the docs is made of."""

from __future__ import annotations

import re

FENCE = re.compile(r'^```(?P<language>\w*)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL)
"""A fenced block of code."""
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
