"""Comparison of two variants of the code or its packages, by alternating runs on the same machine."""
