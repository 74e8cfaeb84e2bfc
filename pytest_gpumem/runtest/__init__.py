"""One measured test: its hooks, what belongs to it, its measurements, their judging and explaining."""
