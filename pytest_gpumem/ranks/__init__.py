"""The ranks of a distributed job: how they were launched, what they agree on, and which of them is stuck or gone."""
