"""Emulate a GPU: stand-ins for CUDA's libraries, and small tensors computed on the host."""
