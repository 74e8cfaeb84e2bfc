"""Which GPUs a program fits into: run on emulated ones, and judged by whether PyTorch's allocator ran out of memory."""
