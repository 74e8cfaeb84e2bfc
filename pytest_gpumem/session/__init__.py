"""One process of a pytest session: what it measures, under which settings, and what it makes of it."""
