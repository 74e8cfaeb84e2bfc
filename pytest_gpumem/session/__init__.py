"""One process of a pytest session: its plugins, its ranks and its store."""
