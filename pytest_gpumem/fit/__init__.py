"""Find the GPUs that a program fits into: run on emulated ones, and judged by PyTorch's allocator running out of memory."""
