"""The gate: what is said of a measurement, and why."""
