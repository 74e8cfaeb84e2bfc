"""``gpumem accept``: baselines from the report of a session, which ran elsewhere."""
