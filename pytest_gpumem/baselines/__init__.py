"""Baselines: what is accepted, and the store that keeps it."""
