"""Write comments and issues through GitHub's API. Annotations and summaries need no API, and are in `reports.github`."""
