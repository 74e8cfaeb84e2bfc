"""Frozen values for measurements, recordings and reports, and their conversion to plain values. No module imports torch."""
