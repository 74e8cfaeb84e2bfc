"""Functions that use internals of torch and Python: private names, users' objects, frames, and the garbage collector."""
