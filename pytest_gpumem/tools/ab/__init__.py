"""Compare two variants of a project's code or packages, by alternating test runs on the same machine."""
