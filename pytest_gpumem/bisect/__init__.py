"""The first of several variants in a row that is worse than the one before it."""
