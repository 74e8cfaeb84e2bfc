"""Advice: which step config makes a model fit, tried in the order in which people should."""
