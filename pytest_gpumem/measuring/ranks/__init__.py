"""Ranks of a distributed job: their launch, their common decisions, and the search for stuck or missing ranks."""
