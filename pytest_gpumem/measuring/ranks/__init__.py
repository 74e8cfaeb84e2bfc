"""The ranks of a distributed job: their launch, their shared decisions, and the search for stuck or missing ranks."""
