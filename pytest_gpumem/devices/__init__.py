"""Devices that run steps, with readings of their bytes and seconds. Code outside this folder never asks "is it cuda?"."""
