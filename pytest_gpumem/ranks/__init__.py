"""Ranks of a distributed job: how they were launched, what they decide together, and which ranks are stuck or missing."""
