"""Relations between steps, which are true on every machine and need no baseline."""
