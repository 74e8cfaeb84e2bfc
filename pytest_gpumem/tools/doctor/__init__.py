"""Checks for ``gpumem doctor``. It collects facts about the machine and the project, and derives findings from the facts."""
