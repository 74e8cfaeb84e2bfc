"""Reports as pure functions of verdicts."""
