"""Checks for ``gpumem doctor``: collect facts about the machine and the project, then derive findings from them."""
