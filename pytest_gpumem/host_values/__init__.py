"""Compute the values of small tensors on an emulated GPU, and record uses of uncomputed values."""
