"""Emulate a GPU's memory: run the CUDA build of torch with stand-ins for NVIDIA's driver and libraries."""
