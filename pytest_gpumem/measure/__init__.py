"""Measures a step that repeats, whatever made it: memory, counts, times and growth, over as many steps as it takes."""
