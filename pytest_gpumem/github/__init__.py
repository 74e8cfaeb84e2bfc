"""Comments over GitHub's API. Output that needs no API is in `reports.github`."""
