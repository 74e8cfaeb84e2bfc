"""The gate: the verdict on a measurement, and why."""
