"""Sampling of times, and their validity."""
