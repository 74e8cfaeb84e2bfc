"""An ordinary training script, measured and judged as a test is."""
