"""The generator of `docs/reference/`: `python .ci/reference` writes the pages."""
