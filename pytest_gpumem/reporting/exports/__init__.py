"""A session's figures for other tools. Each format has a file with a function from figures to text."""
