"""Code of two versions: which lines have changed, and what that says of a difference."""
