"""A session's report as a self-contained HTML file."""
