"""Comments through GitHub's API. Output without the API is in `reports.github`."""
