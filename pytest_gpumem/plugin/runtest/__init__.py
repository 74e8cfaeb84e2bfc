"""Run a measured test: hooks, own bytes, measurements, verdicts and explanations."""
