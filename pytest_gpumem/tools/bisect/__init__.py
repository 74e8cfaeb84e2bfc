"""Bisection: find the first commit or package release that makes a test worse."""
