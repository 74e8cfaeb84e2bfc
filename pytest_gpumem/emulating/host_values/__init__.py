"""Compute the values of small tensors on an emulated GPU, and record how a program uses all other values."""
