"""A session's report as one HTML file that needs nothing else."""
