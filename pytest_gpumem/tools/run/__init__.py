"""``gpumem run``: measures and gates the steps of a script."""
