"""What is asked of torch and of Python's runtime: private names of torch, users' objects, frames, the cyclic collector."""
