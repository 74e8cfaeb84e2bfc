"""True values of small tensors on an emulated GPU, and what depends on the others, which are not computed."""
