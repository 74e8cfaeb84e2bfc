"""What every test of the suite may use."""

from __future__ import annotations

pytest_plugins = ["pytester"]
