"""Bisection: find the first commit or release in a row that is worse than its predecessor."""
