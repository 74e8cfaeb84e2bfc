"""A GPU that is not there: stand-ins for CUDA's libraries, and values of small tensors."""
