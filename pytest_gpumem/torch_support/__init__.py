"""Access to internals of torch and Python: private names, users' objects, frames, the cyclic collector."""
