"""The store with accepted baselines."""
