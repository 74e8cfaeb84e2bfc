"""``gpumem accept``: takes baselines from the report of a session that ran elsewhere."""
