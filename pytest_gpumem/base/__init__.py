"""Tools for files, processes, git, packages and units. Nothing here knows what is measured."""
