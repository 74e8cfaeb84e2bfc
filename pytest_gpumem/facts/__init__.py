"""Frozen values that every house shares: measurements, metrics and their parts."""
