"""Relations between steps: they hold on every machine, and need no baseline."""
