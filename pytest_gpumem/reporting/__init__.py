"""Texts and files from a session's results."""
