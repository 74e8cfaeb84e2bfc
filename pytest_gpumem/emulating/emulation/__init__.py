"""Emulate a GPU's memory: run the CUDA build of torch with stand-ins for the libraries above NVIDIA's driver."""
