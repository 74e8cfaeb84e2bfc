"""``python -m pytest_gpumem``: the ``gpumem`` command."""

from __future__ import annotations

from pytest_gpumem.tools.main import main

if __name__ == "__main__":
    main()
