"""Frozen values that are measured, recorded and reported, to and from plain ones. Nothing here imports torch."""
