"""What is told to GitHub over its REST API. What needs no API is in `reports.github`."""
