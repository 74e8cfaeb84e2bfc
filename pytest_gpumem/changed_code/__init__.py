"""Two versions of the code: the changed lines, and verdicts that name them first."""
