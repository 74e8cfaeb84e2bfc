"""Comparison of two variants on the same machine: runs in turns, and verdicts on their bytes, counts and times."""
