"""Compute the values of small tensors on an emulated GPU, and record how a program uses the values that are not computed."""
