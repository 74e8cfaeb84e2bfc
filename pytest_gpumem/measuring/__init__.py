"""Run a step, read its memory, counts and times, and explain its peak."""
