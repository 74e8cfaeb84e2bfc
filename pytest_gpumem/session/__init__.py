"""One process of a pytest session: its settings, its measured tests, and its report."""
