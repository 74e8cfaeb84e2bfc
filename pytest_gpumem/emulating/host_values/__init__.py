"""Compute small tensors on an emulated GPU, and record uses of uncomputed values."""
