"""A GPU's memory without a GPU: the CUDA build of torch over stand-ins for the libraries that talk to the driver."""
