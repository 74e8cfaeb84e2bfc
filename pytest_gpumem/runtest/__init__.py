"""The run of one measured test: hooks, ownership of bytes, measurements, verdicts and explanations."""
