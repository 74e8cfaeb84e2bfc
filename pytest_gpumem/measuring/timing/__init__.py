"""Sampling of times and their statistics."""
