"""Measures memory, counts, times and growth in a step that repeats."""
