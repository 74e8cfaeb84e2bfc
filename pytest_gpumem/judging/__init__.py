"""Verdicts on measurements, and the store with accepted baselines."""
