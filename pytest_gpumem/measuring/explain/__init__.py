"""Explanation of a peak: recorded events, block lifetimes, and the composition of the live bytes."""
