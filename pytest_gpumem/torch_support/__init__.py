"""Access to torch's and Python's internals: private names, users' objects, frames, the cyclic collector."""
